"""InputBatch: the tensors of one step; and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollspan.engine.request import Request
from rollspan.kernels.attention import AttentionBatch


@dataclass(frozen=True)
class InputBatch:
    """One step as a single flattened row of T tokens, one request after the other.

    Attributes:
        input_ids: int64 ``[1, T]``.
        positions: int64 ``[1, T]``, counted from the start of each sequence.
        attention: which keys each row sees, and where its own go.
        sample_rows: int64 ``[S + R]``, rows whose logits are needed: S to sample from, then R that score prompt tokens.
        sampled: the S requests whose next token can be sampled, in the order of their rows.
        scored: for each request whose prompt is scored in this step, the prompt tokens ``start`` to ``stop - 1``
            that the next ``stop - start`` of the R rows predict.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    sample_rows: torch.Tensor
    sampled: list[Request]
    scored: list[tuple[Request, int, int]]


@dataclass(frozen=True)
class PendingTokens:
    """What a step that has been launched, but not collected, samples.

    Attributes:
        requests: S of them.
        token_ids: int64 ``[S]``, on the device.
    """

    requests: list[Request]
    token_ids: torch.Tensor

    def put(self, input_ids: torch.Tensor, rows: npt.NDArray[np.intp], requests: Sequence[Request]) -> None:
        """Writes the tokens of ``requests`` into these rows of ``input_ids`` (int64 ``[1, T]``)."""
        if requests == self.requests and len(rows) == input_ids.shape[1]:
            input_ids[0].copy_(self.token_ids)
            return
        places = {request: place for place, request in enumerate(self.requests)}
        sources = torch.tensor([places[request] for request in requests], dtype=torch.int64, device=input_ids.device)
        input_ids[0, torch.from_numpy(rows).to(input_ids.device)] = self.token_ids[sources]


@dataclass(frozen=True)
class StepLogits:
    """What a runner makes of a step.

    Attributes:
        logits: ``[S + R, vocabulary]``, rows as in :class:`InputBatch`.
        sampled: the S requests of the first rows.
        scored: whose prompt tokens the other rows predict, as in :class:`InputBatch`.
    """

    logits: torch.Tensor
    sampled: list[Request]
    scored: list[tuple[Request, int, int]]


def block_table(requests: list[Request]) -> npt.NDArray[np.int32]:
    """int32 ``[requests, longest]``, with room to grow: the next blocks need no new table."""
    width = max(len(request.block_ids) for request in requests) + 8
    table = np.zeros((len(requests), width), dtype=np.int32)
    for row, request in enumerate(requests):
        table[row, : len(request.block_ids)] = request.block_ids
    return table
