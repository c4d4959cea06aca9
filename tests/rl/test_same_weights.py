"""Updates that bring the weights in force again change nothing but the commit: no bit, no token, no memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from clients import drive
from raw_senders import SENDERS, RawSender, senders_for
from safetensors.numpy import load_file

from rollspan.errors import RollspanError
from support.drivers import Driver, HttpDriver, Order
from support.meter import Running
from support.servers import FRONTENDS, Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [1, 4, 5, 13, 6, 7, 14]
WARM_UP = 20
UPDATES = 50
NOISE_BYTES = 6 << 20
"""Of resident memory; a leak of one copy of the weights an update would be 20 MB."""


class Updates:
    """Brings the weights in force again, by one transport after the other."""

    def __init__(self, driver: Driver, root: Path) -> None:
        self.driver = driver
        self.weights = load_file(root / "rl" / "model.safetensors")
        self._senders: list[RawSender] = [SENDERS[name](driver, root) for name in senders_for(driver)]

    async def join(self) -> None:
        """Meets the engine."""
        for sender in self._senders:
            await sender.join()

    async def same(self, number: int) -> tuple[str, int]:
        """One update; its digest and commit number."""
        await self.driver.start_update()
        await self._senders[number % len(self._senders)].send(self.weights)
        answer = await self.driver.finish_update(f"same-{number}")
        return answer["weight_digest"], answer["weight_commit"]

    async def failed(self, number: int) -> None:
        """One that is aborted, or lacks half of the weights."""
        await self.driver.start_update()
        half = {name: self.weights[name] for name in sorted(self.weights)[::2]}
        await self._senders[number % len(self._senders)].send(half)
        if number % 2:
            assert await self.driver.abort_update()
        else:
            with pytest.raises(RollspanError) as caught:
                await self.driver.finish_update("never")
            assert caught.value.reason == "weights_invalid"

    async def close(self) -> None:
        """Leaves the engine."""
        for sender in self._senders:
            await sender.close()


@pytest_asyncio.fixture(loop_scope="session")
async def updates(kind: str, embedded_server: Server, embedded_root: Path) -> AsyncIterator[Updates]:
    """The embedded model with its own weights."""
    driver = await drive(kind, embedded_server)
    await driver.update(embedded_root / "rl", "rl")
    made = Updates(driver, embedded_root)
    await made.join()
    yield made
    await driver.settle()
    await made.close()
    await driver.close()


def resident(process: int) -> int:
    """Bytes of memory that a process has, shared ones included."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) << 10


@pytest.mark.parametrize("kind", FRONTENDS, indirect=True)
async def test_fifty_updates_to_the_same_weights_change_no_bit_and_take_no_memory(
    updates: Updates, embedded_server: Server
) -> None:
    driver = updates.driver
    assert isinstance(driver, HttpDriver)
    before = await driver.history()
    undisturbed = await driver.generate(Order(PROMPT, 60, logprobs=1))
    for number in range(WARM_UP):
        await updates.same(number)
        await updates.failed(number)
    memory = resident(embedded_server.engine.process.pid)
    running = Running(driver, Order(PROMPT, 480, stream=True, logprobs=1))
    for number in range(UPDATES):
        digest, commit = await updates.same(number)
        assert digest == before["weight_digest"]
        assert commit == before["weight_commit"] + WARM_UP + number + 1
    growth = resident(embedded_server.engine.process.pid) - memory
    disturbed = (await running.result()).only
    assert disturbed.token_ids[:60] == undisturbed.only.token_ids
    assert disturbed.logprobs[:60] == undisturbed.only.logprobs
    assert len(disturbed.weight_commits or []) > 1
    again = await driver.generate(Order(PROMPT, 60, logprobs=1))
    assert (again.only.token_ids, again.only.logprobs) == (undisturbed.only.token_ids, undisturbed.only.logprobs)
    assert growth < NOISE_BYTES, f"{growth >> 10} KiB in {UPDATES} updates"


@pytest.mark.parametrize("kind", FRONTENDS[:1], indirect=True)
async def test_fifty_updates_that_fail_take_no_memory(updates: Updates, embedded_server: Server) -> None:
    for number in range(WARM_UP):
        await updates.failed(number)
    memory = resident(embedded_server.engine.process.pid)
    for number in range(UPDATES):
        await updates.failed(number)
    growth = resident(embedded_server.engine.process.pid) - memory
    assert growth < NOISE_BYTES, f"{growth >> 10} KiB in {UPDATES} updates"
    assert (await updates.driver.history())["state"] == "ready"
