"""KvSpans: which weights computed the keys and values of one request, position by position."""

from __future__ import annotations

from rollspan.protocol.messages import Stamp, StampSpan


class KvSpans:
    """Runs of positions whose KV was computed by the same weights; O(1) a step, O(runs) memory.

    A run is known by its stamp and its first position and reaches to the next one, the last one to wherever the request
    has got: a step that goes on under the same weights leaves nothing to write down.
    """

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[Stamp, int]] = []

    def restart(self, cached: int, stamp: Stamp | None) -> None:
        """The request (again) has no KV but that of ``cached`` positions, by ``stamp``, from the prefix cache."""
        self._runs = [(stamp, 0)] if cached and stamp is not None else []

    def grow(self, stamp: Stamp, start: int) -> None:
        """Positions from ``start`` on, where the KV ends, are being computed by ``stamp``, or will be."""
        if self._runs and self._runs[-1][1] == start:
            self._runs.pop()  # whose weights came and went without computing anything
        if not self._runs or self._runs[-1][0] != stamp:
            self._runs.append((stamp, start))

    def up_to(self, end: int) -> list[StampSpan]:
        """Spans of positions 0 to ``end - 1``, all of them computed: contiguous, neighbours differ."""
        ends = [start for _, start in self._runs[1:]] + [end]
        return [(*stamp, start, stop) for (stamp, start), stop in zip(self._runs, ends, strict=True)]
