"""Scheduler: which requests run in the next step, and with how many tokens. Knows nothing of tensors."""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

from rollspan.engine.kv_cache import BlockKey, BlockPool, Root
from rollspan.engine.request import Request, RequestStatus
from rollspan.protocol.messages import Stamp, StampSpan


class PauseState(Enum):
    """UNPAUSED; PAUSED_NEW starts no request (modes abort and wait); PAUSED_ALL runs nothing (mode keep)."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    PAUSED_ALL = "paused_all"


@dataclass(slots=True)
class ScheduledRequest:
    """``num_tokens`` of the pending tokens of ``request`` run in this step.

    ``samples``: the step reaches the last known token, so that the next one can be sampled. ``stop``, set at launch:
    how many leading tokens of the request are computed once the step is done.
    """

    request: Request
    num_tokens: int
    samples: bool
    stop: int = 0


@dataclass(slots=True)
class PrefixCacheStats:
    """Since the last report: prompts looked up, their tokens, how many of these were found; and of preempted ones."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


_BY_ORDER = attrgetter("order")


class Scheduler:
    """Continuous batching under a token budget.

    One rule for prefill, chunked prefill, decode and recompute: a request has known tokens and computed tokens, and
    a step computes some of the difference. Decodes come first, then prefills in progress, then new requests by
    priority and arrival. When blocks run out, the last running request in that order loses its blocks and is
    recomputed later. What the prefix cache holds of a request counts as computed; a request whose next block another
    one is computing right now waits for it (n outputs of one prompt compute it once).

    Args:
        pool: the KV blocks.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        max_scored_tokens: most tokens of one request in one step while its prompt log-probs are computed.
        prefix_caching: whether requests share the blocks of equal prefixes.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_scored_tokens: int = 2**31,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # sorted by order
        self.num_preemptions = 0
        self.prefix_stats = PrefixCacheStats()
        self._max_scored_tokens = max_scored_tokens
        self._prefix_caching = prefix_caching
        self._commit = 0
        self._stamp: Stamp = ("", 0)  # of the step launched last
        self._untold: dict[Request, None] = {}  # running; whose frontends cannot tell yet whose their KV is
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._computing: dict[BlockKey, Request] = {}  # full blocks that running requests come to next

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
            At most ``max_num_seqs`` requests with together at most ``max_num_batched_tokens`` tokens; decodes first,
            in an order that stays the same while the same requests run; empty when paused or idle.
        """
        if self.pause_state is PauseState.PAUSED_ALL:
            return []
        scheduled: dict[Request, ScheduledRequest] = {}
        budget = self.max_num_batched_tokens
        block_size = self.pool.block_size
        preempted = False
        queue = [
            request
            for request in self.running
            if len(request.token_ids) - request.num_computed_tokens == 1
            and len(request.token_ids) < request.max_num_tokens  # else its last token is being sampled right now
        ]
        if len(queue) < len(self.running):
            queue += [request for request in self.running if len(request.token_ids) - request.num_computed_tokens > 1]
        for request in queue:
            if request.status is not RequestStatus.RUNNING or budget == 0:
                continue
            pending = len(request.token_ids) - request.num_computed_tokens
            tokens = self._chunk(request, pending, budget) if pending > 1 else pending
            needed = request.num_computed_tokens + tokens
            while needed > len(request.block_ids) * block_size and not self.pool.grow(request.block_ids, needed):
                victim = self.running[-1]
                entry = scheduled.pop(victim, None)
                budget += 0 if entry is None else entry.num_tokens
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                scheduled[request] = ScheduledRequest(request, tokens, tokens == pending)
                budget -= tokens
        if not preempted and self._waiting:
            self._admit(scheduled, budget)
        return list(scheduled.values())

    def _chunk(self, request: Request, pending: int, budget: int) -> int:
        scoring = request.params.prompt_logprobs is not None and request.num_scored_tokens < request.num_prompt_tokens
        return min(pending, budget, self._max_scored_tokens if scoring else pending)

    def _admit(self, scheduled: dict[Request, ScheduledRequest], budget: int) -> None:
        skipped = []
        while self._waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            entry = heapq.heappop(self._waiting)
            request = entry[1]
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                continue  # finished while it waited
            new = request.status is RequestStatus.WAITING
            if (new and self.pause_state is PauseState.PAUSED_NEW) or len(request.token_ids) >= request.max_num_tokens:
                skipped.append(entry)
                continue
            looked_up = self._look_up(request)
            if looked_up is None:
                skipped.append(entry)
                continue
            found, root = looked_up
            cached = len(found) * self.pool.block_size
            pending = len(request.token_ids) - cached
            tokens = self._chunk(request, pending, budget)
            self.pool.share(found)
            if not self.pool.grow(found, cached + tokens):
                self.pool.release(found)
                skipped.append(entry)
                break
            self._count_hits(request, cached)
            request.block_ids = found
            request.num_computed_tokens = request.num_registered_tokens = cached
            request.status = RequestStatus.RUNNING
            if request.kv is not None:
                request.kv.restart(cached, self._stamp_of(root) if cached else None)
                self._untold[request] = None
            self._announce(request)
            bisect.insort(self.running, request, key=_BY_ORDER)
            scheduled[request] = ScheduledRequest(request, tokens, tokens == pending)
            budget -= tokens
        for entry in skipped:
            heapq.heappush(self._waiting, entry)

    # The prefix cache

    def _look_up(self, request: Request) -> tuple[list[int], Root] | None:
        """Cached blocks of a request's beginning (never its last token's) and the root of their chain.

        None: a block of it is being computed, and the request should wait.
        """
        root = (self._commit, request.cache_salt)
        request.parent = root if self._prefix_caching else None
        if request.parent is None or not request.reads_prefix_cache:
            return [], root
        full = (len(request.token_ids) - 1) // self.pool.block_size
        blocks, request.parent = self.pool.match(root, request.token_ids, full)
        if (
            len(blocks) < full
            and self._computing
            and self.pool.key(request.parent, request.token_ids, len(blocks)) in self._computing
        ):
            return None
        if not blocks and request.provenance.allow_stale_prefix:
            return self._look_up_stale(request, root)
        return blocks, root

    def _look_up_stale(self, request: Request, current: Root) -> tuple[list[int], Root]:
        """Cached blocks of a prompt's beginning under the newest commit that has any.

        All are of one chain: nobody could tell what KV that one commit computed behind KV of another comes from.
        """
        full = min(len(request.token_ids) - 1, request.num_prompt_tokens) // self.pool.block_size
        for root in self.pool.roots(request.cache_salt):
            blocks, _ = self.pool.match(root, request.token_ids, full)
            if blocks:
                request.parent = None  # what comes behind them is of no single commit
                return blocks, root
        return [], current

    def _stamp_of(self, root: Root) -> Stamp | None:
        label = self.pool.label(root)
        return None if label is None else (label, root[0])

    def _count_hits(self, request: Request, cached: int) -> None:
        stats = self.prefix_stats
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = cached
            stats.requests += 1
            stats.queries += len(request.token_ids)
            stats.hits += cached
        else:
            stats.preempted_requests += 1
            stats.preempted_queries += len(request.token_ids)
            stats.preempted_hits += cached

    def _announce(self, request: Request) -> None:
        """Notes the full block of its prompt that a request computes next, for others that need the same one."""
        start = request.num_registered_tokens
        if request.parent is not None and start + self.pool.block_size <= request.num_prompt_tokens:
            key = self.pool.key(request.parent, request.token_ids, start // self.pool.block_size)
            self._computing.setdefault(key, request)

    def _withdraw(self, request: Request) -> None:
        start = request.num_registered_tokens
        if request.parent is not None and start + self.pool.block_size <= request.num_prompt_tokens:
            key = self.pool.key(request.parent, request.token_ids, start // self.pool.block_size)
            if self._computing.get(key) is request:
                del self._computing[key]

    def register(self, request: Request, num_computed_tokens: int) -> None:
        """Offers the blocks that a running request's first ``num_computed_tokens`` tokens fill to later ones.

        Call it when the step that computed them has succeeded.
        """
        if request.parent is None:
            return
        self._withdraw(request)
        size = self.pool.block_size
        while request.num_registered_tokens + size <= num_computed_tokens:
            index = request.num_registered_tokens // size
            key = self.pool.key(request.parent, request.token_ids, index)
            request.parent = self.pool.register(request.block_ids[index], key, self._stamp[0])
            request.num_registered_tokens += size
        self._announce(request)

    def track(self, scheduled: list[ScheduledRequest], stamp: Stamp) -> dict[Request, list[StampSpan]]:
        """Notes that a step under ``stamp`` is being launched, before its tokens count as computed.

        Nothing is to be done for requests that go on under the same stamp.

        Returns:
            The KV spans of requests that sample a token in it whose frontends cannot tell what it attends to.
        """
        if stamp != self._stamp:
            self._stamp = stamp
            for request in self.running:
                if request.kv is not None:
                    request.kv.grow(stamp, request.num_computed_tokens)
        told: dict[Request, list[StampSpan]] = {}
        if self._untold:
            for entry in scheduled:
                request = entry.request
                if request in self._untold and request.kv is not None:
                    request.kv.grow(stamp, request.num_computed_tokens)
                    if entry.samples:
                        del self._untold[request]
                        told[request] = request.kv.up_to(request.num_computed_tokens + entry.num_tokens)
        return told

    def commit_weights(self, commit: int) -> None:
        """Other weights are in force: what is cached of the old ones matches no more.

        Running requests keep their KV, which is of several commits from now on: none of it is offered to others.
        """
        self._commit = commit
        self._computing.clear()
        for request in self.running:
            request.parent = None

    # Leaving

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks; its tokens are computed again later."""
        self._leave(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        heapq.heappush(self._waiting, (request.order, request))

    def preempt_all(self) -> None:
        """Drops every KV block, held or cached: all running requests are recomputed when they run next."""
        for request in list(self.running):
            self.preempt(request)
        self.pool.reset()

    def finish(self, request: Request) -> None:
        """Forgets a request and frees its blocks; a queue entry that is left is skipped later."""
        if self.requests.pop(request.request_id, None) is None:
            return
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        request.status = RequestStatus.FINISHED
        if len(self._waiting) > 2 * len(self.requests) + 64:
            self._waiting = [entry for entry in self._waiting if entry[1].status is not RequestStatus.FINISHED]
            heapq.heapify(self._waiting)

    def _leave(self, request: Request) -> None:
        self._withdraw(request)
        request.parent = None
        self._untold.pop(request, None)
        self.running.remove(request)
        self.pool.release(request.block_ids)

    def check(self) -> None:
        """Verifies the invariants; called when the engine goes idle and by tests.

        Raises:
            RuntimeError: a block is lost or counted wrongly, or a list and a status disagree.
        """
        self.pool.check([request.block_ids for request in self.requests.values()])
        running = {request.request_id for request in self.running}
        states = {key for key, request in self.requests.items() if request.status is RequestStatus.RUNNING}
        if running != states or len(running) != len(self.running):
            raise RuntimeError(f"running list {sorted(running)} differs from the states {sorted(states)}")
        if self.running != sorted(self.running, key=_BY_ORDER):
            raise RuntimeError("the running list is out of order")
        if not self._untold.keys() <= set(self.running):
            raise RuntimeError("a request that does not run is to be told whose its KV is")
        if not set(self._computing.values()) <= set(self.running):
            raise RuntimeError("a block is said to be computed by a request that does not run")
