"""Edits of logits before sampling: masks, biases and penalties over all rows at once, at the cells that they concern.

Cells are given by row and token, both int64; the same cell may be named twice. NaN and infinity stay visible, so that
a row that is not finite is still found to be invalid afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cells:
    """Cells of a ``[E, vocabulary]`` tensor: int64 ``rows`` and ``tokens``, each ``[N]``."""

    rows: Tensor
    tokens: Tensor

    def flat(self, vocabulary: int) -> Tensor:
        """Their places in the flattened tensor."""
        return self.rows * vocabulary + self.tokens


def allow(logits: Tensor, cells: Cells) -> None:
    """Masks all but ``cells`` in the rows that have any."""
    rows = cells.rows.unique()
    finite = torch.isfinite(logits.index_select(0, rows).amax(dim=-1))
    at = cells.flat(logits.shape[1])
    view = logits.view(-1)
    kept = view.index_select(0, at)
    logits.index_fill_(0, rows, -torch.inf)
    view[at] = kept
    _poison(logits, rows[~finite])


def allow_mask(logits: Tensor, mask: Tensor) -> None:
    """Masks what ``mask`` (bool, of the shape of ``logits``) does not allow."""
    finite = torch.isfinite(logits.amax(dim=-1))
    logits.masked_fill_(~mask, -torch.inf)
    _poison(logits, (~finite).nonzero()[:, 0])


def _poison(logits: Tensor, rows: Tensor) -> None:
    """A row whose infinite or undefined logit may have been masked stays invalid."""
    if len(rows):
        logits[rows, 0] = torch.nan


def unpack(mask: Tensor, vocabulary: int) -> Tensor:
    """Bool ``[S, vocabulary]`` of a packed mask, int32 ``[S, ceil(vocabulary / 32)]``, lowest bit first."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask[:, :, None] >> bits & 1).bool().reshape(len(mask), -1)[:, :vocabulary]


def add(logits: Tensor, cells: Cells, values: Tensor | float) -> None:
    """Adds ``values`` (float32 ``[N]``, or one for all): a bias, or -inf to mask."""
    at = cells.flat(logits.shape[1])
    if isinstance(values, float):
        values = torch.full(at.shape, values, device=logits.device)
    logits.view(-1).scatter_add_(0, at, values)


def repeat(logits: Tensor, seen: Cells, penalty: Tensor) -> None:
    """Repetition penalty (Keskar et al., 2019): logits of seen tokens are divided by it, multiplied where negative.

    Args:
        logits: float32 ``[E, vocabulary]``.
        seen: tokens of prompt and output.
        penalty: float32 ``[E]``.
    """
    view, at = logits.view(-1), seen.flat(logits.shape[1])
    value, factor = view.index_select(0, at), penalty.index_select(0, seen.rows)
    view[at] = torch.where(value > 0, value / factor, value * factor)


def penalize(logits: Tensor, output: Cells, frequency: Tensor, presence: Tensor) -> None:
    """Takes ``frequency`` from the logit of a token once for each time it is in the output, and ``presence`` once.

    Args:
        logits: float32 ``[E, vocabulary]``.
        output: every token of the outputs, as often as it occurs.
        frequency, presence: float32 ``[E]``.
    """
    view, at = logits.view(-1), output.flat(logits.shape[1])
    value = view.index_select(0, at)
    view[at] = 0.0  # the cells themselves serve as counters
    view.scatter_add_(0, at, torch.ones_like(value))
    count = view.index_select(0, at)
    lower = value - frequency.index_select(0, output.rows) * count
    view[at] = lower - presence.index_select(0, output.rows)
