"""UploadChunk: the bytes of one request on their way into a file of an upload."""

from __future__ import annotations

import asyncio
import os
import time
from types import TracebackType

from blake3 import blake3

from rollspan.errors import RollspanError
from rollspan.frontend.byte_ranges import CONTENT_RANGE
from rollspan.frontend.spool import Spool, UploadedFile, check_file_name

WRITE_BYTES = 1 << 20
"""So much is gathered before a thread writes it: hashing and writing must not keep the event loop."""
UNKNOWN_END = 1 << 62


class UploadChunk:
    """Receives one range of a file, or a whole one; a context manager.

    Nothing of it counts until `finish` has verified it: where it ends otherwise, those bytes are missing again.

    Args:
        spool: where the upload is.
        upload: name of the upload, made with its first chunk.
        name: of the file.
        span: (start, end, total) of the range, in bytes; None for a whole file, which replaces what was there.
        length: bytes of the body, None where the request does not say.
        checksum: 64 hex digits of the range's BLAKE3, None for unchecked.

    Raises:
        RollspanError: ``invalid_request``, ``body_too_large``, ``update_active``, or ``upload_incomplete`` where
            another request is just writing to the same range.
    """

    def __init__(
        self,
        spool: Spool,
        upload: str,
        name: str,
        span: tuple[int, int, int] | None,
        length: int | None,
        checksum: str | None,
    ) -> None:
        check_file_name(name)
        self._spool = spool
        self._name = name
        self._start, self._end, total = span or (0, UNKNOWN_END if length is None else length, length or 0)
        if length is not None and length != self._end - self._start:
            raise self._wrong_length(length)
        self._grows = span is None and length is None
        self._upload = spool.open(upload)
        try:
            self.file = self._open(total, replace=span is None)
        except BaseException:
            self._forget_if_empty()
            raise
        self._checksum = checksum
        self._hasher = None if checksum is None else blake3()
        self._written = 0
        self._gathered = bytearray()

    def __enter__(self) -> UploadChunk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        if self._claim in self.file.writing:
            self.file.writing.remove(self._claim)
            if not self.file.received and not self.file.writing and self._spool.holds(self._upload):
                self._upload.files.pop(self._name, None)
                self.file.part.unlink(missing_ok=True)
        self._forget_if_empty()

    async def write(self, piece: bytes) -> None:
        """Takes the next bytes of the body.

        Raises:
            RollspanError: more bytes than announced, or more than there is room for.
        """
        size = self._written + len(self._gathered) + len(piece)
        if size > self._end - self._start:
            raise self._wrong_length(size)
        if self._grows:
            self._spool.check_room(len(piece))
            self.file.total += len(piece)
        self._gathered += piece
        self._upload.touched = time.monotonic()
        if len(self._gathered) >= WRITE_BYTES:
            await self._flush()

    async def finish(self) -> None:
        """Verifies what came and records it; a file of which nothing is missing any more gets its name.

        Raises:
            RollspanError: fewer bytes than announced, ``checksum_mismatch``, or the upload was deleted meanwhile.
        """
        await self._flush()
        if not self._grows and self._written != self._end - self._start:
            raise self._wrong_length(self._written)
        if self._hasher is not None and (found := self._hasher.hexdigest()) != self._checksum:
            message = f"{self._name}: the body's digest is blake3:{found}, X-Checksum says blake3:{self._checksum}"
            raise RollspanError(message, reason="checksum_mismatch", param="X-Checksum")
        if not self._spool.holds(self._upload):
            message = f"upload {self._upload.name} was deleted meanwhile"
            raise RollspanError(message, reason="not_found", param="upload")
        file = self.file
        file.writing.remove(self._claim)
        file.received.add(self._start, self._start + self._written)
        if not file.writing and file.received.missing(file.total) is None:
            file.part.rename(file.path)

    def _open(self, total: int, replace: bool) -> UploadedFile:
        files = self._upload.files
        file = files.get(self._name)
        if file is not None:
            # A whole file replaces the one before, also the bytes behind its own end.
            if any(replace or (start < self._end and end > self._start) for start, end in file.writing):
                message = f"{self._name}: another request is writing to the same bytes"
                raise RollspanError(message, reason="upload_incomplete", param=CONTENT_RANGE)
            if not replace and file.total != total:
                message = f"{CONTENT_RANGE} must say the same total as before ({file.total}), got {total}"
                raise RollspanError(message, reason="invalid_request", param=CONTENT_RANGE)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        if file is None or replace:
            self._spool.check_room(total - (0 if file is None else file.total))
            if file is not None:
                file.path.unlink(missing_ok=True)
            file = files[self._name] = UploadedFile(self._upload.directory / self._name, total)
            flags |= os.O_TRUNC
        elif file.path.exists():
            file.path.rename(file.part)
        file.received.remove(self._start, self._end)
        self._claim = (self._start, self._end)
        file.writing.append(self._claim)
        self._descriptor = os.open(file.part, flags, 0o600)
        return file

    async def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered = self._gathered, bytearray()
            writing = asyncio.ensure_future(asyncio.to_thread(self._write_out, gathered))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing  # the thread still has the descriptor: it must not be closed, and be another's, before
                raise
            self._written += len(gathered)

    def _write_out(self, data: bytearray) -> None:
        if self._hasher is not None:
            self._hasher.update(data)
        with memoryview(data) as rest:
            offset = self._start + self._written
            while rest:
                count = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[count:], offset + count

    def _forget_if_empty(self) -> None:
        if not self._upload.files:
            self._spool.forget(self._upload)

    def _wrong_length(self, length: int) -> RollspanError:
        message = f"{CONTENT_RANGE} says {self._end - self._start} bytes, the body holds {length}"
        return RollspanError(message, reason="invalid_request", param=CONTENT_RANGE)
