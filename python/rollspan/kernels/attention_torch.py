"""Paged attention in torch operations, on any device: the definition of what the native kernel computes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rollspan.kernels.attention_batch import AttentionBackend, AttentionBatch, zeros

#: Keys are taken in tiles that start at multiples of this, so that a row's sums do not depend on how long others are.
TILE = 64


@dataclass(frozen=True)
class _Chunk:
    """Rows of one sequence with several rows in the step."""

    sequence: int
    start: int
    stop: int
    first_position: int


@dataclass(frozen=True)
class _Plan:
    """Sequences of one row, the longest first, and chunks of several rows."""

    decodes: Tensor  # int64 [N], indices of sequences
    decode_rows: Tensor  # int64 [N]
    decode_lens: list[int]
    decode_lens_tensor: Tensor  # int64 [N]
    chunks: list[_Chunk]


def _plan(batch: AttentionBatch) -> _Plan:
    if (made := batch.derived.get("torch")) is not None:
        plan: _Plan = made
        return plan
    starts, lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    counts = [stop - start for start, stop in itertools.pairwise(starts)]
    decodes = sorted((s for s, count in enumerate(counts) if count == 1), key=lambda s: -lens[s])
    decode_lens = [lens[s] for s in decodes]
    chunks = [_Chunk(s, starts[s], starts[s + 1], lens[s] - count) for s, count in enumerate(counts) if count > 1]
    device = batch.seq_lens.device
    plan = _Plan(
        torch.tensor(decodes, dtype=torch.int64, device=device),
        torch.tensor([starts[s] for s in decodes], dtype=torch.int64, device=device),
        decode_lens,
        torch.tensor(decode_lens, dtype=torch.int64, device=device),
        chunks,
    )
    batch.derived["torch"] = plan
    return plan


class _Softmax:
    """Sums of values weighted by softmax, tile by tile: ``[..., R, Dv]``, and the maximum and total of each row."""

    def __init__(self, shape: tuple[int, ...], value_dim: int, sinks: Tensor | None, device: torch.device) -> None:
        self.sums = torch.zeros((*shape, value_dim), device=device)
        if sinks is None:
            self.top = torch.full((*shape, 1), -math.inf, device=device)
            self.total = torch.zeros((*shape, 1), device=device)
        else:
            self.top = sinks.expand(*shape, 1).clone()
            self.total = torch.ones((*shape, 1), device=device)

    def add(self, rows: tuple[slice, ...], scores: Tensor, visible: Tensor, values: Tensor) -> None:
        """Takes ``scores`` (``[..., R, TILE]``) and ``values`` (``[..., TILE, Dv]``) of the keys that are visible."""
        sums, top, total = self.sums[rows], self.top[rows], self.total[rows]
        scores = scores.masked_fill(~visible, -math.inf)
        new_top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
        # A row that has seen nothing yet must not get -inf - -inf.
        shift = new_top.masked_fill(new_top == -math.inf, 0.0)
        weights = torch.exp(scores - shift)
        kept = torch.exp(top - shift)
        total.mul_(kept).add_(weights.sum(dim=-1, keepdim=True))
        sums.mul_(kept).add_(_product(weights, values))
        top.copy_(new_top)

    def result(self) -> Tensor:
        return self.sums / self.total


class TorchAttention(AttentionBackend):
    """Keys ``[num_blocks, block_size, kv_heads, head_dim]``, values likewise with ``value_dim``; any dtype and device.

    Softmax runs online over tiles of 64 keys. Rows are as independent as the rows of ``torch.matmul``: to the bit where
    its results do not depend on the number of rows, as with MKL under ``MKL_CBWR=AVX512,STRICT``.
    """

    name = "torch"

    def supports(
        self, *, dtype: torch.dtype, head_dim: int, value_dim: int, block_size: int, device: torch.device
    ) -> bool:
        return dtype.is_floating_point

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
        shape = (num_blocks, block_size, kv_heads)
        return zeros((*shape, head_dim), dtype, device), zeros((*shape, value_dim), dtype, device)

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
        keys, values = (cached.flatten(0, 1) for cached in cache)
        keys.index_copy_(0, batch.slot_mapping, key.to(keys.dtype))
        values.index_copy_(0, batch.slot_mapping, value.to(values.dtype))
        rows, heads, _ = query.shape
        kv_heads, value_dim = value.shape[1:]
        group = heads // kv_heads
        layer = _Layer(keys, values, cache[0].shape[1], scale, sliding_window, softcap)
        # The heads of a group share their keys: they are rows of one matrix product.
        grouped = query.reshape(rows, kv_heads, group, -1).float()
        head_sinks = None if sinks is None else sinks.float().view(kv_heads, group, 1)
        output = query.new_empty((rows, kv_heads, group, value_dim))
        plan = _plan(batch)
        if plan.decode_lens:
            result = layer.decode(grouped[plan.decode_rows], batch, plan, head_sinks)
            output[plan.decode_rows] = result.to(output.dtype)
        for chunk in plan.chunks:
            result = layer.prefill(grouped[chunk.start : chunk.stop], batch, chunk, head_sinks)
            output[chunk.start : chunk.stop] = result.to(output.dtype)
        return output.view(rows, heads, value_dim)


@dataclass(frozen=True)
class _Layer:
    """A layer's cached keys ``[slots, kv_heads, D]`` and values, and how it scores."""

    keys: Tensor
    values: Tensor
    block_size: int
    scale: float
    sliding_window: int | None
    softcap: float | None

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        scores = _product(query, keys.transpose(-1, -2)) * self.scale
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def first_tile(self, position: int) -> int:
        """Position of the first tile that a row at ``position`` sees."""
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1) // TILE * TILE

    def tile(self, tables: Tensor, tile: int) -> tuple[Tensor, Tensor, Tensor]:
        """Positions (int64 ``[TILE]``) of a tile, and its keys and values (float32 ``[N, kv_heads, TILE, D]``)."""
        positions = torch.arange(tile, tile + TILE, device=tables.device)
        # Past the end of the table anything readable will do: no row sees it.
        blocks = tables[:, (positions // self.block_size).clamp(max=tables.shape[1] - 1)].long()
        slots = (blocks * self.block_size + positions % self.block_size).flatten()
        keys, values = (
            cached.index_select(0, slots).view(-1, TILE, *cached.shape[1:]).transpose(1, 2).float()
            for cached in (self.keys, self.values)
        )
        return positions, keys, values

    def decode(self, query: Tensor, batch: AttentionBatch, plan: _Plan, sinks: Tensor | None) -> Tensor:
        """``[N, kv_heads, group, Dv]`` of the sequences with one row; query ``[N, kv_heads, group, D]``."""
        softmax = _Softmax(tuple(query.shape[:-1]), self.values.shape[-1], sinks, query.device)
        tables, lens, last = batch.block_table[plan.decodes], plan.decode_lens, plan.decode_lens_tensor - 1
        count = len(lens)
        for tile in range(self.first_tile(lens[-1] - 1), lens[0], TILE):
            while lens[count - 1] <= tile:
                count -= 1
            positions, keys, values = self.tile(tables[:count], tile)
            visible = self.visible(positions, last[:count, None])
            # Stale slots may hold anything, and 0 * NaN is NaN.
            values.masked_fill_(~visible[:, None, :, None], 0.0)
            softmax.add((slice(count),), self.scores(query[:count], keys), visible[:, None, None], values)
        return softmax.result()

    def prefill(self, query: Tensor, batch: AttentionBatch, chunk: _Chunk, sinks: Tensor | None) -> Tensor:
        """``[Q, kv_heads, group, Dv]`` of one sequence; query ``[Q, kv_heads, group, D]``."""
        rows, kv_heads, group, dim = query.shape
        # Tokens and the heads of a group are rows of one matrix product.
        query = query.transpose(0, 1).reshape(kv_heads, rows * group, dim)
        head_sinks = None if sinks is None else sinks.repeat(1, rows, 1)
        softmax = _Softmax((kv_heads, rows * group), self.values.shape[-1], head_sinks, query.device)
        table = batch.block_table[chunk.sequence : chunk.sequence + 1]
        first = chunk.first_position
        last = torch.arange(first, first + rows, device=query.device).repeat_interleave(group)
        for tile in range(self.first_tile(first), first + rows, TILE):
            stop = rows if self.sliding_window is None else min(rows, tile + TILE - 1 + self.sliding_window - first)
            seen = slice(max(0, tile - first) * group, stop * group)
            positions, keys, values = self.tile(table, tile)
            values[0].masked_fill_((positions >= first + rows)[:, None], 0.0)
            visible = self.visible(positions, last[seen, None])
            softmax.add((slice(None), seen), self.scores(query[:, seen], keys[0]), visible, values[0])
        return softmax.result().view(kv_heads, rows, group, -1).transpose(0, 1)

    def visible(self, positions: Tensor, last: Tensor) -> Tensor:
        """Whether rows at ``last`` (int64 ``[N, 1]``) see ``positions``: boolean ``[N, TILE]``."""
        visible = positions <= last
        return visible if self.sliding_window is None else visible & (positions > last - self.sliding_window)


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """``rows @ matrix``. MKL takes another way for a single row, with other bits: such a row is doubled."""
    if rows.shape[-2] > 1:
        return torch.matmul(rows, matrix)
    return torch.matmul(rows.expand(*rows.shape[:-2], 2, -1), matrix)[..., :1, :]
