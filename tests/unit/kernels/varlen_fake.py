"""``torch.nn.attention.varlen.varlen_attn`` on the CPU: as strict about its arguments as the kernel, in plain torch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from rollspan.kernels.attention import VarlenAttention


class FakeVarlen:
    """``varlen_attn`` with a block table; attention of single rows is computed without reading any tensor's contents.

    Args:
        page: pages must hold a multiple of so many tokens.
    """

    def __init__(self, page: int = 256) -> None:
        self.page = page
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int,
    ) -> Tensor:
        self.calls.append({"max_q": max_q, "max_k": max_k, "window_size": window_size, "rows": query.shape[0]})
        sequences = block_table.shape[0]
        assert num_splits == 1, "split over pages gives wrong results"
        assert enable_gqa
        assert query.stride(-1) == 1
        assert key.shape == value.shape
        assert key.shape[1] % self.page == 0
        assert key.shape[3] == query.shape[2]
        for tensor, shape in ((cu_seq_q, sequences + 1), (cu_seq_k, sequences + 1), (seqused_k, sequences)):
            assert tensor.dtype == torch.int32
            assert tensor.shape == (shape,)
            assert tensor.is_contiguous()
        assert block_table.dtype == torch.int32
        assert block_table.stride(1) == 1
        keys, values = (part[block_table.long()].flatten(1, 2).float() for part in (key, value))  # [S, K, kv_heads, D]
        if max_q == 1:
            last = seqused_k.long()[:, None, None] - 1
            return _attend(query[:, None], keys, values, last, scale, window_size)[:, 0].to(query.dtype)
        output = torch.empty_like(query)  # with the strides of the query
        for s, (start, stop) in enumerate(itertools.pairwise(cu_seq_q.tolist())):
            used = int(seqused_k[s])
            assert stop - start <= max_q
            assert used <= max_k
            last = torch.arange(used - stop + start, used)[None, :, None]
            one = slice(s, s + 1)
            rows = _attend(query[None, start:stop], keys[one, :used], values[one, :used], last, scale, window_size)
            output[start:stop] = rows[0].to(query.dtype)
        return output


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, last: Tensor, scale: float, window_size: tuple[int, int]
) -> Tensor:
    """``[S, R, heads, D]``: rows at the positions ``last`` (``[S, R, 1]``) see the keys in their window."""
    left, right = window_size
    assert right == 0
    group = query.shape[2] // keys.shape[2]
    position = torch.arange(keys.shape[1])
    hidden = position > last if left < 0 else (position > last) | (position < last - left)  # [S, R, K]
    # Stale slots may hold anything.
    values = values.masked_fill(hidden.all(dim=1)[:, :, None, None], 0.0)
    keys, values = (part.repeat_interleave(group, dim=2) for part in (keys, values))
    scores = torch.einsum("srhd,skhd->srhk", query.float(), keys) * scale
    weights = torch.softmax(scores.masked_fill(hidden[:, :, None], -math.inf), dim=-1)
    return torch.einsum("srhk,skhd->srhd", weights, values)


class CpuVarlenAttention(VarlenAttention):
    """The backend over :class:`FakeVarlen`, for layers of any kind."""

    def __init__(self, page: int = 256) -> None:
        self.fake = FakeVarlen(page)
        super().__init__(self.fake)

    def supports(self, **_: Any) -> bool:
        return True
