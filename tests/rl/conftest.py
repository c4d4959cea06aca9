"""Two engines for the whole room, each with every kind of client in front of it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from counting_model import Checkpoints, write_zero_head

from rollspan import models
from rollspan.async_llm import AsyncLLM
from rollspan.client.framed import FramedClient
from rollspan.config import EngineConfig
from rollspan.launcher import private_directory
from support.drivers import AsyncLLMDriver, Driver, HttpDriver
from support.servers import FRONTENDS, Server

KV_BYTES = 64 * 1024 * 1024
START_SECONDS = 100.0


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints of the counting model."""
    return Checkpoints(tmp_path_factory.mktemp("counting"))


@pytest.fixture(scope="session")
def counting_server(checkpoints: Checkpoints) -> Iterator[Server]:
    """An engine that serves the counting model."""
    config = EngineConfig(
        model=str(checkpoints.emitting(0)), weights_root=str(checkpoints.root), kv_cache_memory=KV_BYTES, num_threads=1
    )
    with private_directory() as directory:
        server = Server(config, directory)
        yield server
        server.close()


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
    config = EngineConfig(
        model=str(embedded_root / "rl"), weights_root=str(embedded_root), kv_cache_memory=KV_BYTES, num_threads=1
    )
    with private_directory() as directory:
        server = Server(config, directory)
        yield server
        server.close()


async def _drive(kind: str, server: Server) -> Driver:
    if kind == "async_llm":
        client = await FramedClient.connect(server.engine.socket_path, START_SECONDS)
        return AsyncLLMDriver(await AsyncLLM.from_client(client))
    return HttpDriver(kind, server.frontend(kind).url)


@pytest.fixture(scope="session", params=[*FRONTENDS, "async_llm"])
def kind(request: pytest.FixtureRequest) -> str:
    """What is in front of the engine."""
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def counting(kind: str, counting_server: Server) -> AsyncIterator[Driver]:
    """The counting model, running, through one kind of client."""
    driver = await _drive(kind, counting_server)
    yield driver
    await driver.settle()
    await driver.close()


@pytest_asyncio.fixture(loop_scope="session")
async def embedded(kind: str, embedded_server: Server, embedded_root: Path) -> AsyncIterator[Driver]:
    """The embedded model, running with its own weights, through one kind of client."""
    driver = await _drive(kind, embedded_server)
    await driver.update(embedded_root / "rl", "rl")
    yield driver
    await driver.settle()
    await driver.close()
