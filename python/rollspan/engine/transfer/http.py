"""Weights that a frontend has received over HTTP and put into the spool, the directory it shares with its engine."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from rollspan.engine.transfer.base import Transport, check_keys
from rollspan.engine.transfer.mapped_file import in_memory, map_safetensors
from rollspan.engine.transfer.safetensors_file import read_stream
from rollspan.errors import RollspanError, shown
from rollspan.safetensors_format import SafetensorsError

PARAM = "update_info.upload"
SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class HttpTransport(Transport):
    """``update_info``: ``{"upload": ID}``, the name of a complete upload.

    In a spool of memory the tensors are used where they lie, and the files lose their names, so that nobody writes to
    them any more; elsewhere they are copied. Engines of one set all copy: they share the files.
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
        used: list[Path] = []
        for file in _files(self.context.spool / upload, upload):
            for name, tensor in self._read(file, used):
                if name in seen:
                    raise _invalid(f"tensor {name!r} is in more than one file of upload {upload}")
                seen.add(name)
                yield name, tensor
        for file in used:
            file.unlink(missing_ok=True)

    def _read(self, file: Path, used: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with FileIO(descriptor) as stream:
                if self.context.num_engines == 1 and _private(os.fstat(descriptor)):
                    yield from map_safetensors(descriptor, self.check_cancelled)
                    used.append(file)
                else:
                    yield from read_stream(stream, self.check_cancelled)
        except (OSError, SafetensorsError) as error:
            raise _invalid(f"{file.name} of {PARAM} cannot be read as safetensors: {error}") from None


def _private(status: os.stat_result) -> bool:
    """Whether the file is memory that only this user can open for writing, under one name."""
    ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return ours and status.st_nlink == 1 and in_memory(status)


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
