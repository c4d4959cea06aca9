"""Sampler: the logits of a step to one token for each request, with the log-probs that it asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollspan.engine.request import Request
from rollspan.kernels import sampling
from rollspan.protocol.messages import LogprobsLists
from rollspan.protocol.packed_logprobs import pack_each
from rollspan.sampler.sampling_batch import SamplingBatch


@dataclass(frozen=True)
class Samples:
    """Result for S requests.

    Attributes:
        token_ids: S ids; meaningless where ``valid`` is False.
        valid: False where the logits hold NaN or no finite maximum, or no token is left to choose.
        logprobs: per request, or None where it asked for none.
    """

    token_ids: list[int]
    valid: list[bool]
    logprobs: Sequence[LogprobsLists | None]


class Sampler:
    """Samples one token per row; remembers the last step's requests only to be quick when they come again.

    Args:
        raw_logprobs: report the model's own log-probs instead of those that were sampled from.
        exact_logprobs: report them as ``torch.log_softmax`` computes them, bit for bit.
        backend: "native", "torch", or "auto" for the first of them that can.
    """

    def __init__(self, *, raw_logprobs: bool, exact_logprobs: bool = False, backend: str = "auto") -> None:
        self._raw_logprobs = raw_logprobs
        self._exact_logprobs = exact_logprobs
        self._backend = backend
        self._batch: SamplingBatch | None = None

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[Request], mask: torch.Tensor | None = None) -> Samples:
        """Samples from ``logits`` (``[S, vocabulary]``, left as they are) for S requests, in this order: mask, allowed
        tokens, bad words, minimum length, bias, penalties, temperature, min-p, top-k, top-p.

        Args:
            logits: float32, bfloat16 or float16.
            requests: one for each row; in the same order as in the last step, if they are the same.
            mask: allowed tokens of each row: bool ``[S, vocabulary]``, or packed, lowest bit first: int32
                ``[S, ceil(vocabulary / 32)]``.
        """
        if not requests:  # a step of prompt chunks only
            return Samples([], [], [])
        vocabulary = logits.shape[1]
        batch = self._batch
        if batch is None or batch.vocabulary != vocabulary:
            batch = self._batch = SamplingBatch(vocabulary)
        batch.update(requests)
        result = sampling.sample(
            logits,
            batch.rows,
            edited=batch.edit(logits, mask),
            raw_logprobs=self._raw_logprobs,
            exact_logprobs=self._exact_logprobs,
            backend=self._backend,
        )
        return Samples(result.token_ids.tolist(), result.valid.tolist(), _logprobs(result, batch.wanted))

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, targets: list[int], count: int) -> LogprobsLists:
        """Log-probs of the tokens of one prompt under the model's own distribution, without any parameter's effect.

        Args:
            logits: ``[R, vocabulary]``: row i says what the model expected where ``targets[i]`` stands.
            targets: R tokens of the prompt.
            count: best tokens to list besides; -1 for the whole vocabulary.

        Returns:
            One position a target. All log-probs of a position are NaN where its logits are not finite.
        """
        num_top = logits.shape[1] if count == -1 else count
        backend = "torch" if self._exact_logprobs else self._backend
        result = sampling.score(logits, targets, num_top, backend=backend)
        return LogprobsLists(result.ids, result.logprobs, np.ascontiguousarray(result.ranks))


def _logprobs(
    result: sampling.SampleResult, wanted: Mapping[int, npt.NDArray[np.intp]]
) -> Sequence[LogprobsLists | None]:
    """One entry for each row: of as many columns as :attr:`SamplingBatch.wanted` says, or None."""
    count = len(result.outcomes)
    logprobs: list[LogprobsLists | None] = [None] * count
    for columns, rows in wanted.items():
        if len(rows) == count:
            return pack_each(LogprobsLists(result.ids, result.logprobs, result.ranks))
        packed = pack_each(
            LogprobsLists(result.ids[rows, :columns], result.logprobs[rows, :columns], result.ranks[rows])
        )
        for row, one in zip(rows.tolist(), packed, strict=True):
            logprobs[row] = one
    return logprobs
