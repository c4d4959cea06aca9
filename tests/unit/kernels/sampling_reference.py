"""Sampling written plainly, one row at a time, in double precision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollspan.kernels.sampling import uniforms

#: A draw, or a share, that lies closer than this to a boundary may fall on either side of it.
MARGIN = 1e-6


@dataclass(frozen=True)
class Expected:
    """What a row gives.

    Attributes:
        logprobs: of every token, -inf for those that truncation dropped.
        token: the sampled one.
        certain: False where rounding may decide which token it is, or which are kept.
    """

    logprobs: npt.NDArray[np.float64]
    token: int
    certain: bool


def expected(logits: npt.NDArray[np.float32], row: np.void) -> Expected:
    """The distribution that ``row`` (one of ``make_rows``) describes, and its sample."""
    scores = logits.astype(np.float64)
    if row["temperature"] == 0:
        shifted = scores - scores.max()
        return Expected(shifted - np.log(np.exp(shifted).sum()), int(scores.argmax()), certain=True)
    shifted = (scores - scores.max()) / float(row["temperature"])
    weights = np.exp(shifted)
    certain = True
    if 0 < row["top_k"] < len(scores):
        weights[scores < np.sort(scores)[-row["top_k"]]] = 0
    if row["min_p"] > 0:
        least = float(row["min_p"])
        certain = bool((abs(weights / least - 1) > MARGIN).all())
        weights[weights < least] = 0
    if row["top_p"] < 1:
        order = np.lexsort((np.arange(len(scores)), -scores))
        order = order[weights[order] > 0]
        before = np.concatenate(([0.0], weights[order].cumsum()[:-1]))
        distance = before - float(row["top_p"]) * weights.sum()
        later = distance[1:]  # the best token always stays
        certain = certain and bool(((abs(later) > MARGIN * weights.sum()) | (later == 0)).all())
        weights[order[1:][later >= 0]] = 0
    cumulative = weights.cumsum()
    target = uniforms([row["seed"]], [row["position"]])[0] * cumulative[-1]
    token = int(np.searchsorted(cumulative, target, side="right"))
    certain = certain and bool((abs(cumulative - target) > MARGIN * cumulative[-1]).all())
    with np.errstate(divide="ignore"):
        return Expected(np.log(weights / cumulative[-1]), token, certain)
