"""History: what became of the weights since the engine started; for ``get_weight_history`` and the log."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rollspan.errors import RollspanError

logger = logging.getLogger("rollspan.engine")

MAX_COMMITS = 1000
MAX_FAILURES = 100


@dataclass
class Commit:
    """Weights that came into force, or got another name.

    Attributes:
        kind: ``load``, ``update`` or ``relabel``.
        declared: somebody has named them.
        weight_digest: None until it is known, which it never becomes of weights that were replaced at once.
        source: where they came from.
        tensors, nbytes: what was transferred.
        partial: some of them had been in force before.
        seconds: by phase: ``receive``, ``verify``, ``prepare``, ``commit``.
        stall_seconds: how long the commit kept the next step waiting.
        time: seconds since the epoch.
    """

    kind: str
    weight_version: str
    weight_commit: int
    declared: bool
    weight_digest: str | None
    source: str
    tensors: int = 0
    nbytes: int = 0
    partial: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    stall_seconds: float = 0.0
    time: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """As ``get_weight_history`` tells it."""
        return {
            "weight_version": self.weight_version,
            "weight_commit": self.weight_commit,
            "weight_digest": self.weight_digest,
            "declared": self.declared,
            "time": self.time,
            "kind": self.kind,
            "source": self.source,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "partial": self.partial,
            "seconds": {phase: round(seconds, 6) for phase, seconds in self.seconds.items()},
            "stall_seconds": round(self.stall_seconds, 6),
        }


class History:
    """The last commits and failures, and how many updates there were.

    Attributes:
        successes: updates that were committed.
        failures: updates that failed, were aborted or ran out of time.
    """

    def __init__(self) -> None:
        self.successes = self.failures = 0
        self._commits: deque[Commit] = deque(maxlen=MAX_COMMITS)
        self._failures: deque[dict[str, Any]] = deque(maxlen=MAX_FAILURES)

    @property
    def last(self) -> Commit:
        """The last one; the first is the load."""
        return self._commits[-1]

    @property
    def last_seconds(self) -> dict[str, float]:
        """How long the phases of the last update took, and ``stall``, the next step's wait; empty before the first."""
        last = next((commit for commit in reversed(self._commits) if commit.kind == "update"), None)
        return {} if last is None else {**last.seconds, "stall": last.stall_seconds}

    def committed(self, commit: Commit) -> None:
        """Files a commit; updates are told in the log, all about each on one line."""
        self._commits.append(commit)
        if commit.kind != "update":
            return
        self.successes += 1
        logger.info(
            "weights %r in force: commit %d, %s, %s%d tensors, %.1f MB from %s; %s; next step delayed by %.1f ms",
            commit.weight_version,
            commit.weight_commit,
            commit.weight_digest,
            "partial, " if commit.partial else "",
            commit.tensors,
            commit.nbytes / 1e6,
            commit.source,
            ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in commit.seconds.items()),
            1e3 * commit.stall_seconds,
        )

    def failed(self, error: RollspanError, phase: str) -> None:
        """Files an update that came to nothing."""
        self.failures += 1
        self._failures.append({"time": time.time(), "reason": error.reason, "message": error.message, "phase": phase})
        logger.warning("a weight update was dropped while %s: %s (%s)", phase, error.message, error.reason)

    def digested(self, root: str) -> None:
        """The digest of the weights in force has become known."""
        for commit in reversed(self._commits):
            if commit.weight_commit != self.last.weight_commit:
                return
            commit.weight_digest = root

    def to_dict(self) -> dict[str, Any]:
        """The two lists of ``get_weight_history``, oldest first."""
        return {"commits": [commit.to_dict() for commit in self._commits], "failures": list(self._failures)}
