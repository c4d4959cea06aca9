"""Paged attention by ``torch.nn.attention.varlen``, on NVIDIA GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollspan.kernels.attention_batch import AttentionBackend, AttentionBatch
from rollspan.kernels.attention_torch import TorchAttention

#: Pages of torch's own flash attention hold a multiple of this many tokens.
PAGE = 256
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD, _HEAD_STEP = 256, 8


class VarlenAttention(AttentionBackend):
    """Keys and values ``[num_blocks, block_size, kv_heads, head_dim]``, as :class:`TorchAttention` keeps them.

    Always with ``num_splits=1``. Only then are the results right: with keys split among thread blocks, flash attention
    over pages writes the rows of the first sequence only (pytorch/pytorch#194167). And only then does a row depend on
    nothing but its own sequence. It also keeps torch from taking cuDNN, which prepares a plan for each new shape.

    Nothing here waits for the device, so that steps can be captured in CUDA graphs; ``max_query_len`` and
    ``max_seq_len`` of the batch are part of the launch and have to be bounds of every step that is replayed.

    Args:
        function: what is called instead of ``varlen_attn``, with the same arguments.
    """

    name = "varlen"

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function
        self._other = TorchAttention()

    def supports(
        self, *, dtype: torch.dtype, head_dim: int, value_dim: int, block_size: int, device: torch.device
    ) -> bool:
        return (
            device.type == "cuda"
            and dtype in _DTYPES
            and head_dim == value_dim
            and head_dim % _HEAD_STEP == 0
            and head_dim <= _LARGEST_HEAD
            and block_size % PAGE == 0
            and _has_flash_attention(device)
        )

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        return self._other.allocate(num_blocks, block_size, kv_heads, head_dim, value_dim, dtype, device)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if softcap is not None or sinks is not None:  # torch's flash attention has neither
            return self._other.attend(
                query,
                key,
                value,
                cache,
                batch,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks=sinks,
            )
        for cached, new in zip(cache, (key, value), strict=True):
            cached.flatten(0, 1).index_copy_(0, batch.slot_mapping, new)
        output: Tensor = (self._function or _varlen_attn())(
            query if query.stride(-1) == 1 else query.contiguous(),
            *cache,
            batch.query_start,
            batch.query_start,  # has to be there; the number of keys is what seqused_k says
            batch.max_query_len,
            batch.max_seq_len,
            scale=scale,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=True,
            seqused_k=batch.seq_lens,
            block_table=batch.block_table,
            num_splits=1,
        )
        return output.contiguous()


@functools.cache
def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn  # takes a tenth of a second that a CPU need not spend

    return varlen_attn


@functools.cache
def _has_flash_attention(device: torch.device) -> bool:
    """Whether torch was built with flash attention, and the GPU is one of those that it is for."""
    built = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)
