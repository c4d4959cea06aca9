"""Counting oracle under load: 200 requests at once, weights change at random moments and nothing is ever paused."""

from __future__ import annotations

import asyncio
import random
import secrets

import pytest
from clients import drive
from counting_model import HEAD, VOCABULARY, Checkpoints, changed_token, digest, tensors
from counting_oracle import CountingOracle
from raw_senders import SENDERS, senders_for

from support.drivers import Choice, Driver, Order, Rollout
from support.meter import Meter
from support.servers import FRONTENDS, Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

REQUESTS = 200
FEWER = 30
UPDATES = 24


class Load:
    """Requests of all kinds, always as many of them, until somebody says stop."""

    def __init__(self, driver: Driver, seed: int, requests: int = REQUESTS) -> None:
        self.rollouts: list[Rollout] = []
        self.tokens = Meter()
        self._driver = driver
        self._random = random.Random(seed)
        self._stop = asyncio.Event()
        self._workers = [asyncio.create_task(self._work()) for _ in range(requests)]

    async def _work(self) -> None:
        while not self._stop.is_set():
            order = self._order()
            abort_at = self._random.randrange(4 * order.max_tokens)
            self.rollouts.append(await self._run(order, abort_at))

    def _order(self) -> Order:
        stream = self._random.random() < 0.5
        return Order(
            token_ids=[self._random.randrange(VOCABULARY) for _ in range(self._random.randint(1, 12))],
            max_tokens=self._random.randint(1, 200),
            n=self._random.choice((1, 1, 1, 2)),
            temperature=self._random.choice((0.0, 1.0)),
            seed=self._random.choice((None, 5)),
            logprobs=self._random.choice((None, None, 2)),
            stream=stream,
            chunk_spans=stream and self._random.random() < 0.5,
            request_id=secrets.token_hex(8),
        )

    async def _run(self, order: Order, abort_at: int) -> Rollout:
        seen = [0] * order.n
        aborts: list[asyncio.Task[int]] = []

        def listen(index: int, tokens: int) -> None:
            self.tokens.add(tokens - seen[index])
            seen[index] = tokens
            if order.stream and not aborts and seen[index] > abort_at:
                assert order.request_id is not None
                aborts.append(asyncio.create_task(self._driver.abort([order.request_id])))

        rollout = await self._driver.generate(order, listen)
        await asyncio.gather(*aborts)
        return rollout

    def check(self) -> None:
        """Raises what a worker has failed with, if one has."""
        for worker in self._workers:
            if worker.done():
                worker.result()

    async def stop(self) -> list[Rollout]:
        """Lets what runs finish and returns everything that finished."""
        self._stop.set()
        await asyncio.gather(*self._workers)
        return self.rollouts


async def test_no_token_is_ever_under_a_wrong_version(counting: Driver, checkpoints: Checkpoints) -> None:
    oracle = await CountingOracle.begin(counting, checkpoints)
    load = Load(counting, seed=11)
    moments = random.Random(12)
    for number in range(UPDATES):
        await asyncio.wait_for(load.tokens.reaching(load.tokens.value + moments.randrange(400)), 60)
        token = 2 + number % 8
        if moments.random() < 0.2:
            await oracle.relabel()
        await oracle.update(token, keep_label=moments.random() < 0.2)
        load.check()
    choices = await checked(oracle, load)
    crossing = [choice for choice in choices if len(choice.weight_commits or []) > 1]
    assert len(choices) >= REQUESTS
    assert len(crossing) >= REQUESTS / 2, "too few requests were running during an update to prove anything"
    assert {"length", "abort"} <= {choice.finish_reason for choice in choices}


async def checked(oracle: CountingOracle, load: Load) -> list[Choice]:
    """Ends the load, checks every token, and returns all sequences."""
    rollouts = await asyncio.wait_for(load.stop(), 60)
    for rollout in rollouts:
        oracle.check(rollout)
    return [choice for rollout in rollouts for choice in rollout.choices]


@pytest.mark.parametrize("kind", FRONTENDS[:1], indirect=True)
async def test_no_token_is_under_a_wrong_version_whatever_the_transport(
    kind: str, impatient_server: Server, checkpoints: Checkpoints
) -> None:
    """Steps are launched ahead here, and weights come by every transport in turn, whole, in part and as deltas."""
    driver = await drive(kind, impatient_server)
    oracle = await CountingOracle.begin(driver, checkpoints)
    senders = [SENDERS[name](driver, checkpoints.root) for name in senders_for(driver)]
    for sender in senders:
        await sender.join()
    load = Load(driver, seed=21, requests=FEWER)
    values, moments = tensors(1), random.Random(22)
    for number, sender in enumerate(senders * 2):
        await asyncio.wait_for(load.tokens.reaching(load.tokens.value + moments.randrange(200)), 60)
        token = 2 + number % 8
        new, delta = changed_token(values, token)
        way = moments.choice(("whole", "partial", "delta"))
        await driver.start_update()
        if way == "whole":
            new = tensors(token)
            await sender.send(new)
        elif way == "partial":
            await sender.send({HEAD: new[HEAD]})
        else:
            await sender.send(delta, delta={"base_commit": oracle.commit})
        await oracle.finish(token, partial=way == "partial" or None, digest=digest(new))
        values = new
        load.check()
    choices = await checked(oracle, load)
    for sender in senders:
        await sender.close()
    await driver.close()
    crossing = [choice for choice in choices if len(choice.weight_commits or []) > 1]
    assert len(crossing) >= FEWER, "too few requests were running during an update to prove anything"
