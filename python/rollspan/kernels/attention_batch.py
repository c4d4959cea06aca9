"""What attention over a paged cache is given, whatever the backend."""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(eq=False)
class AttentionBatch:
    """The sequences of one step: rows of the flattened queries, and where the keys and values of each lie.

    Row i of sequence s is at position ``seq_lens[s] - (query_start[s + 1] - query_start[s]) + i`` and sees the keys up
    to its own position. All tensors are contiguous, on the device of the cache.

    Attributes:
        query_start: int32 ``[S + 1]``; rows ``query_start[s]`` to ``query_start[s + 1] - 1`` are those of sequence s.
        seq_lens: int32 ``[S]``; number of keys of each sequence, this step's included.
        block_table: int32 ``[S, B]``; KV blocks of each sequence in order, padded with block 0, which holds zeros.
        slot_mapping: int64 ``[T]``; ``block * block_size + offset`` where each row's key and value go, all different.
        max_query_len: the most rows of a sequence.
        max_seq_len: the most keys of a sequence.
        derived: what backends derive from the batch, made in the first layer and used by all of them.
        layout: likewise, where it follows from the addresses, sizes and types of the tensors alone.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    layout: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def advance(self, max_seq_len: int) -> None:
        """The tensors hold the numbers of another step now, in which the longest sequence has ``max_seq_len`` keys."""
        self.max_seq_len = max_seq_len
        self.derived.clear()


class AttentionBackend(Protocol):
    """Attention over a paged cache whose layout is the backend's own.

    A row's result depends on its query and the keys and values that it sees, never on the rows beside it: not to the
    last bit (with matrix products that have this property, see the backend).
    """

    name: str

    def supports(
        self, *, dtype: torch.dtype, head_dim: int, value_dim: int, block_size: int, device: torch.device
    ) -> bool:
        """Whether layers of this kind can use the backend."""

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
        """One layer's keys and values, zero. On a CPU, memory is taken page by page, on first use."""

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
        """Writes the step's keys and values to their slots, then attends, computing in float32.

        Args:
            query: ``[T, heads, head_dim]``; key: ``[T, kv_heads, head_dim]``; value: ``[T, kv_heads, value_dim]``. Any
                strides with a contiguous last dimension; ``heads`` is a multiple of ``kv_heads``.
            cache: what :meth:`allocate` gave for the layer.
            scale: factor of the scores.
            sliding_window: a row at position p sees the keys above ``p - sliding_window`` only.
            softcap: scores become ``softcap * tanh(score / softcap)``.
            sinks: ``[heads]``, a further score per head that takes part in the softmax only.

        Returns:
            ``[T, heads, value_dim]`` in the query's dtype, contiguous.
        """

    def attend_heads(
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
        """:meth:`attend` of what transformers makes: query ``[1, heads, T, head_dim]``, keys and values likewise.

        Returns:
            ``[1, T, heads, value_dim]``.
        """
        query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        return self.attend(
            query,
            key,
            value,
            cache,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )[None]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU aligned to cache lines, with memory that the system gives page by page on first use."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(memory, dtype=torch.uint8, count=size).view(dtype).view(shape)
