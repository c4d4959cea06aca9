"""What a trainer sends: a model's tensors by the engine's names, and the elements of them that have changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rollspan.digest import untied
from rollspan.errors import RollspanError, cut

#: What torch.compile and activation checkpointing of parts of a model put into names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_of(source: nn.Module | Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The tensors to send, tied ones once; nothing is copied but what is converted.

    Args:
        source: a model (also one that is wrapped for data parallelism or compiled), or tensors by the engine's names.
        dtype: of floating-point tensors; None leaves them. What transformers keeps in float32 in a model of this dtype
            stays so.

    Raises:
        RollspanError: ``weights_invalid``: a tensor that is sharded over processes, or has no data.
    """
    keep: re.Pattern[str] | None = None
    if isinstance(source, nn.Module):
        model = _unwrapped(source)
        keep = _kept_in_float32(model, dtype)
        source = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, tensor in source.items():
        if hasattr(tensor, "full_tensor") or tensor.is_meta or tensor.layout != torch.strided:
            text = f"tensor {cut(name)!r} ({type(tensor).__name__}) is not whole in this process: gather it first"
            raise RollspanError(text, reason="weights_invalid")
    result = {}
    for name, tensor in untied(source).items():
        name = _WRAPPERS.sub("", name)
        kept = keep is not None and keep.search(name) is not None
        wanted = torch.float32 if kept else dtype
        convert = dtype is not None and tensor.is_floating_point()
        result[name] = tensor.detach().to(wanted) if convert else tensor.detach()
    return result


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def _kept_in_float32(model: nn.Module, dtype: torch.dtype | None) -> re.Pattern[str] | None:
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if not names:
        return None
    return re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in sorted(names)))


def sparse_difference(
    new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What makes ``old`` into ``new``, bit for bit.

    Args:
        new: tensors to send.
        old: tensors of the same dtypes and shapes under at least the same names, on any device.

    Returns:
        Pairs ``NAME.indices`` (int32 or int64, ascending) and ``NAME.values`` of the tensors that differ, and their
        names. Where none does, one element that stays: an update brings something.

    Raises:
        RollspanError: ``weights_invalid``: a tensor that ``old`` lacks or that is of another kind there.
    """
    pairs: dict[str, torch.Tensor] = {}
    changed = []
    for name, tensor in new.items():
        base = old.get(name)
        if base is None or (base.dtype, base.shape) != (tensor.dtype, tensor.shape):
            text = f"tensor {cut(name)!r} has no counterpart of its dtype and shape in the base of the delta"
            raise RollspanError(text, reason="weights_invalid")
        bits = _BITS[tensor.dtype.itemsize]
        flat = tensor.contiguous().reshape(-1).view(bits)
        where = (flat != base.to(tensor.device).contiguous().reshape(-1).view(bits)).nonzero().reshape(-1)
        if len(where):
            changed.append(name)
            pairs.update(_pair(name, tensor, where))
    if not changed:
        changed = [name for name, tensor in new.items() if tensor.numel()][:1]
        for name in changed:
            pairs.update(_pair(name, new[name], torch.zeros(1, dtype=torch.int64, device=new[name].device)))
    return pairs, changed


def _pair(name: str, tensor: torch.Tensor, where: torch.Tensor) -> dict[str, torch.Tensor]:
    flat = tensor.contiguous().reshape(-1).view(_BITS[tensor.dtype.itemsize])
    return {
        f"{name}.indices": where.to(torch.int32) if tensor.numel() < 2**31 else where,
        f"{name}.values": flat[where].view(tensor.dtype),
    }


def total_bytes(tensors: Mapping[str, Any]) -> int:
    """Bytes of all elements."""
    return sum(tensor.nbytes for tensor in tensors.values())
