"""Reading a safetensors file with plain reads.

The library maps files into memory; when a trainer then truncates or replaces one while it is read, the kernel kills the
process (SIGBUS). A short read is an error like any other. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import torch

#: Largest header, as in the library.
MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}


class SafetensorsError(ValueError):
    """The file is not valid safetensors; the message says why."""


def read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in the order of their bytes, each in memory of its own.

    Raises:
        SafetensorsError: not a regular file, or not valid, or cut short while it was read.
        OSError: the file cannot be opened or read.
    """
    # Opening a pipe that took the file's place must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with FileIO(descriptor) as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SafetensorsError("it is no regular file")
        for name, dtype, shape in _read_header(stream, status.st_size):
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                _read_into(stream, tensor.reshape(-1).view(torch.uint8).numpy().data)
            yield name, tensor


def _read_into(stream: FileIO, buffer: memoryview) -> None:
    while buffer:
        count = stream.readinto(buffer)
        if not count:
            raise SafetensorsError("it ends too early")
        buffer = buffer[count:]


def _read_header(stream: FileIO, file_bytes: int) -> list[tuple[str, torch.dtype, list[int]]]:
    """Name, dtype and shape of each tensor; their bytes follow one another without holes up to the end of the file."""
    prefix = bytearray(8)
    _read_into(stream, memoryview(prefix))
    size = int.from_bytes(prefix, "little")
    if size > min(file_bytes - 8, MAX_HEADER_BYTES):
        raise SafetensorsError(f"its header of {size} bytes is larger than it may be")
    text = bytearray(size)
    _read_into(stream, memoryview(text))
    try:
        header = json.loads(text.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise SafetensorsError("its header is no JSON object")
    header.pop("__metadata__", None)
    entries = sorted((_entry(name, fields) for name, fields in header.items()), key=lambda entry: entry[3])
    position = 0
    for name, _, _, (start, end) in entries:
        if start != position:
            raise SafetensorsError(f"tensor {name!r} starts at byte {start} instead of {position}")
        position = end
    if position != file_bytes - 8 - size:
        raise SafetensorsError(f"it holds {file_bytes - 8 - size} bytes of data, its header says {position}")
    return [(name, dtype, shape) for name, dtype, shape, _ in entries]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(name: str, fields: Any) -> tuple[str, torch.dtype, list[int], tuple[int, int]]:
    try:
        dtype, shape, (start, end) = DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
        numbers = [*shape, start, end]
        if any(type(number) is not int or not 0 <= number < 2**48 for number in numbers):
            raise ValueError
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise SafetensorsError(f"tensor {name!r} has no possible dtype, shape and place") from None
    return name, dtype, list(shape), (start, end)
