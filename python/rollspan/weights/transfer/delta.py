"""Sparse updates: which elements of a parameter changed, and what they are now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from rollspan.errors import RollspanError, cut

INDICES = ".indices"
VALUES = ".values"
#: Elements are moved as integers of their size, so that every dtype can be, to the bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def apply_deltas(
    named: Iterable[tuple[str, torch.Tensor]], current: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Makes whole tensors of pairs ``NAME.indices`` and ``NAME.values``, which come in any order.

    Args:
        named: indices (int32 or int64, flat, each once, counted in the row-major parameter) and as many values, which
            replace what is there.
        current: parameters by name; they stay as they are.

    Yields:
        Name and new tensor in host memory, as soon as its pair is complete; none for a pair without elements.

    Raises:
        RollspanError: ``weights_invalid`` naming the tensor.
    """
    waiting: dict[str, torch.Tensor] = {}
    for key, tensor in named:
        name, suffix = _split(key)
        if name not in current:
            raise _invalid(f"tensor {cut(key)!r} changes none of the model's parameters")
        other = name + (VALUES if suffix == INDICES else INDICES)
        if other not in waiting:
            waiting[key] = tensor
            continue
        pair = {key: tensor, other: waiting.pop(other)}
        indices, values = pair[name + INDICES], pair[name + VALUES]
        _check(name, indices, values, current[name])
        if indices.numel():
            yield name, _replaced(current[name], indices, values)
    if waiting:
        key = min(waiting)
        raise _invalid(f"tensor {cut(key)!r} came without its other half ({len(waiting)} such in all)")


def _split(key: str) -> tuple[str, str]:
    for suffix in (INDICES, VALUES):
        if key.endswith(suffix):
            return key.removesuffix(suffix), suffix
    raise _invalid(f"tensor {cut(key)!r} of a delta ends in neither {INDICES} nor {VALUES}")


def _check(name: str, indices: torch.Tensor, values: torch.Tensor, parameter: torch.Tensor) -> None:
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        kind = f"{indices.dtype} and the shape {list(indices.shape)}"
        raise _invalid(f"{name}{INDICES} must be flat and int32 or int64, got {kind}")
    if values.shape != indices.shape:
        raise _invalid(f"{name}{VALUES} has shape {list(values.shape)}, its indices {list(indices.shape)}")
    if values.dtype != parameter.dtype and not (values.is_floating_point() and parameter.is_floating_point()):
        raise _invalid(f"{name}{VALUES} has dtype {values.dtype}, the model needs {parameter.dtype}")
    if not indices.numel():
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < 0 or high >= parameter.numel():
        found = low if low < 0 else high
        raise _invalid(f"{name}{INDICES} holds {found}, the parameter has {parameter.numel()} elements")
    if bool((indices[1:] > indices[:-1]).all()):
        return
    touched = torch.zeros(parameter.numel(), dtype=torch.bool)
    touched[indices.cpu().long()] = True
    if int(touched.count_nonzero()) != indices.numel():
        raise _invalid(f"{name}{INDICES} holds an index more than once")


def _replaced(parameter: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    new = parameter.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    bits = _BITS[new.dtype.itemsize]
    new.view(-1).view(bits)[indices.cpu().long()] = values.cpu().to(new.dtype).view(bits)
    return new


def _invalid(message: str) -> RollspanError:
    return RollspanError(message, reason="weights_invalid", param="update_info")
