"""WeightBounds: requests that wait for newer weights, and outputs that newer weights have left behind."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rollspan.engine.request import Request
from rollspan.errors import RollspanError
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.sampler.text import Structure

#: Requests that may wait here; as many as a frontend has open by default.
MAX_HELD = 4096
#: Seconds that one may wait at most, a year: clocks of the system cannot count to the largest floats.
MAX_WAIT = 365 * 86400.0
#: Stop reason of an output whose first token is of weights too far behind.
STALE = "stale_weights"


@dataclass(frozen=True)
class Held:
    """A checked request that waits for a commit; ``deadline`` is in seconds of the monotonic clock."""

    message: EngineCoreRequest
    structure: Structure | None
    deadline: float


class WeightBounds:
    """What requests say about the commits that they take: ``min_weight_commit`` and ``max_weight_lag``.

    A request that needs a newer commit than the one in force waits here, outside the scheduler, as long as an update is
    open and its time is not over. A step costs O(1), however many wait.
    """

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._first_deadline = math.inf  # or earlier, when whose it was has gone otherwise

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._held)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def hold(self, message: EngineCoreRequest, structure: Structure | None, commit: int, *, updating: bool) -> None:
        """Takes a request that ``commit`` is too old for.

        Raises:
            RollspanError: ``stale_weights``: it does not want to wait, or there is nothing to wait for; ``queue_full``.
        """
        wait = message.provenance.weight_wait_s
        if not updating or wait <= 0:
            raise _stale(message, commit, "no update is open" if wait > 0 else "the request does not wait")
        if len(self._held) >= MAX_HELD:
            raise RollspanError(f"{MAX_HELD} requests wait for weights, which is the limit", reason="queue_full")
        held = Held(message, structure, time.monotonic() + min(wait, MAX_WAIT))
        self._held[message.request_id] = held
        self._first_deadline = min(self._first_deadline, held.deadline)

    def drop(self, request_id: str) -> None:
        """Forgets a request; unknown ids are ignored."""
        self._held.pop(request_id, None)

    def take_all(self, client_index: int | None = None) -> list[EngineCoreRequest]:
        """Those of a client, or all; they wait no more."""
        taken = [held.message for held in self._held.values() if client_index in (None, held.message.client_index)]
        for message in taken:
            self.drop(message.request_id)
        return taken

    def take_admissible(self, commit: int) -> list[Held]:
        """Those that ``commit`` is new enough for, in order of arrival; they wait no more."""
        taken = [held for held in self._held.values() if held.message.provenance.min_weight_commit <= commit]
        for held in taken:
            self.drop(held.message.request_id)
        return taken

    def take_refused(self, commit: int, *, updating: bool) -> list[tuple[EngineCoreRequest, RollspanError]]:
        """Those whose wait has come to nothing, each with the reason: its time is over, or no update is open."""
        if not self._held:
            return []
        now = time.monotonic()
        if updating and now < self._first_deadline:
            return []
        refused = []
        for held in list(self._held.values()):
            if not updating or held.deadline <= now:
                why = "its time to wait is over" if updating else "the update that was open has not brought it"
                refused.append((held.message, _stale(held.message, commit, why)))
                self.drop(held.message.request_id)
        self._first_deadline = min((held.deadline for held in self._held.values()), default=math.inf)
        return refused

    def next_deadline(self) -> float | None:
        """When :meth:`take_refused` has to be called, in seconds of the monotonic clock; None when none waits."""
        return self._first_deadline if self._held else None


def left_behind(requests: Iterable[Request], commit: int) -> list[Request]:
    """Those whose first token is of weights further behind ``commit`` than they take."""
    return [
        request
        for request in requests
        if request.provenance.max_weight_lag is not None
        and request.first_commit is not None
        and commit - request.first_commit > request.provenance.max_weight_lag
    ]


def _stale(message: EngineCoreRequest, commit: int, why: str) -> RollspanError:
    least = message.provenance.min_weight_commit
    text = f"the request needs weight commit {least} or newer, in force is {commit}: {why}"
    return RollspanError(text, reason="stale_weights", param="min_weight_commit")
