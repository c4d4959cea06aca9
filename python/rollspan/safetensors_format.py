"""The safetensors format: its dtypes, and its header read and written. https://github.com/huggingface/safetensors#format

A file is the header's size (8 bytes, little-endian), the header (JSON: tensor name -> dtype, shape, place) and the
tensors' bytes, one after the other without holes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

#: Largest header, as in the library.
MAX_HEADER_BYTES = 100_000_000
#: Code in the header -> dtype; where a machine is big-endian, the data is still little-endian.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


class SafetensorsError(ValueError):
    """The bytes are not valid safetensors; the message says why."""


class Entry(NamedTuple):
    """One tensor of the header; ``start`` and ``end`` count bytes from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def header_size(prefix: bytes, total_bytes: int) -> int:
    """Size of the header from the first 8 bytes.

    Raises:
        SafetensorsError: it is larger than the header of ``total_bytes`` can be.
    """
    size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or size > min(total_bytes - 8, MAX_HEADER_BYTES):
        raise SafetensorsError(f"its header of {size} bytes is larger than it may be")
    return size


def parse_header(text: bytes, data_bytes: int) -> list[Entry]:
    """The tensors in the order of their bytes, which follow one another without holes and are ``data_bytes`` in all.

    Raises:
        SafetensorsError: the header says otherwise, or is none.
    """
    try:
        header = json.loads(text.decode(), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise SafetensorsError(f"its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise SafetensorsError("its header is no JSON object")
    header.pop("__metadata__", None)
    entries = sorted((_entry(name, fields) for name, fields in header.items()), key=lambda entry: entry[3:])
    position = 0
    for entry in entries:
        if entry.start != position:
            raise SafetensorsError(f"tensor {entry.name!r} starts at byte {entry.start} instead of {position}")
        position = entry.end
    if position != data_bytes:
        raise SafetensorsError(f"it holds {data_bytes} bytes of data, its header says {position}")
    return entries


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(name: str, fields: Any) -> Entry:
    try:
        dtype, shape, (start, end) = DTYPES[fields["dtype"]], fields["shape"], fields["data_offsets"]
        if not is_shape(shape) or any(type(number) is not int or not 0 <= number < 2**48 for number in (start, end)):
            raise ValueError
        if end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise SafetensorsError(f"tensor {name!r} has no possible dtype, shape and place") from None
    return Entry(name, dtype, tuple(shape), start, end)


def is_shape(value: Any) -> bool:
    """True for a list of sizes that a tensor can have: where one is 0, torch still multiplies the others."""
    elements = 1
    for size in value if isinstance(value, list) else ():
        if type(size) is not int or size < 0:
            return False
        elements *= size or 1
        if elements >= 2**48:
            return False
    return isinstance(value, list)


def make_header(tensors: Iterable[tuple[str, torch.dtype, Iterable[int]]]) -> bytes:
    """Size and header for these tensors, whose bytes follow in the same order; the data begins at a multiple of 64.

    Raises:
        SafetensorsError: a name that occurs twice, or a dtype that the format does not have.
    """
    header: dict[str, Mapping[str, Any]] = {}
    position = 0
    for name, dtype, sizes in tensors:
        shape = list(sizes)
        if dtype not in CODES:
            raise SafetensorsError(f"tensor {name!r} has dtype {dtype}, which safetensors does not have")
        if name in header or name == "__metadata__":
            raise SafetensorsError(f"tensor name {name!r} cannot be used again")
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text
