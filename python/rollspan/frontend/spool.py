"""Spool: uploads of weights on their way to the engine, and what of them is there.

The files of an upload are in ``SPOOL/UPLOAD``. One is called ``FILE.part`` until all of it was received: the engine
takes only names that end in ``.safetensors``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollspan.errors import RollspanError, wrong_value
from rollspan.frontend.byte_ranges import ByteRanges

logger = logging.getLogger("rollspan.frontend")

SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
NAME_ALLOWED = "1 to 128 of A-Z, a-z, 0-9, dot, underscore and dash, no dot at the start"
FILE_ALLOWED = f"{NAME_ALLOWED}, {SUFFIX} at the end"


def check_upload_name(name: Any, path: str = "upload") -> str:
    """Returns ``name`` when it may name an upload.

    Raises:
        RollspanError: ``invalid_request`` naming ``path``.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong_value(path, NAME_ALLOWED, name)
    return name


def check_file_name(name: str) -> str:
    """Returns ``name`` when it may name a file of an upload.

    Raises:
        RollspanError: ``invalid_request`` naming ``file``.
    """
    if not _NAME.fullmatch(name) or not name.endswith(SUFFIX):
        raise wrong_value("file", FILE_ALLOWED, name)
    return name


@dataclass
class UploadedFile:
    """One file.

    Attributes:
        path: where it is once it is complete.
        total: bytes of the whole file.
        received: what of it is on disk and verified.
        writing: ranges that are just being received.
    """

    path: Path
    total: int
    received: ByteRanges = field(default_factory=ByteRanges)
    writing: list[tuple[int, int]] = field(default_factory=list)

    @property
    def part(self) -> Path:
        """Where it is until then."""
        return self.path.with_name(f"{self.path.name}.part")

    def to_json(self) -> dict[str, Any]:
        """What clients are told of it."""
        return {"received": self.received.to_list(), "total": self.total}


@dataclass
class Upload:
    """Files that go to the engine together.

    Attributes:
        name: its id, which clients choose.
        directory: where its files are.
        touched: when bytes last came, monotonic seconds.
        readers: how many weight updates read it at the moment.
    """

    name: str
    directory: Path
    touched: float
    files: dict[str, UploadedFile] = field(default_factory=dict)
    readers: int = 0

    def forget_lost(self) -> None:
        """Forgets files that are not there any more: an engine may have used them up in an update that failed."""
        for file in () if self.readers else self.files.values():
            whole = not file.writing and file.received.missing(file.total) is None
            if whole and not file.path.exists():
                file.received = ByteRanges()

    def check_unread(self) -> None:
        """Refuses changes while the engine reads the files.

        Raises:
            RollspanError: ``update_active``.
        """
        if self.readers:
            raise RollspanError(f"upload {self.name} is being read by a weight update", reason="update_active")

    def check_complete(self, path: str) -> None:
        """Refuses an upload of which something is missing.

        Args:
            path: the field that named it.

        Raises:
            RollspanError: ``upload_incomplete`` with the first thing that is missing.
        """
        problem = None if self.files else "holds no files"
        for name, file in sorted(self.files.items()):
            missing = file.received.missing(file.total)
            if missing is not None:
                problem = f"is incomplete: {name} lacks bytes {missing[0]} to {missing[1] - 1} of {file.total}"
                break
        if problem is not None:
            raise RollspanError(f"upload {self.name} {problem}", reason="upload_incomplete", param=path)


