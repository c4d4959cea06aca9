"""What a load run saw, request by request, and the figures that follow from it.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """One request. ``chunk_times`` holds the arrival of each piece of a stream that had tokens; collected: empty."""

    started: float
    chunk_times: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: float | None = None
    error: str | None = None
    versions: int = 0

    @property
    def succeeded(self) -> bool:
        return self.ended is not None and self.error is None

    def gaps(self) -> list[float]:
        """Times between one piece with tokens and the next."""
        return [after - before for before, after in pairwise(self.chunk_times)]


@dataclass(slots=True)
class UpdateRecord:
    """One weight update, from the first control call to the answer of the last; ``error`` when one of them failed."""

    path: str
    label: str
    started: float
    ended: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, 99th percentile and largest of a set of seconds; None each where there are none."""

    p50: float | None
    p99: float | None
    largest: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        return cls(percentile(ordered, 50), percentile(ordered, 99), ordered[-1] if ordered else None)

    def milliseconds(self) -> dict[str, float | None]:
        return {name: _milliseconds(getattr(self, name)) for name in ("p50", "p99", "largest")}


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Percentile of ascending values, interpolated linearly between the two nearest ranks."""
    if not ordered:
        return None
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(slots=True)
class LoadResult:
    """All records of one run at one concurrency."""

    concurrency: int
    started: float
    ended: float = 0.0
    records: list[RequestRecord] = field(default_factory=list)
    updates: list[UpdateRecord] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(self.ended - self.started, 1e-9)

    @property
    def succeeded(self) -> int:
        return sum(record.succeeded for record in self.records)

    @property
    def errors(self) -> Counter[str]:
        """Failed requests and failed updates by reason."""
        failures = [record.error for record in self.records] + [update.error for update in self.updates]
        return Counter(error for error in failures if error is not None)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens, those of interrupted and failed requests included, over the run's time."""
        return sum(record.tokens for record in self.records) / self.seconds

    @property
    def time_to_first_token(self) -> Spread:
        return Spread.of([record.chunk_times[0] - record.started for record in self.records if record.chunk_times])

    @property
    def inter_token_latency(self) -> Spread:
        return Spread.of([gap for record in self.records for gap in record.gaps()])

    @property
    def latency(self) -> Spread:
        """From sending a request to the end of its answer."""
        return Spread.of([record.ended - record.started for record in self.records if record.ended is not None])

    def stall(self, update: UpdateRecord) -> Spread:
        """How long an update held up each stream that was running all through it.

        A stream's stall is its largest gap that overlaps the update, less the median gap of the whole run.
        """
        usual = self.inter_token_latency.p50 or 0.0
        stalls = []
        for record in self.records:
            times = record.chunk_times
            if not times or times[0] > update.started or times[-1] < update.ended:
                continue
            gaps = [
                after - before
                for before, after in pairwise(times)
                if after >= update.started and before <= update.ended
            ]
            stalls.append(max(gaps) - usual)
        return Spread.of(stalls)

    def as_json(self) -> dict[str, Any]:
        """The figures as plain data; times in milliseconds unless the name says otherwise."""
        chunks = sum(len(record.chunk_times) for record in self.records)
        streamed = sum(record.tokens for record in self.records if record.chunk_times)
        return {
            "concurrency": self.concurrency,
            "seconds": round(self.seconds, 3),
            "requests": len(self.records),
            "succeeded": self.succeeded,
            "errors": dict(self.errors),
            "output_tokens": sum(record.tokens for record in self.records),
            "output_tokens_per_second": round(self.tokens_per_second, 1),
            "requests_per_second": round(self.succeeded / self.seconds, 2),
            "time_to_first_token_ms": self.time_to_first_token.milliseconds(),
            "inter_token_latency_ms": self.inter_token_latency.milliseconds(),
            "request_latency_ms": self.latency.milliseconds(),
            "tokens_per_chunk": round(streamed / chunks, 2) if chunks else None,
            "requests_spanning_update": sum(record.versions > 1 for record in self.records),
            "updates": [
                {
                    "path": update.path,
                    "weight_version": update.label,
                    "error": update.error,
                    "update_ms": _milliseconds(update.ended - update.started),
                    "stall_ms": self.stall(update).milliseconds(),
                }
                for update in self.updates
            ],
        }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
