"""Sampling in plain torch, on any device: the definition of what :mod:`rollspan.kernels.sampling` computes, its oracle
in the tests and its fallback. Randomness enters as one number per row; double precision wherever sums decide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Candidates among which the boundary of top-p is looked for before the whole row is sorted.
_NUCLEUS_CANDIDATES = 1024
#: Rows that want at most this many best tokens are searched together; others do not make them pay.
_FEW = 64


#: One row to sample, laid out for the extension (``rust/kernels/src/sampling/row.rs``).
#:
#: scores, reported: addresses of the row that is sampled from and of the row whose log-probs are reported; set by
#:     :func:`rollspan.kernels.sampling.sample` only. scores_kind, reported_kind: their element types.
#: seed, position: what the draw depends on: the request's seed and the number of tokens it has sampled.
#: temperature: 0 is greedy and ignores the following three.
#: top_p: 1 is off; of equal tokens at the boundary those with the lowest ids stay.
#: min_p: 0 is off.
#: top_k: at most 0 is off; tokens equal to the k-th stay.
#: num_top: best tokens to report; 0 is the sampled one's log-prob only, -1 none at all.
ROW = np.dtype(
    [
        ("scores", np.uint64),
        ("reported", np.uint64),
        ("seed", np.uint64),
        ("position", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("num_top", np.int32),
        ("scores_kind", np.uint8),
        ("reported_kind", np.uint8),
        ("padding", np.uint16),
    ]
)
Rows = npt.NDArray[np.void]

#: What comes out for one row, laid out for the extension.
OUTCOME = np.dtype([("token_id", np.int64), ("rank", np.int32), ("valid", np.bool_), ("padding", np.uint8, 3)])


def truncated(rows: Rows, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Where top-k, top-p or min-p may drop tokens: bool ``[S]``."""
    limited = ((rows["top_k"] > 0) & (rows["top_k"] < vocabulary)) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
    found: npt.NDArray[np.bool_] = limited & (rows["temperature"] > 0)
    return found


@dataclass(frozen=True)
class SampleResult:
    """What was sampled for S rows.

    Attributes:
        outcomes: :data:`OUTCOME` ``[S]``; token_id is meaningless where valid is False: where the logits hold NaN or no
            finite maximum, or no token is left to choose. rank is one more than the number of tokens with a larger
            logit than the sampled one.
        ids: int32 ``[S, 1 + most]``: the sampled token, then the best ones by (logit descending, id ascending); filled
            as far as each row asked.
        logprobs: float32 of the same shape, natural logarithm; -inf for tokens that truncation dropped.
    """

    outcomes: npt.NDArray[np.void]
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    @classmethod
    def room(cls, num_top: npt.NDArray[np.int32]) -> SampleResult:
        """Room for the result of rows that ask for so many best tokens; no more memory is touched than is filled."""
        shape = (len(num_top), 1 + max(0, int(num_top.max(initial=0))))
        return cls(np.zeros(len(num_top), OUTCOME), np.empty(shape, np.int32), np.empty(shape, np.float32))

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """int64 ``[S]``."""
        return self.outcomes["token_id"]

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """bool ``[S]``."""
        return self.outcomes["valid"]

    @property
    def ranks(self) -> npt.NDArray[np.int32]:
        """int32 ``[S]``."""
        return self.outcomes["rank"]

    def put(self, index: npt.NDArray[np.intp], part: SampleResult) -> None:
        """Writes the result of some rows."""
        columns = part.ids.shape[1]
        self.outcomes[index], self.ids[index, :columns] = part.outcomes, part.ids
        self.logprobs[index, :columns] = part.logprobs


def sample_rows(
    model: Tensor, scores: Tensor, rows: Rows, draws: npt.NDArray[np.float64], *, raw_logprobs: bool
) -> SampleResult:
    """Samples one token per row.

    Args:
        model: the model's logits, float32 ``[S, vocabulary]``; raw log-probs and their ranks come from them.
        scores: what is sampled from: ``model`` with the rows' masks, biases and penalties applied.
        rows: :data:`ROW` ``[S]``; addresses are not used.
        draws: float64 ``[S]`` in [0, 1): where in the cumulative distribution, in order of token id, the choice falls.
        raw_logprobs: report the model's own distribution instead of the one sampled from.
    """
    device = scores.device
    greedy = rows["temperature"] == 0
    temperature = torch.from_numpy(np.where(greedy, np.float32(1), rows["temperature"])).to(device)[:, None]
    valid = torch.isfinite(scores.amax(dim=-1) / temperature[:, 0])
    if not bool(valid.all()):
        model, scores = (logits.masked_fill(~valid[:, None], 0.0) for logits in (model, scores))
    scaled = scores if bool((temperature == 1).all()) else scores / temperature
    kept = truncate(scaled, rows)
    tokens = torch.argmax(scores, dim=-1)
    drawn = np.flatnonzero(~greedy)
    if drawn.size:
        index = torch.from_numpy(drawn).to(device)
        mine = kept if drawn.size == len(greedy) else kept.index_select(0, index)
        tokens = tokens.index_copy(0, index, _inverse_cdf(mine, torch.from_numpy(draws[drawn]).to(device)))
    result = SampleResult.room(np.minimum(rows["num_top"], scores.shape[1]))
    result.token_ids[:] = tokens.cpu().numpy()
    result.valid[:] = valid.cpu().numpy()
    report(result, model if raw_logprobs else scores, model if raw_logprobs else kept, tokens, rows["num_top"])
    return result


