"""Link: one frontend's connection to the engine process; a thread for each direction, so that the step never waits."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from rollspan.protocol import codec
from rollspan.protocol import messages as m
from rollspan.protocol.framing import FrameKind, FrameReader, FramingError, encode_frame

logger = logging.getLogger("rollspan.engine")

#: Messages that may wait for a frontend which does not read; beyond that it is taken for dead.
MAX_PENDING = 20_000
_RECEIVE_BYTES = 1 << 18

#: (link, what it says): a decoded message, a RequestRefusedError, or None when the link has ended.
Said = tuple["Link", Any]


class Link:
    """Reads messages into a queue and writes messages from another.

    Args:
        connection: connected stream socket; the link owns it.
        index: client index of this frontend.
        say: called from the reader thread with (link, message).
    """

    def __init__(self, connection: socket.socket, index: int, say: Callable[[Said], None]) -> None:
        self.index = index
        self._connection = connection
        self._say = say
        self._outgoing: queue.SimpleQueue[tuple[FrameKind, Any] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"link-{index}-writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name=f"link-{index}-reader", daemon=True).start()

    def send(self, kind: FrameKind, message: Any) -> None:
        """Queues a message; never blocks. A frontend that has stopped reading is cut off."""
        if self._outgoing.qsize() > MAX_PENDING:
            logger.error("frontend %d has stopped reading: closing its link", self.index)
            self.abandon()
            return
        self._outgoing.put((kind, message))

    def close(self, timeout: float) -> None:
        """Sends what is queued, at most ``timeout`` seconds long, then closes."""
        self._outgoing.put(None)
        self._writer.join(timeout)
        self.abandon()

    def abandon(self) -> None:
        """Closes at once; the reader then reports the end of the link."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        self._outgoing.put(None)

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while data := self._connection.recv(_RECEIVE_BYTES):
                for kind, payload in frames.feed(data):
                    self._say((self, _decode(kind, payload)))
        except OSError as error:
            logger.debug("link %d: %s", self.index, error)
        except (FramingError, codec.DecodeError) as error:
            logger.error("frontend %d sent what is no valid message (%s): closing its link", self.index, error)
        self._say((self, None))
        self.abandon()
        self._writer.join()
        self._connection.close()

    def _write(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                kind, message = item
                self._connection.sendall(encode_frame(kind, _ENCODERS[kind](message)))
        except OSError as error:
            logger.debug("link %d: %s", self.index, error)
        except FramingError as error:
            logger.error("link %d: %s", self.index, error)
            self.abandon()
        except Exception:  # a frontend that waits for a message which cannot be encoded must not wait for ever
            logger.exception("link %d: a message cannot be sent", self.index)
            self.abandon()


_ENCODERS: dict[FrameKind, Callable[[Any], bytes]] = {
    FrameKind.ENGINE_HELLO: codec.encode_engine_hello,
    FrameKind.OUTPUTS: codec.encode_outputs,
    FrameKind.DEAD: codec.encode_dead,
}


def _decode(
    kind: FrameKind, payload: bytes
) -> (
    m.ClientHello | m.EngineCoreRequest | m.UtilityCall | list[str] | codec.RequestRefusedError | codec.CallRefusedError
):
    if kind is FrameKind.ADD:
        try:
            return codec.decode_request(payload)
        except codec.RequestRefusedError as error:
            return error
    if kind is FrameKind.ABORT:
        return codec.decode_abort(payload)
    if kind is FrameKind.UTILITY:
        try:
            return codec.decode_utility_call(payload)
        except codec.CallRefusedError as error:
            return error
    if kind is FrameKind.CLIENT_HELLO:
        return codec.decode_client_hello(payload)
    raise FramingError(f"frame kind {kind.name} does not go to an engine")
