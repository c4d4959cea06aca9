"""The scheduler's choices, one by one: what runs first, what waits, who loses its blocks."""

from __future__ import annotations

import itertools
from typing import Any

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
    """A request whose prompt is like no other's."""
    arrival = next(ARRIVALS)
    message = EngineCoreRequest(name, [arrival] * prompt, SamplingParams(max_tokens=100), priority=priority)
    request = Request(message, admission=("A", 0), arrival=arrival, seed=0)
    target.add(request)
    return request


def step(target: Scheduler) -> dict[str, int]:
    """Runs one step as an engine does; returns how many tokens of which request ran."""
    scheduled = target.schedule()
    for entry in scheduled:
        entry.request.num_computed_tokens += entry.num_tokens
        target.register(entry.request, entry.request.num_computed_tokens)
        if entry.samples:
            entry.request.settle(entry.request.reserve(), 7)
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


def test_a_preempted_request_is_computed_again_but_for_what_is_still_cached_and_goes_on() -> None:
    target = scheduler(blocks=4, block_size=4)
    first, second = add(target, "first", 6), add(target, "second", 6)
    while second.status is not RequestStatus.PREEMPTED:
        step(target)
    known = second.num_tokens
    target.finish(first)
    assert step(target) == {"second": known - 4}
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


def add_prompt(target: Scheduler, name: str, prompt: list[int], **fields: Any) -> Request:
    params = SamplingParams(max_tokens=100, **{k: fields.pop(k) for k in list(fields) if k != "cache_salt"})
    request = Request(
        EngineCoreRequest(name, prompt, params, **fields), admission=("A", 0), arrival=next(ARRIVALS), seed=0
    )
    target.add(request)
    return request


def test_outputs_of_one_prompt_compute_it_once() -> None:
    target = scheduler(budget=64)
    requests = [add_prompt(target, name, list(range(100, 118))) for name in "abc"]
    assert step(target) == {"a": 18}  # the others wait for it
    assert step(target) == {"a": 1, "b": 2, "c": 2}
    assert [request.num_cached_tokens for request in requests] == [0, 16, 16]
    assert requests[1].block_ids[:4] == requests[0].block_ids[:4]


def test_who_shares_a_prompt_in_pieces_follows_it_piece_by_piece() -> None:
    target = scheduler(budget=8)
    add_prompt(target, "a", list(range(20)))
    add_prompt(target, "b", list(range(20)))
    assert [step(target) for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 4, "b": 4}, {"a": 1, "b": 1}]


def test_a_conversation_finds_its_earlier_turn_outputs_included() -> None:
    target = scheduler(budget=64)
    first = add_prompt(target, "first", [1, 2, 3, 4, 5, 6])
    for _ in range(8):
        step(target)
    target.finish(first)
    second = add_prompt(target, "second", [*first.token_ids, 8, 9])
    assert step(target) == {"second": 16 - 12}
    assert second.num_cached_tokens == 12


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    target = scheduler(budget=64)
    prompt = list(range(8))
    target.finish(run_once(target, "a", prompt))
    assert run_once(target, "b", prompt).num_cached_tokens == 4


def run_once(target: Scheduler, name: str, prompt: list[int], **fields: Any) -> Request:
    request = add_prompt(target, name, prompt, **fields)
    step(target)
    return request


@pytest.mark.parametrize(
    ("fields", "hits"),
    [
        ({}, 8),
        ({"cache_salt": "other"}, 0),
        ({"skip_reading_prefix_cache": True}, 0),
        ({"prompt_logprobs": 0}, 0),  # their logits are needed
        ({"prompt_logprobs": 0, "skip_reading_prefix_cache": False}, 0),
    ],
)
def test_who_may_share_what_is_cached(fields: dict[str, Any], hits: int) -> None:
    target = scheduler(budget=64)
    target.finish(run_once(target, "a", list(range(12))))
    assert run_once(target, "b", list(range(12)), **fields).num_cached_tokens == hits


def test_nothing_of_older_weights_is_shared_and_nothing_that_mixes_them_is_offered() -> None:
    target = scheduler(budget=64)
    running = run_once(target, "running", list(range(10)))
    target.commit_weights(1)
    assert run_once(target, "new", list(range(10))).num_cached_tokens == 0
    cached = target.pool.num_cached
    for _ in range(8):
        step(target)
    # "running" has filled blocks since, with keys of both weights among those before: only those of "new" are cached.
    assert len(running.block_ids) == 5
    assert target.pool.num_cached == cached + 2
    target.preempt(running)
    step(target)
    assert (running.num_computed_tokens, running.num_registered_tokens) == (20, 20)  # computed anew, offered again


def test_cached_blocks_serve_as_free_ones_and_go_oldest_first() -> None:
    target = scheduler(blocks=6, budget=64)
    target.finish(run_once(target, "old", list(range(100, 109))))
    target.finish(run_once(target, "new", list(range(200, 209))))
    assert (target.pool.num_free, target.pool.num_cached) == (6, 4)
    target.finish(run_once(target, "big", list(range(300, 314))))  # four blocks: two blank ones and those of "old"
    assert run_once(target, "old again", list(range(100, 109))).num_cached_tokens == 0
    assert target.pool.num_free == 6 - 3


def test_clearing_and_resetting_forget_what_is_cached() -> None:
    target = scheduler(budget=64)
    run_once(target, "a", list(range(12)))
    target.pool.reset()
    target.check()
    assert run_once(target, "b", list(range(12))).num_cached_tokens == 0
    target.preempt_all()
    assert step(target) == {"a": 14}  # "b" waits for the blocks that it shares with it
    assert step(target) == {"a": 1, "b": 1}


def test_a_prompt_that_is_scored_comes_in_pieces_of_a_bounded_size() -> None:
    target = Scheduler(BlockPool(100, 4), max_num_seqs=8, max_num_batched_tokens=64, max_scored_tokens=6)
    add_prompt(target, "scored", list(range(20)), prompt_logprobs=1)
    add_prompt(target, "plain", list(range(50, 70)))
    assert step(target) == {"scored": 6, "plain": 20}
