"""A trainer is killed wherever it may be in an update: the weights stay, what runs goes on, the next update works."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from clients import drive
from counting_model import Checkpoints, tensors
from counting_oracle import CountingOracle, versions
from trainer_process import Stop, Trainers

from support.drivers import HttpDriver, Order
from support.meter import PATIENCE, Running
from support.servers import FRONTENDS, Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

TRANSPORTS = ("disk", "http", "shm", "distributed")
NOWHERE = Stop()
STARTED, RECEIVED = Stop("POST /update_weights"), Stop("POST /finish_weight_update")
FINISHING = Stop("POST /finish_weight_update", sent=True)
SENDING = Stop("POST /update_weights", sent=True)
RECEIVING = {
    "disk": SENDING,
    "shm": SENDING,
    "http": Stop("PUT /weight_uploads", number=1),
    "distributed": Stop("broadcast", number=5),
}
CASES = [
    *((FRONTENDS[0], transport, phase) for transport in TRANSPORTS for phase in ("receive", "finish")),
    *((FRONTENDS[0], transport, "start") for transport in ("disk", "http")),
    *((FRONTENDS[0], transport, "wait") for transport in ("shm", "distributed")),
    *((kind, *case) for kind in FRONTENDS[1:] for case in (("http", "receive"), ("shm", "receive"), ("shm", "finish"))),
]


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    """Makes trainers."""
    made = Trainers()
    yield made
    made.close()


class Site:
    """A server with requests running, and trainers who come and go."""

    def __init__(self, server: Server, oracle: CountingOracle, trainers: Trainers, directory: Path) -> None:
        self.server = server
        self.oracle = oracle
        self._trainers = trainers
        self._directory = directory
        self.running = [Running(oracle.driver, Order([3], 4000, stream=True, n=count)) for count in (1, 2)]

    async def trainer(self, transport: str, stop: Stop, token: int) -> dict[str, Any]:
        """A trainer of the weights that emit ``token``; its label is ``"killed"`` when it is to stop."""
        options: dict[str, dict[str, Any]] = {
            "disk": {"directory": str(self._directory)},
            "http": {"chunk_bytes": 4000},
            "distributed": {"packed_bytes": 1},
        }
        assert isinstance(self.oracle.driver, HttpDriver)
        return await self._trainers.run(
            stop,
            url=self.oracle.driver.url,
            transport=transport,
            options=options.get(transport, {}),
            token=token,
            label="killed" if stop.call else "whole",
        )

    async def go_on(self) -> None:
        """Every request that runs makes progress."""
        for running in self.running:
            await running.reach(await running.reach(0) + 10)

    async def record(self) -> dict[str, Any]:
        """What the engine says of its weights."""
        return await self.oracle.driver.history()

    async def until(self, what: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Asks until the record is so."""

        async def ask() -> dict[str, Any]:
            while not what(record := await self.record()):  # noqa: ASYNC110 (it is another process that changes it)
                await asyncio.sleep(0.02)
            return record

        return await asyncio.wait_for(ask(), PATIENCE)

    def held(self) -> tuple[int, set[str]]:
        """Descriptors that the engine holds, and files in memory that it maps."""
        process = Path(f"/proc/{self.server.engine.process.pid}")
        lines = (process / "maps").read_text().splitlines()
        mapped = {line.split(maxsplit=5)[-1] for line in lines if "/memfd:rollspan" in line or "/dev/shm/" in line}
        return len(list((process / "fd").iterdir())), mapped

    def spooled(self) -> list[Path]:
        """Files that the frontend holds of uploads."""
        assert self.server.config.weights_spool is not None
        return [path for path in Path(self.server.config.weights_spool).rglob("*") if path.is_file()]


@pytest_asyncio.fixture(loop_scope="session")
async def site(
    kind: str, impatient_server: Server, checkpoints: Checkpoints, trainers: Trainers
) -> AsyncIterator[Site]:
    """The counting model emits token 1."""
    driver = await drive(kind, impatient_server)
    directory = checkpoints.root / "trainer"
    directory.mkdir(exist_ok=True)
    made = Site(impatient_server, await CountingOracle.begin(driver, checkpoints), trainers, directory)
    await made.go_on()
    yield made
    await driver.settle()
    await driver.close()
    shutil.rmtree(directory)


