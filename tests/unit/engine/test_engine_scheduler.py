"""The scheduler's choices, one by one: what runs first, what waits, who loses its blocks."""

from __future__ import annotations

import itertools

import pytest

from rollspan.engine.kv_cache import BlockPool
from rollspan.engine.request import Request, RequestStatus
from rollspan.engine.scheduler import PauseState, Scheduler
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.sampling_params import SamplingParams

ARRIVALS = itertools.count()


def scheduler(*, blocks: int = 100, block_size: int = 4, sequences: int = 8, budget: int = 16) -> Scheduler:
    return Scheduler(BlockPool(blocks, block_size), max_num_seqs=sequences, max_num_batched_tokens=budget)


def add(target: Scheduler, name: str, prompt: int, priority: int = 0) -> Request:
    message = EngineCoreRequest(name, [1] * prompt, SamplingParams(max_tokens=100), priority=priority)
    request = Request(message, admission=("A", 0), arrival=next(ARRIVALS), seed=0)
    target.add(request)
    return request


def step(target: Scheduler) -> dict[str, int]:
    """Runs one step as an engine does; returns how many tokens of which request ran."""
    scheduled = target.schedule()
    for entry in scheduled:
        samples = entry.samples
        entry.request.num_computed_tokens += entry.num_tokens
        if samples:
            entry.request.append(7)
    target.check()
    return {entry.request.request_id: entry.num_tokens for entry in scheduled}


def test_requests_start_in_order_of_arrival_until_the_budget_is_used_up() -> None:
    target = scheduler(budget=10)
    for name in "abc":
        add(target, name, 6)
    assert step(target) == {"a": 6, "b": 4}
    assert step(target) == {"a": 1, "b": 2, "c": 6}
    assert step(target) == {"a": 1, "b": 1, "c": 1}


def test_a_long_prompt_is_computed_in_pieces_beside_the_decodes_it_never_delays() -> None:
    target = scheduler(budget=10)
    add(target, "decode", 1)
    step(target)
    add(target, "long", 40, priority=-1)  # comes first in order, and yet last in the step
    pieces = [step(target) for _ in range(5)]
    assert pieces == [{"decode": 1, "long": 9}] * 4 + [{"decode": 1, "long": 4}]
    assert target.requests["decode"].num_output_tokens == 6
    assert target.requests["long"].num_output_tokens == 1


def test_every_decode_fits_into_a_step_that_is_full_of_them() -> None:
    target = scheduler(sequences=8, budget=8)
    for index in range(8):
        add(target, f"r{index}", 1)
    add(target, "waits", 1)
    for _ in range(3):
        assert step(target) == {f"r{index}": 1 for index in range(8)}


def test_no_more_sequences_run_than_allowed_and_the_next_takes_a_free_place() -> None:
    target = scheduler(sequences=2, budget=16)
    requests = [add(target, name, 2) for name in "abc"]
    assert set(step(target)) == {"a", "b"}
    target.finish(requests[0])
    assert set(step(target)) == {"b", "c"}


def test_lower_priority_values_come_first_then_earlier_arrivals() -> None:
    target = scheduler(sequences=1)
    order = [add(target, name, 1, priority) for name, priority in (("c", 1), ("b", 0), ("d", 1), ("a", -3))]
    started = []
    while target.requests:
        started += step(target)
        target.finish(target.requests[started[-1]])
    assert started == ["a", "b", "c", "d"]
    assert all(request.status is RequestStatus.FINISHED for request in order)


def test_the_last_in_order_loses_its_blocks_when_they_run_out() -> None:
    target = scheduler(blocks=4, block_size=4)
    add(target, "urgent", 4, priority=-1)
    add(target, "early", 4)
    late = add(target, "late", 4)
    assert step(target) == {"urgent": 4, "early": 4, "late": 4}
    assert step(target) == {"urgent": 1, "early": 1}  # each needs a further block, one is free
    assert (late.status, late.block_ids, late.num_computed_tokens) == (RequestStatus.PREEMPTED, [], 0)
    assert late.num_tokens == 5