class Spool:
    """All uploads of one frontend; everything but the writing itself runs on its event loop.

    Args:
        directory: where the engine looks for them; private to this server.
        limit: most bytes of all uploads together, those included that are announced and have not come yet.
        idle_seconds: an upload that nobody touches for so long is deleted.
    """

    def __init__(self, directory: Path, limit: int, idle_seconds: float) -> None:
        self._directory = directory
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._uploads: dict[str, Upload] = {}
        self._discarded = 0
        self._expiring: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on uploads that are idle for too long are deleted."""
        self._expiring = asyncio.create_task(self._expire(), name="rollspan-uploads")

    def find(self, name: str) -> Upload:
        """The upload of that name.

        Raises:
            RollspanError: ``not_found``.
        """
        upload = self._uploads.get(check_upload_name(name))
        if upload is None:
            raise RollspanError(f"upload {name} does not exist", reason="not_found", param="upload")
        upload.forget_lost()
        return upload

    def open(self, name: str) -> Upload:
        """The upload of that name, made where there is none yet, and touched.

        What an earlier server has left behind under its name is deleted.

        Raises:
            RollspanError: ``update_active``: the engine reads it at the moment.
        """
        upload = self._uploads.get(check_upload_name(name))
        if upload is None:
            directory = self._directory / name
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
            upload = self._uploads[name] = Upload(name, directory, time.monotonic())
        upload.check_unread()
        upload.forget_lost()
        upload.touched = time.monotonic()
        return upload

    def holds(self, upload: Upload) -> bool:
        """Whether ``upload`` has not been deleted."""
        return self._uploads.get(upload.name) is upload

    def forget(self, upload: Upload) -> None:
        """Removes an upload that has no files."""
        if self.holds(upload):
            del self._uploads[upload.name]
            upload.directory.rmdir()

    def check_room(self, size: int) -> None:
        """Refuses ``size`` bytes more than are announced already, where that is over the limit.

        Raises:
            RollspanError: ``body_too_large``.
        """
        announced = sum(file.total for upload in self._uploads.values() for file in upload.files.values())
        if announced + size > self._limit:
            message = f"all weight uploads together must be at most {self._limit} bytes, {announced} are announced"
            raise RollspanError(message, reason="body_too_large")

    @contextlib.contextmanager
    def reading(self, name: Any) -> Iterator[None]:
        """Holds the files of a complete upload as they are while the engine reads them.

        Raises:
            RollspanError: ``upload_incomplete`` with what is missing.
        """
        path = "update_info.upload"
        upload = self._uploads.get(check_upload_name(name, path))
        if upload is None:
            raise RollspanError(f"upload {name} does not exist", reason="upload_incomplete", param=path)
        upload.forget_lost()
        upload.check_complete(path)
        upload.readers += 1
        try:
            yield
        finally:
            upload.readers -= 1
            upload.touched = time.monotonic()

    async def delete(self, name: str) -> None:
        """Deletes an upload with all its files; one that does not exist is deleted already.

        Raises:
            RollspanError: ``update_active``: the engine reads it at the moment.
        """
        upload = self._uploads.get(check_upload_name(name))
        if upload is None:
            return
        upload.check_unread()
        await self._discard(upload)

    async def close(self) -> None:
        """Deletes everything."""
        if self._expiring is not None:
            self._expiring.cancel()
        for upload in list(self._uploads.values()):
            if self.holds(upload):
                await self._discard(upload)

    def clear(self) -> None:
        """Deletes all files, when the process is about to end; may be called by any thread."""
        for upload in list(self._uploads.values()):
            shutil.rmtree(upload.directory, ignore_errors=True)

    async def _discard(self, upload: Upload) -> None:
        """Forgets an upload and deletes its files, out of the way of a new one with its name."""
        del self._uploads[upload.name]
        self._discarded += 1
        discarded = self._directory / f".deleted-{self._discarded}"
        try:
            upload.directory.rename(discarded)
        except OSError as error:
            logger.warning("upload %s cannot be deleted: %s", upload.name, error)
        else:
            await asyncio.to_thread(shutil.rmtree, discarded, ignore_errors=True)

    async def _expire(self) -> None:
        while True:
            for upload in list(self._uploads.values()):
                is_idle = upload.readers == 0 and upload.touched + self._idle_seconds <= time.monotonic()
                if is_idle and self.holds(upload):  # deleting the one before has taken its time
                    logger.warning("upload %s was idle for %g s: deleted", upload.name, self._idle_seconds)
                    await self.delete(upload.name)
            now = time.monotonic()
            oldest = min((upload.touched for upload in self._uploads.values()), default=now)
            await asyncio.sleep(max(oldest + self._idle_seconds - now, self._idle_seconds / 10, 0.01))
