"""The curves of a run as a PNG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from learner import Report


def draw(reports: Sequence[Report], path: Path) -> None:
    """Reward by step, trained tokens by lag, and how far the policy had moved at each lag."""
    lags: Counter[int] = sum((report.lags for report in reports), Counter())
    most = max(lags)
    drifts = [[report.drift[lag] for report in reports if lag in report.drift] for lag in range(most + 1)]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), constrained_layout=True)
    left.plot([report.reward for report in reports])
    left.set(xlabel="step (one weight update each)", ylabel="share of right answers", title="reward", ylim=(0, 1))
    middle.bar(range(most + 1), [lags[lag] for lag in range(most + 1)])
    middle.set(xlabel="commits behind", ylabel="tokens", title="lag of the tokens trained on")
    right.bar(range(most + 1), [sum(values) / len(values) if values else 0.0 for values in drifts])
    right.set(xlabel="commits behind", ylabel="mean |log ratio|", title="what the correction corrects")
    for axes in (middle, right):
        axes.set_xticks(range(most + 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