def test_a_preempted_request_is_computed_again_from_its_first_token_and_goes_on() -> None:
    target = scheduler(blocks=4, block_size=4)
    first, second = add(target, "first", 6), add(target, "second", 6)
    while second.status is not RequestStatus.PREEMPTED:
        step(target)
    known = second.num_tokens
    target.finish(first)
    assert step(target) == {"second": known}
    assert second.num_tokens == known + 1


def test_a_preempted_request_comes_before_later_arrivals() -> None:
    target = scheduler(sequences=2)
    old = add(target, "old", 2)
    step(target)
    target.preempt_all()
    add(target, "new", 2)
    add(target, "newer", 2)
    assert set(step(target)) == {"old", "new"}
    assert old.num_output_tokens == 2


def test_clearing_the_cache_frees_every_block_and_loses_no_token() -> None:
    target = scheduler()
    requests = [add(target, name, 5) for name in "ab"]
    for _ in range(3):
        step(target)
    target.preempt_all()
    assert target.pool.num_free == target.pool.num_blocks
    assert [request.num_output_tokens for request in requests] == [3, 3]
    assert step(target) == {"a": 8, "b": 8}


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_pausing_keeps_new_requests_from_starting(state: PauseState) -> None:
    target = scheduler()
    add(target, "running", 2)
    step(target)
    target.pause_state = state
    add(target, "new", 2)
    assert set(step(target)) == ({"running"} if state is PauseState.PAUSED_NEW else set())
    target.pause_state = PauseState.UNPAUSED
    assert set(step(target)) == {"running", "new"}


def test_a_request_that_lost_its_blocks_still_ends_while_new_ones_are_paused() -> None:
    target = scheduler()
    add(target, "urgent but new", 2, priority=-5)
    target.pause_state = PauseState.PAUSED_NEW
    assert not target.has_work()
    target.pause_state = PauseState.UNPAUSED
    step(target)
    target.preempt_all()
    add(target, "newest", 2, priority=-9)
    target.pause_state = PauseState.PAUSED_NEW
    assert not target.drained
    assert set(step(target)) == {"urgent but new"}


def test_a_long_prompt_that_finds_no_blocks_waits_and_keeps_its_place() -> None:
    target = scheduler(blocks=4, block_size=4)
    running = add(target, "running", 8)
    step(target)
    add(target, "big", 8)
    add(target, "small", 1)
    assert set(step(target)) == {"running"}  # small does not overtake big
    target.finish(running)
    assert set(step(target)) == {"big", "small"}


def test_finishing_twice_and_finishing_a_stranger_change_nothing() -> None:
    target = scheduler()
    request = add(target, "a", 4)
    step(target)
    target.finish(request)
    target.finish(request)
    stranger = Request(EngineCoreRequest("b", [1], SamplingParams()), admission=("A", 0), arrival=9, seed=0)
    target.finish(stranger)
    target.check()
    assert target.pool.num_free == target.pool.num_blocks
    assert not target.has_work()


def test_many_requests_that_end_while_they_wait_leave_nothing_behind() -> None:
    target = scheduler(sequences=1)
    add(target, "runs", 1)
    for index in range(1000):
        target.finish(add(target, f"r{index}", 1))
    assert step(target) == {"runs": 1}
    assert target.num_waiting == 0


def test_the_invariants_are_checked_for_what_they_say() -> None:
    target = scheduler()
    request = add(target, "a", 4)
    step(target)
    lost = request.block_ids.pop()
    with pytest.raises(RuntimeError, match="KV blocks"):
        target.check()
    request.block_ids.append(lost)
    target.check()
    target.running.clear()
    with pytest.raises(RuntimeError, match="running list"):
        target.check()
