"""Frames of the engine link: ``length:u32 big-endian | kind:u8 | payload``. No I/O."""

from __future__ import annotations

import struct
from enum import IntEnum

from rollspan.protocol.messages import MAX_FRAME_BYTES

_HEADER = struct.Struct(">I")


class FrameKind(IntEnum):
    """First byte of a frame (PROTOCOL.md)."""

    ADD = 0x00
    ABORT = 0x01
    UTILITY = 0x03
    CLIENT_HELLO = 0x10
    ENGINE_HELLO = 0x20
    OUTPUTS = 0x21
    DEAD = 0x22


class FramingError(Exception):
    """The byte stream is not a sequence of frames; nothing after this point can be read."""


def encode_frame(kind: FrameKind, payload: bytes) -> bytes:
    """One frame.

    Raises:
        FramingError: the payload is larger than a frame may be.
    """
    size = len(payload) + 1
    if size > MAX_FRAME_BYTES:
        raise FramingError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(size) + bytes((kind,)) + payload


class FrameReader:
    """Cuts a byte stream into frames, whatever the sizes of its pieces."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[FrameKind, bytes]]:
        """Takes the next bytes and returns the frames that they complete.

        Raises:
            FramingError: an empty or oversized frame, or an unknown kind.
        """
        self._buffer += data
        frames: list[tuple[FrameKind, bytes]] = []
        start, view_size = 0, len(self._buffer)
        while view_size - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer, start)
            if not 1 <= size <= self._max_frame_bytes:
                raise FramingError(f"a frame of {size} bytes is outside 1 to {self._max_frame_bytes}")
            body = start + _HEADER.size
            if view_size < body + size:
                break
            try:
                kind = FrameKind(self._buffer[body])
            except ValueError:
                raise FramingError(f"unknown frame kind {self._buffer[body]:#04x}") from None
            frames.append((kind, bytes(self._buffer[body + 1 : body + size])))
            start = body + size
        if start:
            del self._buffer[:start]
        return frames

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._buffer)
