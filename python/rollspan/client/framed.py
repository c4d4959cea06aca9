"""The engine link over a Unix socket (PROTOCOL.md), for asyncio programs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollspan.client.base import EngineCoreClient
from rollspan.errors import RollspanError
from rollspan.protocol import codec
from rollspan.protocol.codec import DecodeError
from rollspan.protocol.decoder import decode_outputs
from rollspan.protocol.framing import FrameKind, FrameReader, FramingError, encode_frame
from rollspan.protocol.messages import (
    ClientHello,
    EngineCoreRequest,
    EngineHello,
    UtilityCall,
    UtilityOutput,
)

logger = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
RETRY_SECONDS = 0.02
"""Pause between attempts to connect while the engine has not bound its socket yet: nothing announces that moment."""

Frame = tuple[FrameKind, bytes]


class FramedClient(EngineCoreClient):
    """One framed connection. Made by `connect`; everything runs on the event loop that made it."""

    def __init__(
        self,
        hello: EngineHello,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: FrameReader,
        early: list[Frame],
    ) -> None:
        super().__init__()
        self.hello = hello
        self._reader = reader
        self._writer = writer
        self._frames = frames
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call_id = 0
        self._closing = False
        self._reading = asyncio.create_task(self._read(early), name="rollspan-engine-link")
        self._reading.add_done_callback(self._reading_ended)

    @classmethod
    async def connect(
        cls,
        path: str | os.PathLike[str],
        timeout: float = 600.0,
        *,
        name: str = "python",
        alive: Callable[[], bool] = lambda: True,
    ) -> FramedClient:
        """Connects, retrying until the engine has bound its socket, and waits for its hello (the model is loaded then).

        Args:
            path: the engine's Unix socket.
            timeout: seconds for all of it.
            name: this frontend's name in its hello.
            alive: False as soon as there is no engine process any more that could bind the socket.

        Raises:
            RollspanError: ``engine_starting`` when the time is over, ``engine_dead`` when the engine ended first,
                ``decode_error`` when the peer does not speak this protocol.
        """
        try:
            return await asyncio.wait_for(cls._connect(Path(path), name, alive), timeout)
        except asyncio.TimeoutError:
            raise RollspanError(
                f"the engine at {os.fspath(path)} was not ready within {timeout:g} s", reason="engine_starting"
            ) from None

    @classmethod
    async def _connect(cls, path: Path, name: str, alive: Callable[[], bool]) -> FramedClient:
        reader, writer = await _open(path, alive)
        frames = FrameReader()
        try:
            writer.write(encode_frame(FrameKind.CLIENT_HELLO, codec.encode_client_hello(ClientHello(name))))
            received: list[Frame] = []
            while not received:
                received = frames.feed(await _read_some(reader))
            hello = _decode_hello(*received[0])
        except (DecodeError, FramingError) as error:
            writer.close()
            raise RollspanError(f"engine link: {error}", reason="decode_error") from None
        except BaseException:
            writer.close()
            raise
        return cls(hello, reader, writer, frames, received[1:])

    async def add_request(self, request: EngineCoreRequest) -> None:
        await self._send(FrameKind.ADD, codec.encode_request(request))

    async def abort(self, request_ids: list[str]) -> None:
        # No drain: this is called while a cancelled task winds up, where there is nobody to wait.
        if request_ids and self.death is None and not self._closing:
            self._writer.write(encode_frame(FrameKind.ABORT, codec.encode_abort(request_ids)))

    async def call_utility(self, method: str, *args: Any) -> Any:
        call_id = self._next_call_id
        self._next_call_id += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            call = UtilityCall(client_index=0, call_id=call_id, method=method, args=list(args))
            await self._send(FrameKind.UTILITY, codec.encode_utility_call(call))
            return await answer
        finally:
            self._calls.pop(call_id, None)

    async def close(self) -> None:
        self._closing = True
        self._reading.cancel()
        self._writer.close()
        self._end(RollspanError("the engine link is closed", reason="shutting_down"))
        # Both may end with the error that ended the link: it has been reported already.
        await asyncio.gather(self._reading, self._writer.wait_closed(), return_exceptions=True)

    async def _send(self, kind: FrameKind, payload: bytes) -> None:
        self.check_alive()
        self._writer.write(encode_frame(kind, payload))
        try:
            await self._writer.drain()
        except OSError as error:
            self._end(RollspanError(f"the engine link broke: {error}", reason="engine_dead"))
            self.check_alive()

    async def _read(self, early: list[Frame]) -> None:
        try:
            received = early
            while True:
                for kind, payload in received:
                    self._dispatch(kind, payload)
                received = self._frames.feed(await _read_some(self._reader))
        except RollspanError as error:
            self._end(error)
        except DecodeError as error:
            self.decode_errors[error.reason] += 1
            self._end(RollspanError(f"a message of the engine cannot be read: {error.message}", reason="decode_error"))
        except FramingError as error:
            self.decode_errors["framing"] += 1
            self._end(RollspanError(f"the engine link is out of step: {error}", reason="decode_error"))

    def _dispatch(self, kind: FrameKind, payload: bytes) -> None:
        if kind is FrameKind.DEAD:
            raise RollspanError(f"the engine died: {codec.decode_dead(payload).message}", reason="engine_dead")
        if kind is not FrameKind.OUTPUTS:
            raise FramingError(f"an engine does not send {kind.name} frames here")
        message = decode_outputs([payload])
        self.skipped_fields += message.skipped_fields
        if message.utility_output is not None:
            self._answer(message.utility_output)
        elif self._on_outputs is not None:
            self._on_outputs(message)

    def _answer(self, reply: UtilityOutput) -> None:
        answer = self._calls.pop(reply.call_id, None)
        if answer is None or answer.done():
            return
        if reply.failure is None:
            answer.set_result(reply.result)
        else:
            answer.set_exception(RollspanError(reply.failure, reason=reply.reason or "internal_error"))

    def _reading_ended(self, task: asyncio.Task[None]) -> None:
        """Reading ends by itself only with the link; anything else is a bug and must not leave requests hanging."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("reading from the engine failed", exc_info=error)
            self._end(RollspanError(f"reading from the engine failed: {error!r}", reason="internal_error"))

    def _end(self, error: RollspanError) -> None:
        """Ends the link once: open calls and the death handler get ``error``."""
        if self.death is not None:
            return
        self.death = error
        self._writer.close()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        self._calls.clear()
        if not self._closing:
            logger.warning("engine link ended: %s", error.message)
            if self._on_death is not None:
                self._on_death(error)


async def _open(path: Path, alive: Callable[[], bool]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_unix_connection(path, limit=READ_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            if not alive():
                raise RollspanError("the engine process ended before it was ready", reason="engine_dead") from None
        except OSError as error:
            raise RollspanError(f"cannot connect to the engine at {path}: {error}", reason="engine_dead") from None
        await asyncio.sleep(RETRY_SECONDS)


async def _read_some(reader: asyncio.StreamReader) -> bytes:
    try:
        data = await reader.read(READ_BYTES)
    except OSError as error:
        raise RollspanError(f"the engine link broke: {error}", reason="engine_dead") from None
    if not data:
        raise RollspanError("the engine closed the link: its process has ended", reason="engine_dead")
    return data


def _decode_hello(kind: FrameKind, payload: bytes) -> EngineHello:
    if kind is FrameKind.DEAD:
        raise RollspanError(f"the engine did not start: {codec.decode_dead(payload).message}", reason="engine_dead")
    if kind is not FrameKind.ENGINE_HELLO:
        raise FramingError(f"the engine's first frame is {kind.name}, not ENGINE_HELLO")
    return codec.decode_engine_hello(payload)
