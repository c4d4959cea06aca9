"""Scheduler, block pool and prefix cache under random traffic: nothing is lost, nobody starves, no limit is broken, and
nobody ever sees keys and values that are not his own or of other weights than he may, or than he is told."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollspan.engine.kv_cache import BlockPool
from rollspan.engine.request import Request, RequestStatus
from rollspan.engine.scheduler import PauseState, ScheduledRequest, Scheduler
from rollspan.protocol.messages import EngineCoreRequest, StampSpan
from rollspan.provenance import Provenance
from rollspan.sampling_params import SamplingParams

LONGEST = 40
PROMPTS = st.sampled_from([1, 2, 5, 12, 20, LONGEST - 1])
#: What one slot of the KV cache holds: the tokens up to its own, the salt, and the commits that computed them.
Content = tuple[tuple[int, ...], "str | None", tuple[int, ...]]
PROVENANCE = st.builds(Provenance, return_kv_versions=st.just(True), allow_stale_prefix=st.booleans())


class Traffic(RuleBasedStateMachine):
    """A scheduler and what an engine does with its answers, without any tensors.

    Token i of a request is i, or i + 1000 from half of its prompt on: many begin alike, not all of them. The "KV cache"
    holds for each slot what a real one would depend on.
    """

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        spare=st.integers(0, 6),
        sequences=st.integers(1, 6),
        budget=st.integers(0, 30),
        caching=st.booleans(),
    )
    def start(self, block_size: int, spare: int, sequences: int, budget: int, caching: bool) -> None:
        least = -(-LONGEST // block_size)
        self.budget = sequences + budget
        self.sequences = sequences
        pool = BlockPool(least + spare, block_size)
        self.scheduler = Scheduler(
            pool, max_num_seqs=sequences, max_num_batched_tokens=self.budget, prefix_caching=caching
        )
        self.caching = caching
        self.commit = 0
        self.slots: dict[int, Content] = {}
        self.commits: dict[str, list[int]] = {}  # of each running request, by position
        self.untold: set[str] = set()  # whose KV has been made anew since they were told of it
        self.open: dict[str, Request] = {}
        self.finished: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.arrivals = 0

    @rule(
        requests=st.lists(
            st.tuples(
                PROMPTS, st.integers(1, 25), st.integers(-1, 1), st.booleans(), st.sampled_from([None, None, "s"])
            ),
            min_size=1,
            max_size=6,
        ),
        skip=st.none() | st.booleans(),
        provenance=PROVENANCE,
    )
    def arrive(
        self, requests: list[tuple[int, int, int, bool, str | None]], skip: bool | None, provenance: Provenance
    ) -> None:
        if self.scheduler.pause_state is PauseState.PAUSED_NEW:
            return  # an engine refuses requests then
        for prompt, output, priority, odd, salt in requests:
            self.arrivals += 1
            name = f"r{self.arrivals}"
            params = SamplingParams(max_tokens=min(output, LONGEST - prompt), skip_reading_prefix_cache=skip)
            tokens = [i + 1000 if odd and i >= prompt // 2 else i for i in range(prompt)]
            message = EngineCoreRequest(name, tokens, params, priority=priority, cache_salt=salt, provenance=provenance)
            self.open[name] = Request(message, admission=("A", 0), arrival=self.arrivals, seed=0)
            self.scheduler.add(self.open[name])

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.open)))
        request = self.open.pop(name)
        self.scheduler.finish(request)
        self.scheduler.finish(request)  # a second time changes nothing
        self.aborted.add(name)

    @rule(state=st.sampled_from([PauseState.UNPAUSED, *PauseState]))
    def pause_or_resume(self, state: PauseState) -> None:
        self.scheduler.pause_state = state

    @rule()
    def clear_cache(self) -> None:
        self.scheduler.preempt_all()
        self.commits.clear()
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks

    @rule()
    def reset_prefix_cache(self) -> None:
        self.scheduler.pool.reset()
        assert self.scheduler.pool.num_cached == 0

    @rule()
    def commit_weights(self) -> None:
        self.commit += 1
        self.scheduler.commit_weights(self.commit)

    @rule(prompt=PROMPTS, before=st.integers(0, 3), between=st.integers(0, 3), provenance=PROVENANCE)
    def commit_between_twins(self, prompt: int, before: int, between: int, provenance: Provenance) -> None:
        self.scheduler.pause_state = PauseState.UNPAUSED
        self.arrive([(prompt, 5, -2, False, None)], None, provenance)
        self.steps(before + 1)
        self.commit_weights()
        self.steps(between + 1)
        self.arrive([(prompt, 5, -2, False, None)], None, provenance)
        self.steps(2)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> list[ScheduledRequest]:
        decoding = [request for request in self.scheduler.running if request.num_pending_tokens == 1]
        never_ran = {name for name, request in self.open.items() if request.status is RequestStatus.WAITING}
        first = min(self.scheduler.running, key=lambda request: request.order, default=None)
        could_work = self.scheduler.has_work()
        scheduled = self.scheduler.schedule()
        for name, request in self.open.items():
            if request.status is not RequestStatus.RUNNING:
                self.commits.pop(name, None)
        self.check_step(scheduled, decoding, never_ran)
        assert bool(scheduled) == could_work
        if first is not None and self.scheduler.pause_state is not PauseState.PAUSED_ALL:
            assert first in [entry.request for entry in scheduled]  # it advances in every step
        for entry in scheduled:
            self.compute(entry)
        told = self.scheduler.track(scheduled, (f"v{self.commit}", self.commit))
        for entry in scheduled:
            self.check_told(entry, told)
        for entry in scheduled:
            entry.request.num_computed_tokens += entry.num_tokens
            self.scheduler.register(entry.request, entry.request.num_computed_tokens)
            if entry.samples:
                entry.request.settle(entry.request.reserve(), entry.request.num_tokens - 1)
            if entry.request.finish_reason is not None:
                self.scheduler.finish(entry.request)
                self.finished[entry.request.request_id] = self.open.pop(entry.request.request_id)
        return scheduled

    def compute(self, entry: ScheduledRequest) -> None:
        """Looks at the keys that the request's rows see, and writes theirs."""
        request, size = entry.request, self.scheduler.pool.block_size
        start, stop = request.num_computed_tokens, request.num_computed_tokens + entry.num_tokens
        slots = [request.block_ids[i // size] * size + i % size for i in range(stop)]
        known = self.commits.get(request.request_id, [])
        if start != len(known):  # it has just been admitted: what it has comes out of the prefix cache
            assert self.caching
            assert request.params.skip_reading_prefix_cache is not True
            assert start % size == 0
            # All of it under one commit, the present one unless an older one will do for the prompt.
            oldest = self.slots[slots[0]][2][0]
            assert oldest == self.commit or (
                request.provenance.allow_stale_prefix and start <= request.num_prompt_tokens
            )
            known = [oldest] * start
            self.untold.add(request.request_id)
        elif not start:
            self.untold.add(request.request_id)
        for i, slot in enumerate(slots[:start]):
            assert self.slots[slot] == (tuple(request.token_ids[: i + 1]), request.cache_salt, tuple(known[: i + 1]))
        known = known + [self.commit] * entry.num_tokens
        for i, slot in enumerate(slots[start:], start):
            self.slots[slot] = (tuple(request.token_ids[: i + 1]), request.cache_salt, tuple(known[: i + 1]))
        self.commits[request.request_id] = known

    def check_told(self, entry: ScheduledRequest, told: dict[Request, list[StampSpan]]) -> None:
        """With the first token since a request has (re)started, and only then, it is told whose its KV is."""
        name = entry.request.request_id
        assert (entry.request in told) == (entry.samples and name in self.untold)
        if entry.samples:
            self.untold.discard(name)
        if entry.request in told:
            spans = told[entry.request]
            commits = [commit for _, commit, start, end in spans for _ in range(start, end)]
            assert commits == self.commits[name]
            assert all(label == f"v{commit}" for label, commit, _, _ in spans)
            assert all(one[1] != other[1] for one, other in pairwise(spans))

    def check_step(self, scheduled: list[ScheduledRequest], decoding: list[Request], never_ran: set[str]) -> None:
        names = [entry.request.request_id for entry in scheduled]
        assert len(names) == len(set(names)) <= self.sequences
        assert sum(entry.num_tokens for entry in scheduled) <= self.budget
        for entry in scheduled:
            request = entry.request
            assert request.request_id in self.open
            assert 1 <= entry.num_tokens <= request.num_pending_tokens
            room = len(request.block_ids) * self.scheduler.pool.block_size
            assert room >= request.num_computed_tokens + entry.num_tokens
            assert 0 not in request.block_ids  # the padding block
            assert entry.samples == (entry.num_tokens == request.num_pending_tokens)
        if self.scheduler.pause_state is PauseState.PAUSED_ALL:
            assert not scheduled
            return
        if self.scheduler.pause_state is PauseState.PAUSED_NEW:
            assert not never_ran & set(names)
        for request in decoding:  # a decode waits for nobody; it only loses its blocks
            assert request.request_id in names or request.status is RequestStatus.PREEMPTED

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return  # hypothesis looks before the start as well
        self.scheduler.check()
        assert self.scheduler.requests == self.open
        assert len(self.scheduler.running) <= self.sequences
        assert self.scheduler.num_waiting == len(self.open) - len(self.scheduler.running)
        assert self.scheduler.pool.usage == 1 - self.scheduler.pool.num_free / self.scheduler.pool.num_blocks
        for request in self.open.values():
            assert (request.status is RequestStatus.RUNNING) or not request.block_ids
            assert request.num_computed_tokens < request.num_tokens

    def teardown(self) -> None:
        """Left alone, every request ends, in a number of steps that its work explains."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.pause_state = PauseState.UNPAUSED
        # In each step the first running request in order advances by a token at least, and keeps what it has. Another
        # one can become the first only once for each request: when it is admitted.
        for _ in range(2 * LONGEST * len(self.open)):
            if self.open:
                self.step()
        assert not self.open
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert len(self.finished) + len(self.aborted) == self.arrivals
        for request in self.finished.values():
            # Preempted or not, the tokens are the prompt's and then those that were sampled, in order.
            assert [token % 1000 for token in request.token_ids] == list(range(request.num_tokens))
            assert request.num_output_tokens == request.params.max_tokens


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
