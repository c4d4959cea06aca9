"""Which rows of a padded or packed batch are tokens, and which sequences they form."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollspan.kernels.attention import AttentionBatch

#: Tokens per block of the cache that one forward pass fills; results do not depend on it.
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Layout:
    """The sequences of a batch of ``B`` rows of ``T`` positions.

    Attributes:
        lengths: tokens of each sequence, in order.
        rows: int64, index into the flattened ``B * T`` positions of each token; None where all of them are tokens.
    """

    lengths: tuple[int, ...]
    rows: torch.Tensor | None

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        boundaries: torch.Tensor | None,
    ) -> Layout:
        """Reads the layout from what a model is called with; the first given counts.

        Args:
            shape: ``(B, T)``.
            mask: ``[B, T]``, true (or not 0) for tokens: one run of them in each row, padding left or right of it.
            boundaries: int ``[S + 1]``, where packed sequences start and end (``cu_seq_lens_q``).
            position_ids: int ``[B or 1, T]``; where they do not count on, a packed sequence starts.

        Raises:
            ValueError: a mask of another kind.
        """
        batch, length = shape
        if mask is not None:
            if tuple(mask.shape) != shape:
                raise ValueError(f"the attention mask must be [batch, tokens] {list(shape)}, got {list(mask.shape)}")
            tokens = mask.bool()
            lengths = tokens.sum(dim=1)
            if int((tokens[:, 1:] & ~tokens[:, :-1]).sum() + tokens[:, 0].sum()) != int((lengths > 0).sum()):
                raise ValueError("the attention mask has a row with padding between its tokens")
            rows = tokens.flatten().nonzero()[:, 0]
            return cls(tuple(n for n in lengths.tolist() if n), None if rows.numel() == batch * length else rows)
        if boundaries is not None:
            return cls(tuple(stop - start for start, stop in itertools.pairwise(boundaries.tolist())), None)
        if position_ids is not None and position_ids.dim() == 2:
            goes_on = position_ids.diff(dim=-1) == 1
            if not bool(goes_on.all()):
                starts = torch.nn.functional.pad(~goes_on, (1, 0), value=True).expand(batch, -1).flatten()
                edges = [*starts.nonzero()[:, 0].tolist(), batch * length]
                return cls(tuple(stop - start for start, stop in itertools.pairwise(edges)), None)
        return cls((length,) * batch, None)

    def gather(self, states: torch.Tensor) -> torch.Tensor:
        """``[B, heads, T, D]`` to the tokens' ``[R, heads, D]``."""
        flat = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
        return flat if self.rows is None else flat.index_select(0, self.rows)

    def scatter(self, states: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """``[R, heads, D]`` to ``[B, T, heads, D]``, zero where there is no token."""
        if self.rows is not None:
            empty = states.new_zeros((shape[0] * shape[1], *states.shape[1:]))
            states = empty.index_copy(0, self.rows, states)
        return states.reshape(*shape, *states.shape[1:])


@functools.lru_cache(maxsize=8)
def whole_sequences(lengths: Sequence[int], device: torch.device) -> tuple[AttentionBatch, int]:
    """The batch in which each sequence attends to itself from its start, and the blocks of its cache (block 0 too)."""
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    firsts = list(itertools.accumulate(blocks, initial=1))
    tables = [
        [*range(first, first + count), *[0] * (max(blocks) - count)]
        for first, count in zip(firsts, blocks, strict=False)
    ]
    slots = [
        torch.arange(first * BLOCK_SIZE, first * BLOCK_SIZE + length)
        for first, length in zip(firsts, lengths, strict=False)
    ]

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = AttentionBatch(
        query_start=tensor(list(itertools.accumulate(lengths, initial=0))),
        seq_lens=tensor(list(lengths)),
        block_table=tensor(tables),
        slot_mapping=torch.cat(slots).to(device),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
    )
    return batch, firsts[-1]
