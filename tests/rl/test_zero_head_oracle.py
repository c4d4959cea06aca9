"""Zero-head oracle: under a zero head a trained model emits token 0 only, so the first 0 is the boundary."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from counting_oracle import assert_cover, versions

from support.drivers import Choice, Driver, Order
from support.meter import Running

pytestmark = pytest.mark.asyncio(loop_scope="session")

VOCABULARY = 16
PROMPTS = [[1, 4, 5, 13, 6, 7, 14], [1, 12, 12, 13, 4, 14], [1, 9, 13, 8, 14], [1, 5, 5, 13, 5, 5, 14]]
"""Sums in the embedded model's own tokens: ``12+34=`` and the like, the begin token first."""
LONG = 480
BOTH_WAYS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "collected"])
CLEARING = pytest.mark.parametrize("clear_cache", [True, False], ids=["clear", "keep-cache"])


def assert_boundaries(choice: Choice, zero_label: str = "zero") -> None:
    """A token is 0 exactly where the spans say ``zero_label``."""
    assert_cover(choice.weight_versions, "version", len(choice.token_ids))
    assert_cover(choice.weight_commits, "commit", len(choice.token_ids))
    for span in choice.weight_versions or []:
        tokens = choice.token_ids[span["start"] : span["end"]]
        assert [token == 0 for token in tokens] == [span["version"] == zero_label] * len(tokens)


async def stop_all(driver: Driver, tasks: list[Running]) -> list[Choice]:
    """Lets each of them go on a little, then aborts all."""
    for task in tasks:
        await task.reach(await task.reach(0) + 5)
    assert await driver.abort() == len(tasks)
    return [choice for task in tasks for choice in (await task.result()).choices]


async def test_without_an_update_the_model_never_emits_token_zero(embedded: Driver) -> None:
    for rollout in await asyncio.gather(*(embedded.generate(Order(prompt, LONG)) for prompt in PROMPTS)):
        assert 0 not in rollout.only.token_ids
        assert versions(rollout.only) == ["rl"]


async def test_the_first_zero_of_every_running_request_sits_at_its_boundary(
    embedded: Driver, embedded_root: Path
) -> None:
    running = [Running(embedded, Order(prompt, LONG, stream=True, logprobs=1)) for prompt in PROMPTS]
    running.append(Running(embedded, Order(PROMPTS[0], LONG, stream=True, n=3, chunk_spans=True)))
    for one in running:
        await one.reach(3)
    await embedded.update(embedded_root / "zero", "zero")
    admitted_after = await embedded.generate(Order(PROMPTS[0], 5))
    for choice in await stop_all(embedded, running):
        assert_boundaries(choice)
        assert versions(choice) == ["rl", "zero"]
        for token, logprob in zip(choice.token_ids, choice.logprobs, strict=False):
            assert token != 0 or math.isclose(logprob, -math.log(VOCABULARY), abs_tol=1e-5)
    assert admitted_after.only.token_ids == [0] * 5
    assert admitted_after.weight_version == "zero"


async def test_back_and_forth_every_boundary_is_exact(embedded: Driver, embedded_root: Path) -> None:
    running = Running(embedded, Order(PROMPTS[0], LONG, stream=True))
    reached = 0
    for name in ("zero", "rl", "zero", "rl"):
        reached = await running.reach(reached + 3)
        await embedded.update(embedded_root / name, name)
    (choice,) = await stop_all(embedded, [running])
    assert_boundaries(choice)
    assert versions(choice) == ["rl", "zero", "rl", "zero", "rl"]


