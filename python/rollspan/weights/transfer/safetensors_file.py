"""Reading a safetensors file with plain reads.

The library maps files into memory; when a trainer then truncates or replaces one while it is read, the kernel kills the
process (SIGBUS). A short read is an error like any other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import torch

from rollspan.safetensors_format import Entry, SafetensorsError, header_size, parse_header
from rollspan.weights.transfer.memory import new_tensor

#: Bytes of one read; between two of them a read can be cancelled.
_CHUNK_BYTES = 16 << 20


def _go_on() -> None:
    pass


def read_safetensors(path: Path, check: Callable[[], None] = _go_on) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in the order of their bytes, each in memory of its own.

    Args:
        path: the file.
        check: called before each read; what it raises ends the reading.

    Raises:
        SafetensorsError: not a regular file, or not valid, or cut short while it was read.
        OSError: the file cannot be opened or read.
    """
    # Opening a pipe that took the file's place must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with FileIO(descriptor) as stream:
        yield from read_stream(stream, check)


def read_stream(stream: FileIO, check: Callable[[], None] = _go_on) -> Iterator[tuple[str, torch.Tensor]]:
    """As :func:`read_safetensors`, from the start of an open file."""
    for entry in read_entries(stream):
        tensor = new_tensor(entry.shape, entry.dtype)
        if tensor.numel():
            _read_into(stream, tensor.reshape(-1).view(torch.uint8).numpy().data, check)
        yield entry.name, tensor


def read_entries(stream: FileIO) -> list[Entry]:
    """The tensors of an open file, which is left where their bytes begin.

    Raises:
        SafetensorsError: not a regular file, or the header is not valid for its size.
        OSError: the file cannot be read.
    """
    status = os.fstat(stream.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise SafetensorsError("it is no regular file")
    size = header_size(_read(stream, 8), status.st_size)
    return parse_header(_read(stream, size), status.st_size - 8 - size)


def _read(stream: FileIO, count: int) -> bytes:
    data = bytearray(count)
    _read_into(stream, memoryview(data))
    return bytes(data)


def _read_into(stream: FileIO, buffer: memoryview, check: Callable[[], None] = _go_on) -> None:
    while buffer:
        check()
        count = stream.readinto(buffer[:_CHUNK_BYTES])
        if not count:
            raise SafetensorsError("it ends too early")
        buffer = buffer[count:]