def changed(before: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """Whether what a trainer has sent off has arrived."""

    def arrived(record: dict[str, Any]) -> bool:
        update = record["update"]
        moved = update is not None and (update["tensors"] == len(tensors(1)) or update["phase"] != "open")
        ended = len(record["failures"]) > len(before["failures"]) or record["weight_commit"] > before["weight_commit"]
        return moved or ended

    return arrived


@pytest.mark.parametrize(("kind", "transport", "phase"), CASES, indirect=["kind"])
async def test_a_killed_trainer_leaves_the_weights_as_they_were(site: Site, transport: str, phase: str) -> None:
    oracle, before = site.oracle, await site.record()
    label, held = oracle.label, site.held()
    stop = {"start": STARTED, "receive": RECEIVING[transport], "wait": RECEIVED, "finish": FINISHING}[phase]
    trainer = await site.trainer(transport, stop, token=2)
    os.kill(trainer["pid"], signal.SIGKILL)
    if stop.sent and phase != "finish":
        await site.until(changed(before))
    await site.go_on()
    if phase == "finish":  # it may have been asked for in time, or not: but not half
        await site.until(lambda record: record["update"] is None or record["update"]["phase"] == "open")
    aborted = await oracle.driver.abort_update()
    record = await site.record()
    assert (record["state"], record["update"]) == ("ready", None)
    expected = [label]
    if phase == "finish" and record["weight_commit"] > oracle.commit:
        assert not aborted
        oracle.adopt(record, token=2)
        expected.append("killed")
    await site.go_on()
    assert (record["weight_version"], record["weight_commit"]) == (oracle.label, oracle.commit)
    for running in site.running:
        rollout = await running.stop()
        oracle.check(rollout)
        assert all(versions(choice) == expected for choice in rollout.choices)
    if oracle.label == label:
        await site.until(lambda _: site.held()[1] == held[1])
    sent = (await site.trainer(transport, NOWHERE, token=3))["sent"]
    assert sent["weight_commits"] == [oracle.commit + 1]
    oracle.adopt(await site.record(), token=3)
    rollout = await oracle.driver.generate(Order([3], 3))
    oracle.check(rollout)
    assert rollout.only.token_ids == [3] * 3
    assert bool(site.held()[1]) == (transport in ("http", "shm")), "weights in memory are used where they are"
    await oracle.update(1)
    await oracle.driver.shut_down_transfer()
    await site.until(lambda _: site.held() == held)
    assert held[1] == set()


@pytest.mark.parametrize("kind", FRONTENDS, indirect=True)
async def test_what_a_killed_trainer_has_left_ends_by_itself(site: Site) -> None:
    """Its open update is dropped, and its unfinished upload deleted, when nothing has come for so many seconds."""
    label, failures = site.oracle.label, len((await site.record())["failures"])
    trainer = await site.trainer("http", RECEIVING["http"], token=2)
    os.kill(trainer["pid"], signal.SIGKILL)
    assert (await site.record())["state"] == "updating"
    assert site.spooled()
    record = await site.until(lambda record: record["update"] is None)
    assert (record["state"], record["weight_version"]) == ("ready", label)
    assert len(record["failures"]) == failures + 1
    assert record["failures"][-1]["reason"] == "update_aborted"
    await site.until(lambda _: not site.spooled())
    await site.go_on()
    await site.oracle.update(2)


@pytest.mark.parametrize("kind", FRONTENDS[:1], indirect=True)
async def test_a_trainer_that_falls_silent_in_mid_transfer_is_given_up(site: Site) -> None:
    label = site.oracle.label
    trainer = await site.trainer("distributed", RECEIVING["distributed"], token=2)
    os.kill(trainer["pid"], signal.SIGSTOP)
    record = await site.until(lambda record: record["update"] is None)
    assert (record["state"], record["weight_version"]) == ("ready", label)
    assert record["failures"][-1]["phase"] == "receiving"
    assert record["failures"][-1]["reason"] in ("transfer_failed", "update_aborted")
    os.kill(trainer["pid"], signal.SIGKILL)
    await site.go_on()
    sent = (await site.trainer("distributed", NOWHERE, token=3))["sent"]
    assert sent["weight_commits"] == [site.oracle.commit + 1]
