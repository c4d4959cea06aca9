"""What other servers were seen to get wrong in a weight update, live; here it has to come out right.

Other tests of this room have the rest: relabelling in mid-stream, a finish without weights, calls out of order, pauses
that supersede each other.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import pytest_asyncio
from clients import drive
from counting_model import Checkpoints, digest, tensors
from counting_oracle import CountingOracle, versions
from safetensors.numpy import load_file, save_file

from rollspan.errors import RollspanError
from support.drivers import Driver, Order
from support.meter import Running
from support.servers import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 4000


@pytest_asyncio.fixture(loop_scope="session")
async def oracle(counting: Driver, checkpoints: Checkpoints) -> CountingOracle:
    """The counting model emits token 1."""
    return await CountingOracle.begin(counting, checkpoints)


async def test_requests_at_every_moment_of_an_update_are_served(oracle: CountingOracle) -> None:
    """Elsewhere the engine dies of a request that comes between update and finish."""
    driver, before = oracle.driver, oracle.label
    running = Running(driver, Order([3], LONG, stream=True))
    await running.reach(3)
    await driver.start_update()
    moments = [await driver.generate(Order([3], 5))]
    await driver.send_weights({"path": str(oracle.emitting(2))})
    moments.append(await driver.generate(Order([3], 5)))
    await running.reach(await running.reach(0) + 5)
    after = await oracle.finish(2)
    moments.append(await driver.generate(Order([3], 5)))
    assert [versions(rollout.only) for rollout in moments] == [[before], [before], [after]]
    for rollout in (*moments, await running.stop()):
        oracle.check(rollout)


async def test_an_update_that_fails_leaves_every_bit_as_it_was(embedded: Driver, embedded_root: Path) -> None:
    """Elsewhere half of the new weights are served under the old label, or the next request ends the server."""
    order = Order([1, 4, 5, 13, 6, 7, 14], 40, logprobs=1)
    before, record = await embedded.generate(order), await embedded.history()
    broken = embedded_root / f"broken-{embedded.name}"
    broken.mkdir()
    weights = load_file(embedded_root / "zero" / "model.safetensors")
    missing = sorted(weights)[-1]
    save_file({name: values for name, values in weights.items() if name != missing}, broken / "model.safetensors")
    await embedded.start_update()
    await embedded.send_weights({"path": str(broken)})
    with pytest.raises(RollspanError) as caught:
        await embedded.finish_update("never")
    assert caught.value.reason == "weights_invalid"
    assert missing in caught.value.message
    after, now = await embedded.generate(order), await embedded.history()
    assert (after.only.token_ids, after.only.logprobs) == (before.only.token_ids, before.only.logprobs)
    for key in ("state", "weight_version", "weight_commit", "weight_digest"):
        assert now[key] == record[key]


async def test_labels_are_bound_to_bits(oracle: CountingOracle) -> None:
    """Elsewhere a label may change while weights don't, and weights while the label doesn't, and nobody can tell."""
    named = oracle.label
    await oracle.update(2, keep_label=True)
    renamed = await oracle.relabel()
    commits = (await oracle.driver.history())["commits"][-3:]
    assert [(entry["kind"], entry["weight_version"], entry["weight_digest"]) for entry in commits] == [
        ("update", named, digest(tensors(1))),
        ("update", named, digest(tensors(2))),
        ("relabel", renamed, digest(tensors(2))),
    ]
    assert [entry["weight_commit"] for entry in commits] == [oracle.commit - 1, oracle.commit, oracle.commit]
    again = await oracle.driver.generate(Order([3], 2))
    oracle.check(again)
    assert (again.weight_version, again.weight_commit) == (renamed, oracle.commit)


async def test_no_output_comes_from_keys_and_values_of_weights_before(embedded: Driver, embedded_root: Path) -> None:
    """Elsewhere an update beside an idle engine leaves the prefix cache: what follows is of neither set of weights."""
    prompt = [random.Random(embedded.name).randrange(3, 16) for _ in range(100)]  # that nobody has asked before
    order = Order(prompt, 30, logprobs=1)
    outputs = []
    for name in ("sft", "rl", "sft", "rl"):
        await embedded.update(embedded_root / name, name)
        for _ in range(2):  # the second one finds the prompt in the cache
            rollout = await embedded.generate(order)
            assert versions(rollout.only) == [name]
            outputs.append((rollout.only.token_ids, rollout.only.logprobs))
    assert outputs[0] != outputs[2]
    assert outputs[4:] == outputs[:4]


@pytest.mark.parametrize("kind", ["async_llm"], indirect=True)
async def test_calls_that_nobody_waits_for_keep_their_order_and_every_token_its_label(
    kind: str, impatient_server: Server, checkpoints: Checkpoints
) -> None:
    """Elsewhere up to 3 tokens a request are mislabelled unless each call is acknowledged before the next is sent.

    Steps are launched here before the one before is read, which is where that comes from.
    """
    driver = await drive(kind, impatient_server)
    oracle = await CountingOracle.begin(driver, checkpoints)
    running = [Running(driver, Order([3], LONG, stream=True, n=count, chunk_spans=True)) for count in (1, 2, 3)]
    for number in range(12):
        token = 2 + number % 2
        for one in running:
            await one.reach(await one.reach(0) + 3)
        calls = [
            driver.pause("keep", number % 3 == 0),
            driver.start_update(),
            driver.send_weights({"path": str(checkpoints.emitting(token))}),
            oracle.finish(token),
            driver.resume(),
        ]
        await asyncio.gather(*[asyncio.create_task(call) for call in calls])
    for one in running:
        rollout = await one.stop()
        oracle.check(rollout)
        assert all(len(choice.weight_versions or []) == 13 for choice in rollout.choices)
    await driver.close()


async def test_two_requests_of_one_id_are_never_in_flight(oracle: CountingOracle) -> None:
    """Elsewhere both are accepted, and nobody knows whom an abort will end."""
    running = Running(oracle.driver, Order([3], LONG, stream=True, request_id="taken"))
    await running.reach(3)
    for stream in (False, True):
        with pytest.raises(RollspanError) as caught:
            await oracle.driver.generate(Order([3], 5, stream=stream, request_id="taken"))
        assert caught.value.reason == "duplicate_request_id"
    oracle.check(await running.stop())
    assert (await oracle.driver.generate(Order([3], 2, request_id="taken"))).request_id == "taken"


@pytest.mark.parametrize("label", ["x" * (1 << 20), "", "step\0", "step\x1b[2J"], ids=["1MB", "empty", "NUL", "escape"])
async def test_a_label_that_cannot_be_shown_is_none(oracle: CountingOracle, label: str) -> None:
    """Elsewhere it is accepted, and repeated in every answer."""
    driver, before = oracle.driver, oracle.label
    await driver.start_update()
    await driver.send_weights({"path": str(oracle.emitting(2))})
    for call in (driver.finish_update, driver.relabel):
        with pytest.raises(RollspanError) as caught:
            await call(label)
        assert caught.value.reason == "invalid_label"
        assert len(caught.value.message) < 300
    assert await driver.weight_version() == before
    await oracle.finish(2)
