"""Weights that a frontend has received over HTTP and put into the spool, the directory it shares with its engine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from rollspan.errors import RollspanError, shown
from rollspan.safetensors_format import SafetensorsError
from rollspan.weights.transfer.base import Transport, check_keys
from rollspan.weights.transfer.mapped_file import in_memory, map_safetensors
from rollspan.weights.transfer.safetensors_file import read_stream

PARAM = "update_info.upload"
SUFFIX = ".safetensors"
#: Seconds that who has written a file has to close it.
_CLOSING_SECONDS = 1.0
_POLL_SECONDS = 0.02
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class HttpTransport(Transport):
    """``update_info``: ``{"upload": ID}``, the name of a complete upload.

    In a spool of memory the tensors are used where they lie, and the files lose their names, so that nobody writes to
    them any more, which is made sure of; elsewhere they are copied. Engines of one set all copy: they share the files.
    """

    name = "http"

    def receive(self, info: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        check_keys("update_info", info, ("upload",))
        upload = info.get("upload")
        if not isinstance(upload, str) or not _NAME.fullmatch(upload):
            raise _invalid(f"{PARAM} must be the name of an upload, got {shown(upload)}")
        if self.context.spool is None:
            raise _invalid(f"{PARAM}: this engine takes no uploads, for it was started without a spool")
        seen: set[str] = set()
        with contextlib.ExitStack() as opened:
            used: list[tuple[Path, int]] = []
            for file in _files(self.context.spool / upload, upload):
                for name, tensor in self._read(file, opened, used):
                    if name in seen:
                        raise _invalid(f"tensor {name!r} is in more than one file of upload {upload}")
                    seen.add(name)
                    yield name, tensor
            for file, descriptor in used:
                file.unlink(missing_ok=True)
                self._check_unchangeable(file, descriptor)

    def _read(
        self, file: Path, opened: contextlib.ExitStack, used: list[tuple[Path, int]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            stream = opened.enter_context(FileIO(descriptor))
            if self.context.num_engines == 1 and _private(os.fstat(descriptor)):
                yield from map_safetensors(descriptor, self.check_cancelled)
                used.append((file, descriptor))
            else:
                yield from read_stream(stream, self.check_cancelled)
                stream.close()
        except (OSError, SafetensorsError) as error:
            raise _invalid(f"{file.name} of {PARAM} cannot be read as safetensors: {error}") from None

    def _check_unchangeable(self, file: Path, descriptor: int) -> None:
        """Refuses a mapped file that somebody could still write to: weights in force would change unnoticed."""
        end = time.monotonic() + _CLOSING_SECONDS
        while os.fstat(descriptor).st_nlink or _written(descriptor):
            self.check_cancelled()
            if time.monotonic() >= end:
                raise _incomplete(f"{file.name} of {PARAM} is being written to while it is read: upload it again")
            time.sleep(_POLL_SECONDS)


def _private(status: os.stat_result) -> bool:
    """Whether the file is memory that only this user can open for writing, under one name."""
    ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return ours and status.st_nlink == 1 and in_memory(status)


def _written(descriptor: int) -> bool:
    """Whether anybody has the file open for writing: nobody gets a lease to read it then, see fcntl(2).

    The file must have lost its name: who opened it by that meanwhile would have this process sent a signal.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN  # else there are no leases here
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _files(directory: Path, upload: str) -> list[Path]:
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208 (names are needed)
    except OSError as error:
        raise _incomplete(f"upload {upload} is not there: {type(error).__name__}") from None
    unfinished = [name for name in names if not name.endswith(SUFFIX)]
    if unfinished:
        raise _incomplete(f"upload {upload} is incomplete: {unfinished[0]} is still being received")
    if not names:
        raise _incomplete(f"upload {upload} holds no files, or an update has taken them: upload them again")
    return [directory / name for name in names]


def _incomplete(message: str) -> RollspanError:
    return RollspanError(message, reason="upload_incomplete", param=PARAM)


def _invalid(message: str) -> RollspanError:
    return RollspanError(message, reason="weights_invalid", param=PARAM)
