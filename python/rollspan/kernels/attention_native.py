"""Paged attention in Rust, on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from rollspan.kernels import native
from rollspan.kernels.attention_batch import AttentionBackend, AttentionBatch, zeros

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Head sizes, and the step between them.
_SMALLEST, _LARGEST, _STEP = 32, 256, 16


#: Attribute of a layer's keys: its values, and both as the kernel takes them.
_LAYOUT = "_rollspan_layout"


class NativeAttention(AttentionBackend):
    """Keys ``[num_blocks, kv_heads, head_dim, block_size]``, values ``[num_blocks, kv_heads, block_size, value_dim]``.

    float32, bfloat16 or float16, the cache's type apart from the query's. A row's result has the same bits whatever is
    computed beside it, with any number of threads and on any instruction set; `rust/kernels/src/attention` says how.
    """

    name = "native"

    def supports(
        self, *, dtype: torch.dtype, head_dim: int, value_dim: int, block_size: int, device: torch.device
    ) -> bool:
        return (
            native.available()
            and device.type == "cpu"
            and dtype in _CODES
            and block_size > 0
            and block_size % _STEP == 0
            and all(_SMALLEST <= dim <= _LARGEST and dim % _STEP == 0 for dim in (head_dim, value_dim))
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
        return (
            zeros((num_blocks, kv_heads, head_dim, block_size), dtype, device),
            zeros((num_blocks, kv_heads, block_size, value_dim), dtype, device),
        )

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
        query, key, value = query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        return self.attend_heads(
            query,
            key,
            value,
            cache,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )[0]

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
        # Every microsecond here is spent once for each layer of each step, and every view takes one.
        keys, values = cache
        known = keys.__dict__.get(_LAYOUT)
        layout = known[1] if known is not None and known[0] is values else _layout(keys, values)
        _, heads, rows, head_dim = query.shape
        dtype = query.dtype
        kv_heads, value_dim = layout[4], layout[7]
        if (
            head_dim != layout[6]
            or key.shape != (1, kv_heads, rows, head_dim)
            or value.shape != (1, kv_heads, rows, value_dim)
            or key.dtype != dtype
            or value.dtype != dtype
        ):
            given = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in (query, key, value))
            raise ValueError(
                f"query, key and value ({given}) do not fit each other, or a cache of keys {tuple(keys.shape)} and "
                f"values {tuple(values.shape)}"
            )
        _, query_head, query_row, query_last = query.stride()
        _, key_head, key_row, key_last = key.stride()
        _, value_head, value_row, value_last = value.stride()
        if query_last != 1 or key_last != 1 or value_last != 1:
            return self.attend_heads(
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                cache,
                batch,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                sinks=sinks,
            )
        numbers = batch.layout.get("native") or _numbers(batch, rows)
        if numbers[6] != rows:
            raise ValueError(f"{rows} rows given, but the batch has {numbers[6]}")
        if sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous()):
            sinks = sinks.float().contiguous()
        output = torch.empty((1, rows, heads, value_dim), dtype=dtype)
        native.module().paged_attention(
            (
                query.data_ptr(),
                query_row,
                query_head,
                key.data_ptr(),
                key_row,
                key_head,
                value.data_ptr(),
                value_row,
                value_head,
                output.data_ptr(),
                _CODES[dtype],
                heads,
            ),
            layout,
            numbers,
            scale,
            sliding_window or 0,
            softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
        )
        return output


def _layout(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """A layer's cache as the kernel takes it: addresses and sizes. Kept with the keys, which do not move."""
    num_blocks, kv_heads, head_dim, block_size = keys.shape
    value_dim = values.shape[3]
    if (
        values.shape != (num_blocks, kv_heads, block_size, value_dim)
        or values.dtype != keys.dtype
        or not keys.is_contiguous()
        or not values.is_contiguous()
    ):
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are no cache of this backend")
    sizes = num_blocks, kv_heads, block_size, head_dim, value_dim
    layout = (keys.data_ptr(), values.data_ptr(), _CODES[keys.dtype], *sizes)
    keys.__dict__[_LAYOUT] = values, layout
    return layout


def _numbers(batch: AttentionBatch, rows: int) -> tuple[int, ...]:
    """The batch as the kernel takes it: addresses and sizes."""
    expected = (
        (batch.query_start, torch.int32, 1),
        (batch.seq_lens, torch.int32, 1),
        (batch.block_table, torch.int32, 2),
        (batch.slot_mapping, torch.int64, 1),
    )
    if any(t.dtype != dtype or t.dim() != dims or not t.is_contiguous() for t, dtype, dims in expected):
        raise ValueError("the tensors of a batch must be contiguous, int32 but for slot_mapping, which is int64")
    sequences, width = batch.block_table.shape
    if (
        batch.query_start.shape[0] != sequences + 1
        or batch.seq_lens.shape[0] != sequences
        or batch.slot_mapping.shape[0] != rows
    ):
        raise ValueError(f"the tensors of a batch do not fit each other, or {rows} rows")
    numbers = (*(t.data_ptr() for t, _, _ in expected), sequences, width, rows)
    batch.layout["native"] = numbers
    return numbers
