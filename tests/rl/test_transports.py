"""Weights by every transport in every way: each token proves that they come into force where the spans say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from counting_model import HEAD, Checkpoints, changed_token, digest, tensors
from counting_oracle import CountingOracle, versions
from raw_senders import SENDERS, RawSender, senders_for

from rollspan.errors import RollspanError
from support.drivers import Driver, Order
from support.meter import Running

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [3, 1, 4]
LONG = 4000


@pytest_asyncio.fixture(loop_scope="session")
async def oracle(counting: Driver, checkpoints: Checkpoints) -> CountingOracle:
    """The counting model emits token 1."""
    return await CountingOracle.begin(counting, checkpoints)


@pytest_asyncio.fixture(loop_scope="session", params=list(SENDERS))
async def sender(request: pytest.FixtureRequest, oracle: CountingOracle) -> AsyncIterator[RawSender]:
    """A trainer that knows one transport."""
    if request.param not in senders_for(oracle.driver):
        pytest.skip("uploads go to an HTTP server")
    found = SENDERS[request.param](oracle.driver, oracle.root)
    await found.join()
    yield found
    await found.close()


async def running(driver: Driver) -> tuple[Running, Running, asyncio.Task[object]]:
    """Two streams, of one sequence and of two, and a collected request, all of which run."""
    streams = [Running(driver, Order(PROMPT, LONG, stream=True, n=count, chunk_spans=True)) for count in (1, 2)]
    collected = asyncio.create_task(driver.generate(Order(PROMPT, LONG)))
    for stream in streams:
        await stream.reach(5)
    return streams[0], streams[1], collected


async def ended(oracle: CountingOracle, requests: tuple[Running, Running, asyncio.Task[object]]) -> list[list[str]]:
    """Ends them, checks every token, and returns the labels that each sequence has gone through."""
    rollouts = [await requests[0].stop(), await requests[1].stop()]
    assert await oracle.driver.abort() == 1
    rollouts.append(await requests[2])  # type: ignore[arg-type]
    for rollout in rollouts:
        oracle.check(rollout)
    return [versions(choice) for rollout in rollouts for choice in rollout.choices]  # type: ignore[misc]


async def test_weights_arrive_while_requests_run(oracle: CountingOracle, sender: RawSender) -> None:
    before, requests = oracle.label, await running(oracle.driver)
    halves = 0

    async def go_on() -> None:
        """Half of the weights are here: generation goes on with the old ones."""
        nonlocal halves
        halves += 1
        record = await oracle.driver.history()
        assert (record["state"], record["weight_version"]) == ("updating", before)
        for stream in requests[:2]:
            await stream.reach(await stream.reach(0) + 10)

    sender.halfway = go_on
    await oracle.driver.start_update()
    await sender.send(tensors(2))
    assert halves == (sender.name in ("http", "broadcast"))
    after = await oracle.finish(2, digest=digest(tensors(2)))
    assert await ended(oracle, requests) == [[before, after]] * 4


async def test_a_part_of_the_weights_arrives_while_requests_run(oracle: CountingOracle, sender: RawSender) -> None:
    before, requests = oracle.label, await running(oracle.driver)
    await oracle.driver.start_update()
    await sender.send({HEAD: tensors(2)[HEAD]})
    after = await oracle.finish(2, partial=True, digest=digest(tensors(1) | {HEAD: tensors(2)[HEAD]}))
    assert await ended(oracle, requests) == [[before, after]] * 4


async def test_a_delta_arrives_while_requests_run(oracle: CountingOracle, sender: RawSender) -> None:
    before, requests = oracle.label, await running(oracle.driver)
    whole, delta = changed_token(tensors(1), 2)
    await oracle.driver.start_update()
    await sender.send(delta, delta={"base_commit": oracle.commit, "base_digest": digest(tensors(1))})
    after = await oracle.finish(2, digest=digest(whole))
    assert await ended(oracle, requests) == [[before, after]] * 4


async def test_weights_are_written_over_during_a_pause(oracle: CountingOracle, sender: RawSender) -> None:
    before, requests = oracle.label, await running(oracle.driver)
    await oracle.driver.pause("keep", False)
    await oracle.driver.start_update("in_place")
    await sender.send(tensors(2))
    with pytest.raises(RollspanError) as caught:
        await oracle.driver.resume()
    assert caught.value.reason == "update_active"
    after = await oracle.finish(2, digest=digest(tensors(2)))
    await oracle.driver.resume()
    assert await ended(oracle, requests) == [[before, after]] * 4


async def test_what_a_sender_lost_half_way_leaves_is_nothing(oracle: CountingOracle, sender: RawSender) -> None:
    """Half of the tensors came; an update that ends here is dropped, and what runs never notices."""
    before, commit, requests = oracle.label, oracle.commit, await running(oracle.driver)
    values = tensors(2)
    await oracle.driver.start_update()
    await sender.send({name: values[name] for name in sorted(values)[::2]})
    assert await oracle.driver.abort_update()
    assert not await oracle.driver.abort_update()
    record = await oracle.driver.history()
    assert (record["state"], record["weight_version"], record["weight_commit"]) == ("ready", before, commit)
    assert record["weight_digest"] == digest(tensors(1))
    assert await ended(oracle, requests) == [[before]] * 4
    await oracle.driver.start_update()
    await sender.send(values)
    await oracle.finish(2)
