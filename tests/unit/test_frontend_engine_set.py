"""The Python frontend's engines: one that is gone is awaited again, whenever it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollspan.errors import RollspanError
from rollspan.frontend import engine_set
from rollspan.frontend.engine import Engine
from rollspan.frontend.engine_set import EngineSet

GONE = RollspanError("gone", reason="engine_dead")


class Links:
    """Engines that say hello at once. The first ``short_lived`` that come back die before anything else happens."""

    def __init__(self, short_lived: int) -> None:
        self.lost: dict[int, Callable[[RollspanError], None]] = {}
        self.made = [0, 0]
        self.steady = asyncio.Event()
        self._short_lived = short_lived

    async def connect(self, index: int, lost: Callable[[RollspanError], None]) -> Engine:
        self.lost[index] = lost
        self.made[index] += 1
        if 1 < self.made[index] <= 1 + self._short_lived:
            asyncio.get_running_loop().call_soon(lost, GONE)
        elif self.made[index] > 1:
            self.steady.set()
        made: Any = SimpleNamespace(
            index=index, hello=SimpleNamespace(weight_commit=0), client=SimpleNamespace(death=None)
        )
        return cast(Engine, made)


async def test_an_engine_that_dies_as_soon_as_it_is_back_is_awaited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_set, "RETRY_SECONDS", 0.0)
    links = Links(short_lived=2)
    engines = EngineSet(2, links.connect)
    await engines.start()
    links.lost[1](GONE)
    assert [engine.index for engine in engines.connected] == [0]
    await asyncio.wait_for(links.steady.wait(), 10)
    await asyncio.sleep(0)
    assert [engine.index for engine in engines.connected] == [0, 1]
    assert [engine.index for engine in engines.serving] == [0]
    assert links.made == [1, 4]
