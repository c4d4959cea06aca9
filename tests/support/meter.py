"""Waiting for progress instead of for time."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from typing import Any

from support.drivers import Driver, Order, Rollout

PATIENCE = 60.0


class Meter:
    """A number that only grows, and tasks that wait for it to get somewhere."""

    def __init__(self) -> None:
        self.value = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def set(self, value: int) -> None:
        """Moves it to ``value``, if that is further."""
        self.value = max(self.value, value)
        for threshold, future in self._waiting:
            if threshold <= self.value and not future.done():
                future.set_result(None)
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]

    def add(self, amount: int) -> None:
        """Moves it on by ``amount``."""
        self.set(self.value + amount)

    def reaching(self, threshold: int) -> asyncio.Future[None]:
        """Done once the value is at least ``threshold``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((threshold, future))
        self.set(self.value)
        return future


class Running:
    """A streamed request in the background, and how far it is."""

    def __init__(self, driver: Driver, order: Order) -> None:
        assert order.stream
        self._driver = driver
        self._request_id = order.request_id or secrets.token_hex(8)
        order = dataclasses.replace(order, request_id=self._request_id)
        self._sequences = [0] * order.n
        self._behind = Meter()
        self.task: asyncio.Task[Rollout] = asyncio.create_task(driver.generate(order, self._listen))

    def _listen(self, index: int, tokens: int) -> None:
        self._sequences[index] = tokens
        self._behind.set(min(self._sequences))

    async def reach(self, tokens: int) -> int:
        """Waits until every sequence has at least that many tokens; returns how many the last one has.

        Raises:
            AssertionError: the request ended before.
        """
        reached = self._behind.reaching(tokens)
        either: set[asyncio.Future[Any]] = {reached, self.task}
        await asyncio.wait(either, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert reached.done(), f"ended before token {tokens}: {self.task}"
        return self._behind.value

    async def stop(self) -> Rollout:
        """Lets it go on a little, aborts it and returns what it has."""
        await self.reach(self._behind.value + 5)
        assert await self._driver.abort([self._request_id]) == 1
        rollout = await self.result()
        assert all(choice.finish_reason == "abort" for choice in rollout.choices)
        return rollout

    async def result(self) -> Rollout:
        """The finished rollout."""
        return await asyncio.wait_for(self.task, PATIENCE)
