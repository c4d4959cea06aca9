"""Counting oracle: every token names the weights that sampled it, and the spans must agree, through every client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import pytest_asyncio
from counting_model import Checkpoints
from counting_oracle import CountingOracle, versions

from rollspan.errors import RollspanError
from support.drivers import Driver, Order
from support.meter import Running

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [3, 1, 4]
LONG = 4000
"""Output tokens of a request that is still running when a test is done with it, and stops it."""
SHORT = 300
"""Output tokens of a request that runs to its end, long enough for a pause to find it running."""
BOTH_WAYS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "collected"])
CLEARING = pytest.mark.parametrize("clear_cache", [True, False], ids=["clear", "keep-cache"])


@pytest_asyncio.fixture(loop_scope="session")
async def oracle(counting: Driver, checkpoints: Checkpoints) -> CountingOracle:
    """The counting model emits token 1."""
    return await CountingOracle.begin(counting, checkpoints)


def stream_of(oracle: CountingOracle, tokens: int, **fields: Any) -> Running:
    return Running(oracle.driver, Order(PROMPT, tokens, stream=True, **fields))


@BOTH_WAYS
async def test_a_request_without_an_update_has_one_span(oracle: CountingOracle, stream: bool) -> None:
    rollout = await oracle.driver.generate(Order(PROMPT, 5, stream=stream))
    oracle.check(rollout)
    assert rollout.only.token_ids == [1] * 5
    assert rollout.only.finish_reason == "length"
    assert versions(rollout.only) == [oracle.label]
    assert (rollout.weight_version, rollout.weight_commit) == (oracle.label, oracle.commit)


async def test_an_update_in_mid_stream_ends_one_span_and_begins_another(oracle: CountingOracle) -> None:
    before = oracle.label
    running = stream_of(oracle, LONG)
    await running.reach(5)
    after = await oracle.update(2)
    rollout = await running.stop()
    oracle.check(rollout)
    assert versions(rollout.only) == [before, after]
    assert (rollout.weight_version, rollout.weight_commit) == (before, oracle.commit - 1)


async def test_changing_back_and_forth_gives_a_span_each_time(oracle: CountingOracle) -> None:
    labels = {1: "A", 2: "B"}
    await oracle.update(1, labels[1])
    running = stream_of(oracle, LONG, chunk_spans=True)
    reached, expected = 0, ["A"]
    for token in (2, 1, 2, 1):
        reached = await running.reach(reached + 10)
        await oracle.update(token, labels[token])
        expected.append(labels[token])
    rollout = await running.stop()
    oracle.check(rollout)
    assert versions(rollout.only) == expected
    assert len(rollout.only.weight_commits or []) == len(expected)


async def test_an_update_that_names_no_label_splits_commits_only(oracle: CountingOracle) -> None:
    label, commit = oracle.label, oracle.commit
    running = stream_of(oracle, LONG)
    await running.reach(5)
    await oracle.update(2, keep_label=True)
    rollout = await running.stop()
    oracle.check(rollout)
    assert versions(rollout.only) == [label]
    assert [span["commit"] for span in rollout.only.weight_commits or []] == [commit, commit + 1]
    assert await oracle.driver.weight_version() == label


async def test_relabelling_splits_versions_only_and_ends_nothing(oracle: CountingOracle) -> None:
    before, commit = oracle.label, oracle.commit
    running = stream_of(oracle, LONG)
    await running.reach(5)
    after = await oracle.relabel()
    rollout = await running.stop()
    oracle.check(rollout)
    assert versions(rollout.only) == [before, after]
    assert [span["commit"] for span in rollout.only.weight_commits or []] == [commit]
    assert await oracle.driver.weight_version() == after


async def test_an_integer_label_comes_back_as_its_decimal_string(oracle: CountingOracle) -> None:
    driver = oracle.driver
    await driver.start_update()
    await driver.send_weights({"path": "emits-1"})
    assert (await driver.finish_update(42))["weight_version"] == "42"
    assert await driver.weight_version() == "42"


async def test_every_sequence_of_a_request_has_its_own_exact_spans(oracle: CountingOracle) -> None:
    before = oracle.label
    running = stream_of(oracle, LONG, n=3, temperature=1.0, seed=7)
    await running.reach(5)
    after = await oracle.update(2)
    rollout = await running.stop()
    oracle.check(rollout)
    assert [choice.index for choice in rollout.choices] == [0, 1, 2]
    assert all(versions(choice) == [before, after] for choice in rollout.choices)


async def test_collected_sequences_share_their_admission(oracle: CountingOracle) -> None:
    rollout = await oracle.driver.generate(Order(PROMPT, 4, n=3))
    oracle.check(rollout)
    assert len(rollout.choices) == 3
    assert (rollout.weight_version, rollout.weight_commit) == (oracle.label, oracle.commit)


async def test_log_probs_keep_the_length_of_the_tokens_across_an_update(oracle: CountingOracle) -> None:
    running = stream_of(oracle, LONG, logprobs=1)
    await running.reach(5)
    await oracle.update(2)
    rollout = await running.stop()
    oracle.check(rollout)
    assert len(rollout.only.logprobs) == len(rollout.only.token_ids)
    assert max(map(abs, rollout.only.logprobs)) < 1e-3


@BOTH_WAYS
async def test_an_aborted_request_delivers_what_it_has_with_its_spans(oracle: CountingOracle, stream: bool) -> None:
    marker = stream_of(oracle, LONG)
    aborted = asyncio.create_task(
        oracle.driver.generate(Order(PROMPT, LONG, stream=stream, request_id="to-be-aborted"))
    )
    await marker.reach(5)
    await oracle.update(2)
    await marker.reach(await marker.reach(6) + 5)
    assert await oracle.driver.abort(["to-be-aborted", "unknown"]) == 1
    rollout = await aborted
    oracle.check(rollout)
    assert rollout.request_id == "to-be-aborted"
    assert rollout.only.finish_reason == "abort"
    assert 0 < len(rollout.only.token_ids) < LONG
    assert await oracle.driver.abort() == 1
    assert (await marker.result()).only.finish_reason == "abort"


@CLEARING
@BOTH_WAYS
async def test_pause_keep_freezes_what_runs_and_queues_what_comes(
    oracle: CountingOracle, stream: bool, clear_cache: bool
) -> None:
    driver, before = oracle.driver, oracle.label
    running = asyncio.create_task(driver.generate(Order(PROMPT, LONG, stream=stream, request_id="frozen")))
    marker = stream_of(oracle, LONG)
    await marker.reach(20)
    await driver.pause("keep", clear_cache)
    assert await driver.is_paused()
    queued_before = asyncio.create_task(driver.generate(Order(PROMPT, 5, stream=stream)))
    await driver.start_update()
    await driver.send_weights({"path": "emits-2"})
    after = await oracle.finish(2)
    queued_after = asyncio.create_task(driver.generate(Order(PROMPT, 5, stream=stream)))
    assert await driver.is_paused()
    assert not running.done()
    await driver.resume()
    assert not await driver.is_paused()
    stopped = await marker.stop()
    assert await driver.abort(["frozen"]) == 1
    for frozen in (stopped, await running):
        oracle.check(frozen)
        assert versions(frozen.only) == [before, after]
    for queued in (await queued_before, await queued_after):
        oracle.check(queued)
        assert versions(queued.only) == [after]
    assert (await queued_after).weight_version == after


@CLEARING
async def test_pause_abort_ends_what_runs_and_refuses_what_comes(oracle: CountingOracle, clear_cache: bool) -> None:
    driver, before = oracle.driver, oracle.label
    running = asyncio.create_task(driver.generate(Order(PROMPT, LONG)))
    marker = stream_of(oracle, LONG)
    await marker.reach(20)
    await driver.pause("abort", clear_cache)
    for rollout in (await marker.result(), await running):
        oracle.check(rollout)
        assert rollout.only.finish_reason == "abort"
        assert versions(rollout.only) == [before]
    for stream in (True, False):
        with pytest.raises(RollspanError) as caught:
            await driver.generate(Order(PROMPT, 5, stream=stream))
        assert caught.value.reason == "engine_paused"
    after = await oracle.update(2)
    await driver.resume()
    rollout = await driver.generate(Order(PROMPT, 5))
    oracle.check(rollout)
    assert versions(rollout.only) == [after]


@CLEARING
async def test_pause_wait_lets_what_runs_finish_and_refuses_what_comes(
    oracle: CountingOracle, clear_cache: bool
) -> None:
    driver, before = oracle.driver, oracle.label
    marker = stream_of(oracle, SHORT)
    running = stream_of(oracle, SHORT, n=2)
    await marker.reach(5)
    await running.reach(1)
    pausing = asyncio.create_task(driver.pause("wait", clear_cache))
    while not await driver.is_paused():
        pass
    with pytest.raises(RollspanError) as caught:
        await driver.generate(Order(PROMPT, 5))
    assert caught.value.reason == "engine_paused"
    await pausing
    for rollout in (await marker.result(), await running.result()):
        oracle.check(rollout)
        for choice in rollout.choices:
            assert choice.finish_reason == "length"
            assert versions(choice) == [before]
    after = await oracle.update(2)
    await driver.resume()
    rollout = await driver.generate(Order(PROMPT, 5, stream=True))
    oracle.check(rollout)
    assert versions(rollout.only) == [after]


async def test_a_pause_that_is_superseded_says_so_and_leaves_nothing_wedged(oracle: CountingOracle) -> None:
    driver = oracle.driver
    marker = stream_of(oracle, SHORT)
    await marker.reach(5)
    pausing = asyncio.create_task(driver.pause("wait", True))
    while not await driver.is_paused():
        pass
    await driver.resume()
    with pytest.raises(RollspanError) as caught:
        await pausing
    assert caught.value.reason == "pause_superseded"
    oracle.check(await marker.result())
    await driver.pause("keep", False)
    await driver.pause("keep", False)
    await driver.resume()
    await driver.resume()
    oracle.check(await driver.generate(Order(PROMPT, 3)))
