"""Cases for attention backends: random sequences in a paged cache, and dense attention as the reference."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollspan.kernels.attention import AttentionBackend, AttentionBatch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """What the layers of a case have in common."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    softcap: float | None = None
    with_sinks: bool = False

    @property
    def scale(self) -> float:
        return 1.3 * self.head_dim**-0.5


@dataclass
class Sequences:
    """Queries, keys and values of sequences, each ``[length, heads, dim]``, and the blocks they are given."""

    shape: Shape
    lengths: list[int]
    seed: int = 0
    queries: list[Tensor] = field(init=False)
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)
    sinks: Tensor | None = field(init=False)
    tables: list[list[int]] = field(init=False)
    num_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        shape, generator = self.shape, torch.Generator().manual_seed(self.seed)

        def draw(heads: int, dim: int) -> list[Tensor]:
            return [torch.randn(n, heads, dim, generator=generator).to(shape.dtype) for n in self.lengths]

        self.queries = draw(shape.heads, shape.head_dim)
        self.keys = draw(shape.kv_heads, shape.head_dim)
        self.values = draw(shape.kv_heads, shape.value_dim)
        self.sinks = torch.randn(shape.heads, generator=generator) if shape.with_sinks else None
        counts = [-(-n // shape.block_size) for n in self.lengths]
        self.num_blocks = sum(counts) + 3
        # Blocks in any order, block 0 and two more unused.
        blocks = iter((torch.randperm(self.num_blocks - 1, generator=generator) + 1).tolist())
        self.tables = [list(itertools.islice(blocks, count)) for count in counts]

    def reference(self) -> list[Tensor]:
        """Dense softmax attention in float64: ``[length, heads, value_dim]`` of each sequence."""
        shape, group = self.shape, self.shape.heads // self.shape.kv_heads
        results = []
        for query, key, value in zip(self.queries, self.keys, self.values, strict=True):
            keys, values = (t.double().repeat_interleave(group, dim=1).transpose(0, 1) for t in (key, value))
            scores = query.double().transpose(0, 1) @ keys.transpose(1, 2) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            position = torch.arange(len(query))
            hidden = position[None] > position[:, None]
            if shape.sliding_window is not None:
                hidden |= position[None] <= position[:, None] - shape.sliding_window
            scores = scores.masked_fill(hidden, -math.inf)
            if self.sinks is not None:
                sinks = self.sinks.double()[:, None, None].expand(-1, len(query), 1)
                weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
            else:
                weights = torch.softmax(scores, dim=-1)
            results.append((weights @ values).transpose(0, 1))
        return results

    def step(self, spans: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
        """Query, key, value and batch of one step that computes rows ``start`` to ``stop - 1`` of each sequence.

        Query and keys are views as transformers makes them: heads first in memory for the query.
        """
        size = self.shape.block_size
        query, key, value = (
            torch.cat([rows[s][start:stop] for s, start, stop in spans])
            for rows in (self.queries, self.keys, self.values)
        )
        starts = [0, *itertools.accumulate(stop - start for _, start, stop in spans)]
        width = max(len(self.tables[s]) for s, _, _ in spans)
        tables = [self.tables[s] + [0] * (width - len(self.tables[s])) for s, _, _ in spans]
        slots = [self.tables[s][p // size] * size + p % size for s, start, stop in spans for p in range(start, stop)]
        batch = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([stop for _, _, stop in spans], dtype=torch.int32),
            block_table=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            max_query_len=max(stop - start for _, start, stop in spans),
            max_seq_len=max(stop for _, _, stop in spans),
        )
        return query.transpose(0, 1).contiguous().transpose(0, 1), key, value, batch

    def run(
        self, backend: AttentionBackend, schedule: list[list[tuple[int, int, int]]], *, stale: float = 0.0
    ) -> list[Tensor]:
        """Runs the steps of ``schedule``; the results as :meth:`reference` gives them.

        Args:
            schedule: for each step, spans ``(sequence, start, stop)``; those of a sequence follow each other.
            stale: what all slots but those of block 0 hold before they are written.
        """
        shape = self.shape
        cache = backend.allocate(
            self.num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, shape.value_dim, shape.dtype, CPU
        )
        for part in cache:
            part[1:] = stale
        results: list[list[Tensor]] = [[] for _ in self.lengths]
        for spans in schedule:
            query, key, value, batch = self.step(spans)
            output = backend.attend(
                query,
                key,
                value,
                cache,
                batch,
                scale=shape.scale,
                sliding_window=shape.sliding_window,
                softcap=shape.softcap,
                sinks=self.sinks,
            )
            assert output.dtype == shape.dtype
            assert output.shape == (query.shape[0], shape.heads, shape.value_dim)
            for (s, start, stop), first in zip(spans, batch.query_start.tolist(), strict=False):
                results[s].append(output[first : first + stop - start].clone())
        return [torch.cat(parts) for parts in results]

    def at_once(self) -> list[list[tuple[int, int, int]]]:
        """All sequences whole, in one step."""
        return [[(s, 0, n) for s, n in enumerate(self.lengths)]]

    def one_by_one(self) -> list[list[tuple[int, int, int]]]:
        """Each sequence alone, whole."""
        return [[(s, 0, n)] for s, n in enumerate(self.lengths)]

    def chunked(self, chunk: int) -> list[list[tuple[int, int, int]]]:
        """All sequences beside each other, by ``chunk`` rows a step."""
        starts = range(0, max(self.lengths), chunk)
        return [[(s, a, min(n, a + chunk)) for s, n in enumerate(self.lengths) if a < n] for a in starts]

    def staggered(self, chunks: list[int]) -> list[list[tuple[int, int, int]]]:
        """Sequence s starts at step s and takes the sizes in ``chunks`` in turn: chunks beside decodes."""
        done, step, steps = [0] * len(self.lengths), 0, []
        while any(at < n for at, n in zip(done, self.lengths, strict=True)):
            spans = []
            for s, n in enumerate(self.lengths):
                if step >= s and done[s] < n:
                    stop = min(n, done[s] + chunks[(step + s) % len(chunks)])
                    spans.append((s, done[s], stop))
                    done[s] = stop
            step += 1
            steps.append(spans)
        return steps
