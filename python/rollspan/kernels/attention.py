"""Attention over a paged cache: the backends, and which one a layer uses."""

from __future__ import annotations

import torch

from rollspan.kernels.attention_batch import AttentionBackend, AttentionBatch
from rollspan.kernels.attention_native import NativeAttention
from rollspan.kernels.attention_torch import TorchAttention
from rollspan.kernels.attention_varlen import VarlenAttention

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionBatch",
    "NativeAttention",
    "TorchAttention",
    "VarlenAttention",
    "select",
]

#: By preference; the last supports everything.
BACKENDS: tuple[AttentionBackend, ...] = (NativeAttention(), VarlenAttention(), TorchAttention())


def select(
    device: torch.device,
    *,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    block_size: int,
    name: str | None = None,
) -> AttentionBackend:
    """The first backend that supports layers of this kind; the one called ``name`` where that is given.

    Raises:
        ValueError: there is no such backend, or it does not support layers of this kind.
    """
    for backend in BACKENDS:
        if name in (None, backend.name) and backend.supports(
            dtype=dtype, head_dim=head_dim, value_dim=value_dim, block_size=block_size, device=device
        ):
            return backend
    names = ", ".join(backend.name for backend in BACKENDS)
    raise ValueError(
        f"attention backend {name!r} (of {names}) does not support {dtype}, head_dim {head_dim}, "
        f"value_dim {value_dim}, block_size {block_size} on {device}"
    )
