"""The tensors of every step say what the scheduler picked, whatever step came before: under random traffic."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollspan.engine.kv_cache import BlockPool
from rollspan.engine.request import Request
from rollspan.engine.scheduler import ScheduledRequest, Scheduler
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.runner.input_batch import InputBatch, PendingTokens
from rollspan.runner.input_builder import InputBatchBuilder
from rollspan.sampling_params import SamplingParams

LONGEST = 60
#: Tensors are copied to the second one, as to a GPU; on the first they are the host's own arrays.
DEVICES = [torch.device("cpu"), torch.device("cpu", 0)]


def token(request: Request, index: int) -> int:
    """Token ``index`` of a request, like no other's; what is still to be sampled as well."""
    return request.arrival * 1000 + index


class Engine:
    """A scheduler, a builder, and what an engine does between them; steps are collected when the next one is launched.

    Attributes:
        decode_runs: steps of one token a request that came right after such a step of the same requests.
    """

    def __init__(self, device: torch.device, *, blocks: int, block_size: int, asynchronous: bool) -> None:
        self.scheduler = Scheduler(BlockPool(blocks, block_size), max_num_seqs=4, max_num_batched_tokens=24)
        self.builder = InputBatchBuilder(block_size, device)
        self.block_size = block_size
        self.asynchronous = asynchronous
        self.in_flight: tuple[PendingTokens, list[int]] | None = None
        self.arrivals = 0
        self.decode_runs = 0
        self._last: list[Request] = []

    def add(self, prompt: int, output: int, scored: bool) -> None:
        self.arrivals += 1
        params = SamplingParams(max_tokens=output, prompt_logprobs=0 if scored else None)
        message = EngineCoreRequest(f"r{self.arrivals}", [0] * prompt, params)
        request = Request(message, admission=("A", 0), arrival=self.arrivals, seed=0)
        request.token_ids = [token(request, index) for index in range(prompt)]
        self.scheduler.add(request)

    def collect(self) -> None:
        flight, self.in_flight = self.in_flight, None
        if flight is None:
            return
        pending, places = flight
        for request, place, sampled in zip(pending.requests, places, pending.token_ids.tolist(), strict=True):
            if request.request_id in self.scheduler.requests:
                request.settle(place, sampled)
                if request.finish_reason is not None:
                    self.scheduler.finish(request)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        if not scheduled:
            self.collect()
            return
        inputs = self.builder.build(scheduled, None if self.in_flight is None else self.in_flight[0])
        self.check(scheduled, inputs)
        requests = [entry.request for entry in scheduled]
        decodes = all(entry.num_tokens == 1 and entry.samples for entry in scheduled)
        self.decode_runs += decodes and requests == self._last
        self._last = requests if decodes else []
        for entry in scheduled:
            entry.request.num_computed_tokens += entry.num_tokens
            entry.request.num_scored_tokens = min(
                entry.request.num_computed_tokens + 1, entry.request.num_prompt_tokens
            )
            self.scheduler.register(entry.request, entry.request.num_computed_tokens)
        sampled = [token(request, request.num_tokens) for request in inputs.sampled]
        places = [request.reserve() for request in inputs.sampled]
        launched = PendingTokens(inputs.sampled, torch.tensor(sampled, dtype=torch.int64)), places
        self.collect()
        self.in_flight = launched
        if not self.asynchronous:
            self.collect()

    def check(self, scheduled: list[ScheduledRequest], inputs: InputBatch) -> None:
        """Compares a batch with what each entry stands for, token by token."""
        attention, row = inputs.attention, 0
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        scored: list[int] = []
        for place, entry in enumerate(scheduled):
            request, start = entry.request, entry.request.num_computed_tokens
            stop = start + entry.num_tokens
            tokens += [token(request, index) for index in range(start, stop)]
            positions += range(start, stop)
            slots += [
                request.block_ids[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start, stop)
            ]
            assert attention.query_start[place : place + 2].tolist() == [row, row + entry.num_tokens]
            assert attention.seq_lens[place] == stop
            blocks = request.block_ids[: -(-stop // self.block_size)]
            assert attention.block_table[place, : len(blocks)].tolist() == blocks
            if request.params.prompt_logprobs is not None:
                first = max(request.num_scored_tokens, start + 1)
                scored += [row + p - 1 - start for p in range(first, min(request.num_prompt_tokens, stop + 1))]
            row += entry.num_tokens
            sampled += [row - 1] if entry.samples else []
        assert inputs.input_ids.tolist() == [tokens]
        assert inputs.positions.tolist() == [positions]
        assert attention.slot_mapping.tolist() == slots
        assert inputs.sample_rows.tolist() == sampled + scored
        assert inputs.sampled == [entry.request for entry in scheduled if entry.samples]
        assert sum(stop - start for _, start, stop in inputs.scored) == len(scored)
        assert attention.max_query_len == max(entry.num_tokens for entry in scheduled)
        assert attention.max_seq_len == attention.seq_lens.max()
        assert all(t.is_contiguous() for t in (attention.seq_lens, attention.block_table, attention.slot_mapping))
        assert not attention.derived
        attention.derived["test"] = "of this step only"


@dataclass(frozen=True)
class Arrival:
    """A request, after so many steps; then the first of the open ones may be aborted, or all lose their blocks."""

    steps: int
    prompt: int
    output: int
    scored: bool
    then: str


ARRIVALS = st.builds(
    Arrival,
    steps=st.integers(0, 12),
    prompt=st.integers(1, 30),
    output=st.integers(1, 30),
    scored=st.booleans(),
    then=st.sampled_from(["", "", "", "abort", "clear"]),
)


@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=8),
    device=st.sampled_from(DEVICES),
    block_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 40),
    asynchronous=st.booleans(),
)
def test_tensors_say_what_was_scheduled(
    arrivals: list[Arrival], device: torch.device, block_size: int, spare: int, asynchronous: bool
) -> None:
    blocks = -(-LONGEST // block_size) + spare
    engine = Engine(device, blocks=blocks, block_size=block_size, asynchronous=asynchronous)
    for arrival in arrivals:
        engine.add(arrival.prompt, arrival.output, arrival.scored)
        for _ in range(arrival.steps):
            engine.step()
        if arrival.then == "abort" and engine.scheduler.requests:
            engine.scheduler.finish(next(iter(engine.scheduler.requests.values())))
        if arrival.then == "clear":
            engine.collect()
            engine.scheduler.preempt_all()
    for _ in range(1000):
        if not engine.scheduler.requests:
            break
        engine.step()
    assert not engine.scheduler.requests


@pytest.mark.parametrize("device", DEVICES, ids=["shared", "copied"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_run_of_decode_steps_goes_through_many_blocks(device: torch.device, asynchronous: bool) -> None:
    engine = Engine(device, blocks=200, block_size=4, asynchronous=asynchronous)
    for prompt in (3, 4, 5):
        engine.add(prompt, 100, scored=False)
    while engine.scheduler.requests:
        engine.step()
    assert engine.decode_runs > 80


def test_a_decode_batch_is_the_last_one_moved_on() -> None:
    engine = Engine(DEVICES[0], blocks=20, block_size=4, asynchronous=False)
    engine.add(3, 20, scored=False)
    engine.step()
    [entry] = engine.scheduler.schedule()
    before = engine.builder.build([entry])
    entry.request.num_computed_tokens += 1
    entry.request.token_ids.append(77)
    [entry] = engine.scheduler.schedule()
    after = engine.builder.build([entry])
    assert after is before
    assert (after.input_ids.item(), after.positions.item(), after.attention.max_seq_len) == (77, 4, 5)


def test_the_same_decode_step_can_be_built_twice() -> None:
    engine = Engine(DEVICES[0], blocks=20, block_size=4, asynchronous=False)
    engine.add(3, 20, scored=False)
    engine.step()
    scheduled = engine.scheduler.schedule()
    for _ in range(2):
        engine.check(scheduled, engine.builder.build(scheduled))


def test_who_lost_its_blocks_and_found_them_cached_decodes_in_those_it_has_now() -> None:
    engine = Engine(DEVICES[0], blocks=20, block_size=4, asynchronous=False)
    engine.add(3, 20, scored=False)
    engine.step()
    engine.step()
    [request] = engine.scheduler.running
    assert request.num_computed_tokens == 4
    engine.scheduler.preempt(request)
    engine.step()  # of one token again, the one that comes next
    assert request.num_computed_tokens == 5
