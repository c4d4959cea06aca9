"""Sampling: logits to token ids and log-probs, vectorised; randomness is a function of seed and position alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollspan.engine.request import Request
from rollspan.protocol.messages import LogprobsLists

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position): SplitMix64 (Steele, Lea, Flood 2014) over both, 53 bits.

    Independent of the batch, so that a seeded request samples the same whatever runs beside it.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
        state = _mix(state + (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    result: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


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
    logprobs: list[LogprobsLists | None]


class Sampler:
    """Samples one token per row.

    Args:
        raw_logprobs: report the model's own log-probs instead of those that were sampled from.
    """

    def __init__(self, *, raw_logprobs: bool) -> None:
        self._raw_logprobs = raw_logprobs

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Samples:
        """Samples from ``logits`` (``[S, vocabulary]``) for S requests, in this order: minimum length, temperature,
        top-k, top-p.
        """
        if not requests:  # a step of prompt chunks only
            return Samples([], [], [])
        logits = logits.float()
        # A NaN anywhere in a row makes its logsumexp NaN, +inf makes it inf, all -inf makes it -inf.
        valid = torch.isfinite(torch.logsumexp(logits, dim=-1))
        processed = self._process(torch.nan_to_num(logits, nan=0.0) if not bool(valid.all()) else logits, requests)
        logprobs = torch.log_softmax(processed, dim=-1)
        tokens = torch.argmax(logprobs, dim=-1)
        drawn = [index for index, request in enumerate(requests) if not request.params.greedy]
        if drawn:
            draws = uniforms(
                [requests[index].seed for index in drawn], [requests[index].num_output_tokens for index in drawn]
            )
            rows = logprobs if len(drawn) == len(requests) else logprobs[drawn]
            picked = _inverse_cdf(rows, torch.from_numpy(draws).to(rows.device))
            tokens = picked if len(drawn) == len(requests) else tokens.index_copy(0, _index(drawn, tokens), picked)
        # Processing may leave no token (all of them masked) or infinite logits (tiny temperature): the choice is none.
        valid &= torch.isfinite(logprobs.gather(1, tokens[:, None])[:, 0])
        reported = torch.log_softmax(logits, dim=-1) if self._raw_logprobs else logprobs
        return Samples(tokens.tolist(), valid.tolist(), _gather_logprobs(reported, tokens, requests))

    @staticmethod
    def _process(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        vocabulary = logits.shape[-1]
        params = [request.params for request in requests]
        masked = [(row, request) for row, request in enumerate(requests) if request.masks_stop_tokens]
        if masked:
            logits = logits.clone()
            for row, request in masked:
                stops = [token for token in request.params.all_stop_token_ids if token < vocabulary]
                logits[row, stops] = -torch.inf
        if any(not p.greedy and p.temperature != 1.0 for p in params):
            temperatures = [1.0 if p.greedy else p.temperature for p in params]
            logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
        limits = [vocabulary if p.greedy or p.top_k <= 0 else min(p.top_k, vocabulary) for p in params]
        if min(limits) < vocabulary:
            limited = [row for row, limit in enumerate(limits) if limit < vocabulary]
            rows = logits[limited]
            top = torch.topk(rows, max(limits[row] for row in limited), dim=-1).values
            threshold = top.gather(1, _index([limits[row] - 1 for row in limited], top)[:, None])
            logits = logits.index_copy(0, _index(limited, logits), rows.masked_fill(rows < threshold, -torch.inf))
        nucleus = [row for row, p in enumerate(params) if not p.greedy and p.top_p < 1.0]
        if nucleus:
            rows = logits[nucleus]
            wanted = torch.tensor([params[row].top_p for row in nucleus], device=logits.device)[:, None]
            ordered, order = torch.sort(torch.softmax(rows, dim=-1), dim=-1, descending=True, stable=True)
            before = ordered.cumsum(dim=-1) - ordered  # probability of all better tokens
            drop = torch.zeros_like(rows, dtype=torch.bool).scatter(1, order, before >= wanted)
            logits = logits.index_copy(0, _index(nucleus, logits), rows.masked_fill(drop, -torch.inf))
        return logits


def _index(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _inverse_cdf(logprobs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative probability first exceeds the draw; never one of probability 0."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    target = draws[:, None] * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may put a draw of almost 1 at the very end, where the last tokens may have probability 0.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(picked, last)


def _gather_logprobs(
    logprobs: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]
) -> list[LogprobsLists | None]:
    """LogprobsLists per request that asked for them: sampled token first, then its top k."""
    result: list[LogprobsLists | None] = [None] * len(requests)
    vocabulary = logprobs.shape[-1]
    wanted = {
        row: vocabulary if request.params.logprobs == -1 else min(request.params.logprobs, vocabulary)
        for row, request in enumerate(requests)
        if request.params.logprobs is not None
    }
    # Rows that want the same number go together: which of equal tokens topk lists depends on k, never on the batch.
    for count in set(wanted.values()):
        group = [row for row, number in wanted.items() if number == count]
        rows = logprobs.index_select(0, _index(group, logprobs))
        chosen = tokens.index_select(0, _index(group, logprobs))[:, None]
        chosen_logprob = rows.gather(1, chosen)
        ranks = ((rows > chosen_logprob).sum(dim=-1) + 1).to(torch.int32).cpu().numpy()
        top_values, top_ids = torch.topk(rows, count, dim=-1)
        ids = torch.cat((chosen, top_ids), dim=1).to(torch.int32).cpu().numpy()
        values = torch.cat((chosen_logprob, top_values), dim=1).cpu().numpy()
        for place, row in enumerate(group):
            one = slice(place, place + 1)
            result[row] = LogprobsLists(ids[one], values[one], ranks[one])
    return result
