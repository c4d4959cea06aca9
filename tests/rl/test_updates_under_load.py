"""Counting oracle under load: 200 requests at once, weights change at random moments and nothing is ever paused."""

from __future__ import annotations

import asyncio
import random
import secrets

import pytest
from counting_model import VOCABULARY, Checkpoints
from counting_oracle import CountingOracle

from support.drivers import Driver, Order, Rollout
from support.meter import Meter

pytestmark = pytest.mark.asyncio(loop_scope="session")

REQUESTS = 200
UPDATES = 24


class Load:
    """Requests of all kinds, always 200 of them, until somebody says stop."""

    def __init__(self, driver: Driver, seed: int) -> None:
        self.rollouts: list[Rollout] = []
        self.tokens = Meter()
        self._driver = driver
        self._random = random.Random(seed)
        self._stop = asyncio.Event()
        self._workers = [asyncio.create_task(self._work()) for _ in range(REQUESTS)]

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
    rollouts = await asyncio.wait_for(load.stop(), 60)
    for rollout in rollouts:
        oracle.check(rollout)
    choices = [choice for rollout in rollouts for choice in rollout.choices]
    crossing = [choice for choice in choices if len(choice.weight_commits or []) > 1]
    assert len(rollouts) >= REQUESTS
    assert len(crossing) >= REQUESTS / 2, "too few requests were running during an update to prove anything"
    assert {"length", "abort"} <= {choice.finish_reason for choice in choices}
