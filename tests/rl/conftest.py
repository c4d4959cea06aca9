"""Engines for the whole room, each with every kind of client in front of it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from clients import drive
from counting_model import Checkpoints, write_zero_head

from rollspan import models
from rollspan.config import EngineConfig
from rollspan.launcher import SHARED_MEMORY, private_directory
from support.drivers import Driver
from support.servers import FRONTENDS, Server

KV_BYTES = 64 * 1024 * 1024
PATIENCE_SECONDS = 4.0


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints of the counting model."""
    return Checkpoints(tmp_path_factory.mktemp("counting"))


@pytest.fixture(scope="session")
def counting_server(checkpoints: Checkpoints) -> Iterator[Server]:
    """An engine that serves the counting model."""
    with _serving(checkpoints.emitting(0), checkpoints.root) as server:
        yield server


@pytest.fixture(scope="session")
def impatient_server(checkpoints: Checkpoints) -> Iterator[Server]:
    """An engine that waits for trainers for few seconds only, and launches steps before the last one is read."""
    with _serving(
        checkpoints.emitting(0), checkpoints.root, async_scheduling=True, weight_update_timeout=PATIENCE_SECONDS
    ) as server:
        yield server


@pytest.fixture(scope="session")
def embedded_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A weights root with the embedded checkpoints ``sft`` and ``rl``, and ``zero``: ``rl`` with a zero head."""
    root = tmp_path_factory.mktemp("embedded")
    for name in ("sft", "rl"):
        shutil.copytree(models.path(f"add2-{name}"), root / name)
    write_zero_head(root / "rl", root / "zero")
    return root


@pytest.fixture(scope="session")
def embedded_server(embedded_root: Path) -> Iterator[Server]:
    """An engine that serves the embedded model."""
    with _serving(embedded_root / "rl", embedded_root) as server:
        yield server


@contextmanager
def _serving(model: Path, root: Path, **options: Any) -> Iterator[Server]:
    """A server with a spool in memory, as the launcher makes it."""
    with private_directory() as directory, private_directory(SHARED_MEMORY) as spool:
        config = EngineConfig(
            model=str(model),
            weights_root=str(root),
            weights_spool=str(spool),
            kv_cache_memory=KV_BYTES,
            num_threads=1,
            **options,
        )
        server = Server(config, directory)
        yield server
        server.close()


@pytest.fixture(scope="session", params=[*FRONTENDS, "async_llm"])
def kind(request: pytest.FixtureRequest) -> str:
    """What is in front of the engine."""
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def counting(kind: str, counting_server: Server) -> AsyncIterator[Driver]:
    """The counting model, running, through one kind of client."""
    driver = await drive(kind, counting_server)
    yield driver
    await driver.settle()
    await driver.close()


@pytest_asyncio.fixture(loop_scope="session")
async def embedded(kind: str, embedded_server: Server, embedded_root: Path) -> AsyncIterator[Driver]:
    """The embedded model, running with its own weights, through one kind of client."""
    driver = await drive(kind, embedded_server)
    await driver.update(embedded_root / "rl", "rl")
    yield driver
    await driver.settle()
    await driver.close()
