"""A scripted engine behind a real Unix socket: it says exactly what a test tells it to say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rollspan.protocol import codec
from rollspan.protocol.framing import FrameKind, FrameReader, encode_frame
from rollspan.protocol.messages import (
    DeadNotice,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineHello,
    FinishReason,
    Limits,
    LogprobsLists,
    ModelFacts,
    UtilityCall,
    UtilityOutput,
)

HELLO = EngineHello(
    limits=Limits(
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_logprobs=5,
        vocab_size=100,
        block_size=16,
        num_blocks=64,
    ),
    model=ModelFacts("fake", "FakeForCausalLM", "float32", "cpu", 1, [99, 98]),
    weight_version="default",
    weight_commit=0,
    rollspan_version="0.0.0",
    pid=1,
)


def batch(*outputs: EngineCoreOutput, version: str | None = "A", commit: int | None = 0) -> EngineCoreOutputs:
    """One step's message."""
    return EngineCoreOutputs(outputs=list(outputs), timestamp=1.0, weight_version=version, weight_commit=commit)


def output(request_id: str, *tokens: int, finish: FinishReason | None = None, **fields: Any) -> EngineCoreOutput:
    """What one step produced for one request."""
    return EngineCoreOutput(request_id, list(tokens), finish_reason=finish, **fields)


def logprobs(*rows: list[tuple[int, float, int]]) -> LogprobsLists:
    """One row a position: (token, log-prob, rank) of the sampled token, then of the top ones in rank order."""
    return LogprobsLists(
        np.array([[token for token, _, _ in row] for row in rows], dtype=np.int32),
        np.array([[value for _, value, _ in row] for row in rows], dtype=np.float32),
        np.array([row[0][2] for row in rows], dtype=np.int32),
    )


class FakeEngine:
    """Listens on ``path`` inside ``async with``; what a frontend sends lands in the queues.

    Utility calls are answered by ``answers[method](*args)`` where there is such an entry, a raised `RefusalError` is a
    failure; other calls wait in ``calls`` for the test to `reply`.
    """

    def __init__(self, path: Path, hello: EngineHello = HELLO) -> None:
        self.path = path
        self.hello = hello
        self.requests: asyncio.Queue[EngineCoreRequest] = asyncio.Queue()
        self.aborts: asyncio.Queue[list[str]] = asyncio.Queue()
        self.calls: asyncio.Queue[UtilityCall] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.answers: dict[str, Callable[..., Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FakeEngine:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()

    def send(self, message: EngineCoreOutputs) -> None:
        self.send_frame(FrameKind.OUTPUTS, codec.encode_outputs(message))

    def step(self, *outputs: EngineCoreOutput, version: str | None = "A", commit: int | None = 0) -> None:
        self.send(batch(*outputs, version=version, commit=commit))

    def reply(self, call_id: int, result: Any = None, failure: str | None = None, reason: str | None = None) -> None:
        self.send(EngineCoreOutputs(timestamp=1.0, utility_output=UtilityOutput(call_id, failure, result, reason)))

    def die(self, message: str) -> None:
        self.send_frame(FrameKind.DEAD, codec.encode_dead(DeadNotice("engine_error", message)))
        self.hang_up()

    def send_frame(self, kind: FrameKind, payload: bytes) -> None:
        self.send_bytes(encode_frame(kind, payload))

    def send_bytes(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    def hang_up(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.send_frame(FrameKind.ENGINE_HELLO, codec.encode_engine_hello(self.hello))
        frames = FrameReader()
        try:
            while data := await reader.read(65536):
                for kind, payload in frames.feed(data):
                    self._receive(kind, payload)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.closed.set()
            writer.close()

    def _receive(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.CLIENT_HELLO:
            codec.decode_client_hello(payload)
        elif kind is FrameKind.ADD:
            self.requests.put_nowait(codec.decode_request(payload))
        elif kind is FrameKind.ABORT:
            self.aborts.put_nowait(codec.decode_abort(payload))
        else:
            call = codec.decode_utility_call(payload)
            if call.method not in self.answers:
                self.calls.put_nowait(call)
                return
            try:
                self.reply(call.call_id, self.answers[call.method](*call.args))
            except RefusalError as refusal:
                self.reply(call.call_id, failure=str(refusal), reason=refusal.reason)


class RefusalError(Exception):
    """Raised by an entry of `FakeEngine.answers` to fail the call."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