def report(
    result: SampleResult, ranking: Tensor, distribution: Tensor, tokens: Tensor, num_top: npt.NDArray[np.int32]
) -> None:
    """Fills in log-probs, best tokens and ranks of the rows that ask for them.

    Args:
        result: of the S rows.
        ranking: float32 ``[S, vocabulary]``, gives ranks and the order of the best tokens.
        distribution: float32 ``[S, vocabulary]`` whose ``torch.log_softmax`` is reported, bit for bit.
        tokens: int64 ``[S]``: the sampled tokens, on the device of the others.
        num_top: int32 ``[S]``, see :data:`ROW`.
    """
    vocabulary = ranking.shape[1]
    for group in (np.flatnonzero((num_top >= 0) & (num_top <= _FEW)), np.flatnonzero(num_top > _FEW)):
        if not group.size:
            continue
        index = torch.from_numpy(group).to(ranking.device)
        whole = group.size == len(num_top)
        order = ranking if whole else ranking.index_select(0, index)
        logprobs = torch.log_softmax(distribution if whole else distribution.index_select(0, index), dim=-1)
        chosen = tokens.index_select(0, index)[:, None]
        ids = torch.cat((chosen, best(order, min(int(num_top[group].max()), vocabulary))), dim=1)
        columns = ids.shape[1]
        result.ids[group, :columns] = ids.cpu().numpy()
        result.logprobs[group, :columns] = logprobs.gather(1, ids).cpu().numpy()
        result.ranks[group] = ((order > order.gather(1, chosen)).sum(dim=-1) + 1).cpu().numpy()


def truncate(scaled: Tensor, parameters: Rows) -> Tensor:
    """Sets to -inf what min-p, top-k and then top-p drop from ``scaled`` (float32 ``[S, vocabulary]``, finite maximum,
    after temperature).
    """
    vocabulary = scaled.shape[1]
    limited = np.flatnonzero(truncated(parameters, vocabulary))
    if not limited.size:
        return scaled
    index = torch.from_numpy(limited).to(scaled.device)
    mine = parameters[limited]
    rows = scaled.index_select(0, index)
    highest = rows.amax(dim=-1, keepdim=True)
    count = np.where(mine["top_k"] > 0, np.minimum(mine["top_k"], vocabulary), vocabulary).astype(np.int64)
    picky = np.flatnonzero(count < vocabulary)
    floor = torch.full_like(highest, -torch.inf)
    if picky.size:
        at = torch.from_numpy(picky).to(rows.device)
        top = torch.topk(rows.index_select(0, at), int(count[picky].max()), dim=-1).values
        floor[at] = top.gather(1, torch.from_numpy(count[picky] - 1).to(rows.device)[:, None])
    with np.errstate(divide="ignore"):
        share = torch.from_numpy(np.log(mine["min_p"])).to(rows.device)[:, None]
    rows = rows.masked_fill((rows < floor) | (rows - highest < share), -torch.inf)
    nucleus = np.flatnonzero(mine["top_p"] < 1)
    if nucleus.size:
        at = torch.from_numpy(nucleus).to(rows.device)
        wanted = torch.from_numpy(mine["top_p"][nucleus].astype(np.float64)).to(rows.device)
        rows.index_copy_(0, at, _nucleus(rows.index_select(0, at), wanted))
    return scaled.index_copy(0, index, rows)


def _nucleus(rows: Tensor, wanted: Tensor) -> Tensor:
    """The fewest best tokens whose share reaches ``wanted`` (float64 ``[R]``); the others become -inf."""
    vocabulary = rows.shape[1]
    highest = rows.amax(dim=-1, keepdim=True)
    limit = wanted[:, None] * (rows - highest).double().exp_().sum(dim=-1, keepdim=True)
    values = torch.topk(rows, min(_NUCLEUS_CANDIDATES, vocabulary), dim=-1).values
    before, reached = _before(values, highest)
    if values.shape[1] < vocabulary and bool((reached < limit).any()):
        values = torch.sort(rows, dim=-1, descending=True).values
        before, _ = _before(values, highest)
    count = (before < limit).sum(dim=-1, keepdim=True).clamp_(min=1)
    lowest = values.gather(1, count - 1)
    spare = count - (values > lowest).sum(dim=-1, keepdim=True)  # how many of the tokens equal to the lowest stay
    equal = rows == lowest
    keep = rows > lowest
    if bool((equal.sum(dim=-1, keepdim=True) > spare).any()):
        equal &= equal.cumsum(dim=-1) <= spare
    return rows.masked_fill(~(keep | equal), -torch.inf)


def _before(values: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of all better tokens for each of the descending ``values``, and of all of them."""
    weights = (values - highest).double().exp_()
    after = weights.cumsum(dim=-1)
    return after - weights, after[:, -1:]


def _inverse_cdf(rows: Tensor, draws: Tensor) -> Tensor:
    """The token at which the cumulative probability first exceeds the draw; never one of probability 0."""
    cumulative = (rows - rows.amax(dim=-1, keepdim=True)).double().exp_().cumsum(dim=-1)
    target = draws[:, None] * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may put a draw of almost 1 at the very end, where the last tokens may have probability 0.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(picked, last)


def best(rows: Tensor, count: int) -> Tensor:
    """Ids (int64 ``[R, count]``) of the largest values of each row, of equal ones the lowest ids, in this order."""
    vocabulary = rows.shape[1]
    if count == 0:
        return torch.empty((len(rows), 0), dtype=torch.int64, device=rows.device)
    values, ids = torch.topk(rows, min(count + 1, vocabulary), dim=-1)
    if count < vocabulary and bool((values[:, count - 1] == values[:, count]).any()):
        lowest = values[:, count - 1 : count]
        equal = rows == lowest
        better = rows > lowest
        equal &= equal.cumsum(dim=-1) <= count - better.sum(dim=-1, keepdim=True)
        ids = (better | equal).nonzero()[:, 1].reshape(len(rows), count)
    else:
        ids = ids[:, :count].sort(dim=-1).values
    order = rows.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)