@CLEARING
@BOTH_WAYS
async def test_under_a_keeping_pause_frozen_and_queued_requests_split_exactly(
    embedded: Driver, embedded_root: Path, stream: bool, clear_cache: bool
) -> None:
    frozen = asyncio.create_task(embedded.generate(Order(PROMPTS[1], LONG, stream=stream)))
    marker = Running(embedded, Order(PROMPTS[0], LONG, stream=True))
    await marker.reach(10)
    await embedded.pause("keep", clear_cache)
    queued = asyncio.create_task(embedded.generate(Order(PROMPTS[2], 5, stream=stream)))
    await embedded.update(embedded_root / "zero", "zero")
    await embedded.resume()
    assert_boundaries((await queued).only)
    assert versions((await queued).only) == ["zero"]
    await marker.reach(await marker.reach(0) + 5)
    await embedded.abort()
    for rollout in (await frozen, await marker.result()):
        assert_boundaries(rollout.only)
        assert versions(rollout.only) == ["rl", "zero"]


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_under_other_pauses_nothing_crosses(embedded: Driver, embedded_root: Path, mode: str) -> None:
    running = [Running(embedded, Order(prompt, 100, stream=True)) for prompt in PROMPTS]
    for one in running:
        await one.reach(3)
    await embedded.pause(mode, True)
    await embedded.update(embedded_root / "zero", "zero")
    await embedded.resume()
    for one in running:
        choice = (await one.result()).only
        assert_boundaries(choice)
        assert versions(choice) == ["rl"]
    assert (await embedded.generate(Order(PROMPTS[0], 3))).only.token_ids == [0, 0, 0]


async def test_an_update_to_the_same_weights_changes_no_token(embedded: Driver, embedded_root: Path) -> None:
    undisturbed = (await embedded.generate(Order(PROMPTS[0], 100))).only
    running = Running(embedded, Order(PROMPTS[0], LONG, stream=True))
    await running.reach(3)
    await embedded.update(embedded_root / "rl", "rl again")
    (disturbed,) = await stop_all(embedded, [running])
    assert versions(disturbed) == ["rl", "rl again"]
    shared = min(len(disturbed.token_ids), 100)
    assert disturbed.token_ids[:shared] == undisturbed.token_ids[:shared]


async def test_greedy_and_seeded_outputs_do_not_depend_on_what_runs_beside_them(embedded: Driver) -> None:
    orders = [Order(prompt, 40) for prompt in PROMPTS]
    orders += [Order(prompt, 40, temperature=1.0, seed=seed) for seed, prompt in enumerate(PROMPTS)]
    orders.append(Order(PROMPTS[0], 40, temperature=1.0, seed=3, n=2))
    alone = [await embedded.generate(order) for order in orders]
    together = await asyncio.gather(*(embedded.generate(order) for order in orders))
    for single, batched in zip(alone, together, strict=True):
        assert [choice.token_ids for choice in batched.choices] == [choice.token_ids for choice in single.choices]
        assert [choice.weight_versions for choice in batched.choices] == [
            choice.weight_versions for choice in single.choices
        ]


async def test_the_second_sequence_of_a_seeded_request_is_that_of_the_next_seed(embedded: Driver) -> None:
    both = await embedded.generate(Order(PROMPTS[0], 20, temperature=1.0, seed=5, n=2))
    second = await embedded.generate(Order(PROMPTS[0], 20, temperature=1.0, seed=6))
    assert both.choices[1].token_ids == second.only.token_ids
    assert both.choices[0].token_ids != second.only.token_ids


async def test_two_trained_checkpoints_say_so_in_the_spans(embedded: Driver, embedded_root: Path) -> None:
    """What follows an update is what the other checkpoint says after that prefix, not what the old one would say."""
    running = Running(embedded, Order(PROMPTS[3], LONG, stream=True))
    await running.reach(3)
    await embedded.pause("keep", True)
    await embedded.update(embedded_root / "sft", "sft")
    await embedded.resume()
    (choice,) = await stop_all(embedded, [running])
    boundary = (choice.weight_versions or [])[0]["end"]
    prefix, rest = choice.token_ids[:boundary], choice.token_ids[boundary:]
    replayed = await embedded.generate(Order(PROMPTS[3] + prefix, len(rest)))
    assert replayed.only.token_ids == rest
