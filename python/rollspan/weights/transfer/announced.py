"""Tensors that a request announces by name, dtype and shape, in vLLM's fields, before their bytes come another way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from rollspan.errors import RollspanError, shown
from rollspan.safetensors_format import DTYPES, is_shape

FIELDS = ("names", "dtype_names", "shapes")
#: torch's own names, as vLLM's trainers send them.
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


class Announced(NamedTuple):
    """What one tensor will be."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def announced(info: Mapping[str, Any], limit: int) -> list[Announced]:
    """The tensors that ``update_info`` announces in three lists of one length.

    Args:
        info: with ``names``, ``dtype_names`` (torch's names of dtypes) and ``shapes`` (lists of sizes).
        limit: most bytes of all together; nothing is reserved for more.

    Raises:
        RollspanError: ``weights_invalid`` naming the field.
    """
    names, dtype_names, shapes = (_list(info, field) for field in FIELDS)
    for field, values in zip(FIELDS[1:], (dtype_names, shapes), strict=True):
        if len(values) != len(names):
            raise invalid(f"update_info.{field} has {len(values)} entries, update_info.names {len(names)}", field)
    found = []
    seen = set()
    for index, (name, dtype_name, shape) in enumerate(zip(names, dtype_names, shapes, strict=True)):
        if not isinstance(name, str) or name in seen:
            raise invalid(f"update_info.names[{index}] must be another string, got {shown(name)}", "names")
        seen.add(name)
        dtype = _DTYPES.get(dtype_name.removeprefix("torch.")) if isinstance(dtype_name, str) else None
        if dtype is None:
            allowed = f"update_info.dtype_names[{index}] must be one of {', '.join(_DTYPES)}"
            raise invalid(f"{allowed}, got {shown(dtype_name)}", "dtype_names")
        if not is_shape(shape):
            raise invalid(f"update_info.shapes[{index}] must be a list of sizes, got {shown(shape)}", "shapes")
        found.append(Announced(name, dtype, tuple(shape)))
    total = sum(entry.nbytes for entry in found)
    if total > limit:
        raise invalid(
            f"update_info.shapes announces {total} bytes; an update of this model has at most {limit}", "shapes"
        )
    return found


def _list(info: Mapping[str, Any], field: str) -> list[Any]:
    value = info.get(field)
    if value is None:
        value = []
    if not isinstance(value, list):
        raise invalid(f"update_info.{field} must be a list, got {shown(value)}", field)
    return value


def packets(tensors: list[Announced], limit: int) -> list[list[Announced]]:
    """vLLM's split of a packed transfer, which both sides make alike: a packet is full once it is over the limit."""
    result: list[list[Announced]] = []
    size = limit + 1
    for tensor in tensors:
        if size > limit:
            result.append([])
            size = 0
        result[-1].append(tensor)
        size += tensor.nbytes
    return result


def invalid(message: str, field: str, where: str = "update_info") -> RollspanError:
    """The error for a field that is wrong."""
    return RollspanError(message, reason="weights_invalid", param=f"{where}.{field}")
