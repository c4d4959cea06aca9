"""A scripted engine on a Unix socket: the test reads what the frontend sends and says what the engine answers."""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rollspan.protocol import codec
from rollspan.protocol.framing import FrameKind, FrameReader, encode_frame
from rollspan.protocol.messages import (
    ClientHello,
    DeadNotice,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineHello,
    FinishReason,
    Limits,
    ModelFacts,
    UtilityCall,
    UtilityOutput,
)

WAIT_SECONDS = 10.0

HELLO = EngineHello(
    limits=Limits(
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_logprobs=20,
        vocab_size=32,
        block_size=16,
        num_blocks=64,
    ),
    model=ModelFacts(
        name="mock",
        architecture="MockForCausalLM",
        dtype="float32",
        device="cpu",
        num_parameters=1,
        eos_token_ids=[2],
    ),
    weight_version="default",
    weight_commit=0,
    rollspan_version="0.0.0",
    pid=1,
)

Item = TypeVar("Item")


class MockEngine:
    """Listens at once; `accept` plays the engine that is ready. Every wait fails after ten seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()
        self._listener.settimeout(WAIT_SECONDS)
        self._link: socket.socket | None = None
        self._requests: queue.Queue[EngineCoreRequest] = queue.Queue()
        self._aborts: queue.Queue[str] = queue.Queue()
        self._calls: queue.Queue[UtilityCall] = queue.Queue()
        self.link_closed = threading.Event()
        self.client_hello: ClientHello | None = None

    def accept(self, hello: EngineHello = HELLO) -> None:
        """Takes the frontend's connection and says hello."""
        self.connect()
        self._send(FrameKind.ENGINE_HELLO, codec.encode_engine_hello(hello))

    def connect(self) -> None:
        """Takes the frontend's connection and reads its hello; says nothing yet."""
        self._link, _ = self._listener.accept()
        reader = FrameReader()
        frames = reader.feed(self._link.recv(65536))
        kind, payload = frames.pop(0)
        assert kind is FrameKind.CLIENT_HELLO
        self.client_hello = codec.decode_client_hello(payload)
        threading.Thread(target=self._read, args=(self._link, reader), daemon=True).start()

    def next_request(self) -> EngineCoreRequest:
        """The next ADD."""
        return self._next(self._requests)

    def next_abort(self) -> str:
        """The next aborted internal id."""
        return self._next(self._aborts)

    def next_call(self, method: str) -> UtilityCall:
        """The next utility call, which must be of ``method``."""
        call = self._next(self._calls)
        assert call.method == method
        return call

    def forget(self) -> None:
        """Drops what was received and not asked for, so that a failed test does not fail the next one."""
        for items in (self._requests, self._aborts, self._calls):
            while not items.empty():
                items.get()

    def pending_call(self) -> UtilityCall | None:
        """The next utility call, if it comes soon."""
        try:
            return self._calls.get(timeout=0.001)
        except queue.Empty:
            return None

    @property
    def has_pending_request(self) -> bool:
        return not self._requests.empty()

    def batch(
        self,
        outputs: Sequence[EngineCoreOutput],
        version: str | None = "default",
        commit: int | None = 0,
        engine_index: int = 0,
    ) -> None:
        """Sends one step's outputs."""
        stamp = {"engine_index": engine_index, "weight_version": version, "weight_commit": commit}
        self._send_outputs(EngineCoreOutputs(outputs=list(outputs), timestamp=1.0, **stamp))  # type: ignore[arg-type]

    def tokens(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        finish: FinishReason | None = None,
        version: str | None = "default",
        commit: int | None = 0,
        **fields: Any,
    ) -> None:
        """Sends new tokens of one request."""
        engine_index = fields.pop("engine_index", 0)
        output = EngineCoreOutput(
            request_id=request_id,
            new_token_ids=list(token_ids),
            finish_reason=finish,
            admission=fields.pop("admission", ("default", 0)),
            **fields,
        )
        self.batch([output], version, commit, engine_index)

    def stats(self, version: str, commit: int, **stats: Any) -> None:
        """Sends scheduler stats."""
        self._send_outputs(EngineCoreOutputs(scheduler_stats=stats, weight_version=version, weight_commit=commit))

    def reply(self, call: UtilityCall, result: Any = None) -> None:
        """Answers a utility call."""
        self._send_outputs(EngineCoreOutputs(utility_output=UtilityOutput(call.call_id, result=result)))

    def refuse(self, call: UtilityCall, failure: str, reason: str | None) -> None:
        """Fails a utility call."""
        self._send_outputs(
            EngineCoreOutputs(utility_output=UtilityOutput(call.call_id, failure=failure, reason=reason))
        )

    def dead(self, message: str) -> None:
        """Says DEAD and closes."""
        self._send(FrameKind.DEAD, codec.encode_dead(DeadNotice("engine_dead", message)))
        self.close()

    def raw(self, kind: FrameKind, payload: bytes) -> None:
        """Sends any frame."""
        self._send(kind, payload)

    def close(self) -> None:
        """The engine's process is gone."""
        self._listener.close()
        if self._link is not None:
            self._link.shutdown(socket.SHUT_RDWR)
            self._link.close()
            self._link = None

    def _read(self, link: socket.socket, reader: FrameReader) -> None:
        try:
            while data := link.recv(65536):
                for kind, payload in reader.feed(data):
                    self._dispatch(kind, payload)
        except OSError:
            pass
        self.link_closed.set()

    def _dispatch(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.ADD:
            self._requests.put(codec.decode_request(payload))
        elif kind is FrameKind.ABORT:
            for request_id in codec.decode_abort(payload):
                self._aborts.put(request_id)
        elif kind is FrameKind.UTILITY:
            self._calls.put(codec.decode_utility_call(payload))

    def _next(self, items: queue.Queue[Item]) -> Item:
        return items.get(timeout=WAIT_SECONDS)

    def _send_outputs(self, message: EngineCoreOutputs) -> None:
        self._send(FrameKind.OUTPUTS, codec.encode_outputs(message))

    def _send(self, kind: FrameKind, payload: bytes) -> None:
        assert self._link is not None
        self._link.sendall(encode_frame(kind, payload))


def hello_with(**changes: Any) -> EngineHello:
    """`HELLO` with other fields; ``limits`` and ``model`` take dicts of changes."""
    limits = dataclasses.replace(HELLO.limits, **changes.pop("limits", {}))
    model = dataclasses.replace(HELLO.model, **changes.pop("model", {}))
    return dataclasses.replace(HELLO, limits=limits, model=model, **changes)
