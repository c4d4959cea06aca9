"""Scheduler: which requests run in the next step, and with how many tokens. Knows nothing of tensors."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum

from rollspan.engine.kv_cache import BlockPool
from rollspan.engine.request import Request, RequestStatus


class PauseState(Enum):
    """UNPAUSED; PAUSED_NEW starts no request (modes abort and wait); PAUSED_ALL runs nothing (mode keep)."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    PAUSED_ALL = "paused_all"


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """``num_tokens`` of the pending tokens of ``request`` run in this step."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """True when the step reaches the last known token, so that the next one can be sampled."""
        return self.num_tokens == self.request.num_pending_tokens


class Scheduler:
    """Continuous batching under a token budget.

    One rule for prefill, chunked prefill, decode and recompute: a request has known tokens and computed tokens, and
    a step computes some of the difference. Decodes come first, then prefills in progress, then new requests by
    priority and arrival. When blocks run out, the last running request in that order loses its blocks and is
    recomputed later.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self._waiting: list[tuple[tuple[int, int], Request]] = []

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks and wait for their turn."""
        return len(self.requests) - len(self.running)

    @property
    def drained(self) -> bool:
        """True when no request that has ever run is left unfinished."""
        return not self.running and all(request.status is RequestStatus.WAITING for request in self.requests.values())

    def has_work(self) -> bool:
        """True when :meth:`schedule` would return something."""
        if self.pause_state is PauseState.PAUSED_ALL or not self.requests:
            return False
        return self.pause_state is PauseState.UNPAUSED or not self.drained

    def add(self, request: Request) -> None:
        """Puts a request into the queue."""
        self.requests[request.request_id] = request
        heapq.heappush(self._waiting, (request.order, request))

    def schedule(self) -> list[ScheduledRequest]:
        """Picks the requests of the next step and gives them the blocks that they need.

        Returns:
            At most ``max_num_seqs`` requests with together at most ``max_num_batched_tokens`` tokens, in no
            particular order; empty when paused or idle.
        """
        if self.pause_state is PauseState.PAUSED_ALL:
            return []
        scheduled: dict[str, ScheduledRequest] = {}
        budget = self.max_num_batched_tokens
        preempted = False
        self.running.sort(key=lambda request: (request.num_pending_tokens > 1, request.order))
        for request in list(self.running):
            tokens = min(request.num_pending_tokens, budget)
            if request.status is not RequestStatus.RUNNING or tokens == 0:
                continue
            while not self.pool.grow(request.block_ids, request.num_computed_tokens + tokens):
                victim = max(self.running, key=lambda running: running.order)
                budget += self._unschedule(victim, scheduled)
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                scheduled[request.request_id] = ScheduledRequest(request, tokens)
                budget -= tokens
        if not preempted:
            self._admit(scheduled, budget)
        return list(scheduled.values())

    @staticmethod
    def _unschedule(victim: Request, scheduled: dict[str, ScheduledRequest]) -> int:
        entry = scheduled.pop(victim.request_id, None)
        return 0 if entry is None else entry.num_tokens

    def _admit(self, scheduled: dict[str, ScheduledRequest], budget: int) -> None:
        skipped = []
        while self._waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            entry = heapq.heappop(self._waiting)
            request = entry[1]
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                continue  # finished while it waited
            if self.pause_state is PauseState.PAUSED_NEW and request.status is RequestStatus.WAITING:
                skipped.append(entry)
                continue
            tokens = min(request.num_pending_tokens, budget)
            if not self.pool.grow(request.block_ids, tokens):
                skipped.append(entry)
                break
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            scheduled[request.request_id] = ScheduledRequest(request, tokens)
            budget -= tokens
        for entry in skipped:
            heapq.heappush(self._waiting, entry)

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks; its tokens are computed again later."""
        self.running.remove(request)
        self.pool.release(request.block_ids)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        heapq.heappush(self._waiting, (request.order, request))

    def preempt_all(self) -> None:
        """Drops every KV block in use: all running requests are recomputed when they run next."""
        for request in list(self.running):
            self.preempt(request)

    def finish(self, request: Request) -> None:
        """Forgets a request and frees its blocks; a queue entry that is left is skipped later."""
        if self.requests.pop(request.request_id, None) is None:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        self.pool.release(request.block_ids)
        request.status = RequestStatus.FINISHED
        if len(self._waiting) > 2 * len(self.requests) + 64:
            self._waiting = [entry for entry in self._waiting if entry[1].status is not RequestStatus.FINISHED]
            heapq.heapify(self._waiting)

    def check(self) -> None:
        """Verifies the invariants; called when the engine goes idle and by tests.

        Raises:
            RuntimeError: a block is lost or held twice, or a list and a status disagree.
        """
        held = [block for request in self.requests.values() for block in request.block_ids]
        if len(held) != len(set(held)) or len(held) + self.pool.num_free != self.pool.num_blocks:
            raise RuntimeError(
                f"KV blocks: {len(held)} held ({len(set(held))} distinct), {self.pool.num_free} free, "
                f"{self.pool.num_blocks} in all"
            )
        running = {request.request_id for request in self.running}
        states = {key for key, request in self.requests.items() if request.status is RequestStatus.RUNNING}
        if running != states or len(running) != len(self.running):
            raise RuntimeError(f"running list {sorted(running)} differs from the states {sorted(states)}")
