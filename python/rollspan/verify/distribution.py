"""What an output's tokens were sampled from, computed again from logits and its own sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rollspan.engine.request import Request
from rollspan.kernels import sampling_torch
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.sampler.sampling_batch import SamplingBatch
from rollspan.sampling_params import SamplingParams

#: Rows that are processed together where each depends on the tokens before it.
_ROWS = 64


class ProcessedDistribution:
    """Log-probs after masks, biases, penalties, temperature and truncation: the engine's default report.

    The definition is the engine's own, :mod:`rollspan.kernels.sampling_torch`; what a rollout proves is which weights
    the logits came from.

    Args:
        params: resolved; without structured outputs, whose masks cannot be known from the tokens.
        prompt_ids, output_ids: of the rollout.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt_ids = list(prompt_ids)
        self._output_ids = list(output_ids)

    def __call__(self, logits: torch.Tensor, start: int) -> list[float]:
        """Log-probs of the output tokens from ``start`` on, one for each row of ``logits`` (``[n, vocabulary]``)."""
        found: list[float] = []
        for first in range(start, start + len(logits), _ROWS):
            last = min(first + _ROWS, start + len(logits))
            found += self._rows(logits[first - start : last - start].float(), first)
        return found

    def _rows(self, scores: torch.Tensor, first: int) -> list[float]:
        batch = SamplingBatch(scores.shape[1])
        batch.update([self._request(first + row) for row in range(len(scores))])
        edited = batch.edit(scores, None)
        if edited is not None:
            index, changed = edited
            scores = scores.index_copy(0, torch.from_numpy(index), changed)
        temperature = np.where(batch.rows["temperature"] == 0, np.float32(1), batch.rows["temperature"])
        kept = sampling_torch.truncate(scores / torch.from_numpy(temperature)[:, None], batch.rows)
        targets = torch.tensor(self._output_ids[first : first + len(scores)])
        chosen: list[float] = torch.log_softmax(kept, dim=-1).gather(1, targets[:, None])[:, 0].tolist()
        return chosen

    def _request(self, length: int) -> Request:
        """The request as it was when its output had ``length`` tokens."""
        tokens = self._prompt_ids + self._output_ids[:length]
        message = EngineCoreRequest(f"{length}", self._prompt_ids, self._params)
        request = Request(message, admission=("", 0), arrival=0, seed=0)
        request.token_ids = tokens
        return request
