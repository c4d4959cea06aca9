"""One suite for both frontends: every test here runs against ``rollspan-http`` and ``python -m rollspan.frontend``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_server import RealEngine, RealServer
from real_set import RealSet, SetServer
from scripted_frontend import ENGINE_START_SECONDS, FRONTENDS, Mocked, MockFactory


@pytest.fixture(scope="session", params=FRONTENDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which frontend is under test."""
    return str(request.param)


@pytest.fixture(scope="session")
def socket_directory() -> Iterator[Path]:
    """A short path: Unix socket addresses hold about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="rsp-") as name:
        yield Path(name)


@pytest.fixture
def mocks(kind: str, socket_directory: Path) -> Iterator[MockFactory]:
    """For tests that need an engine of their own: flags, death, start and shutdown."""
    factory = MockFactory(kind, socket_directory)
    yield factory
    factory.close()


@pytest.fixture(scope="session")
def started_mock(kind: str, socket_directory: Path) -> Iterator[Mocked]:
    """A scripted engine and its frontend, shared; tests take them as `mock`."""
    factory = MockFactory(kind, socket_directory)
    yield factory.start()
    factory.close()


@pytest.fixture
def mock(started_mock: Mocked) -> Mocked:
    """One scripted engine for all tests that leave it as they found it."""
    started_mock.engine.forget()
    return started_mock


@pytest.fixture(scope="session")
def engine(socket_directory: Path) -> Iterator[RealEngine]:
    """The real engine with the embedded model, for both frontends: it takes any number of links."""
    directory = socket_directory / "engine"
    directory.mkdir()
    started = RealEngine(directory)
    yield started
    started.close()


@pytest.fixture(scope="session")
def started_server(kind: str, engine: RealEngine) -> Iterator[RealServer]:
    """A frontend on the shared engine; tests take it as `server`."""
    started = RealServer(kind, engine)
    try:
        started.frontend.wait_ready(ENGINE_START_SECONDS)
        yield started
    finally:
        started.close()


@pytest.fixture
def server(started_server: RealServer) -> Iterator[RealServer]:
    """The shared server as it started: weights of the embedded model, not paused, no request open."""
    yield started_server
    started_server.frontend.post("/resume")
    started_server.frontend.post("/abort_requests")


@pytest.fixture
def restored(server: RealServer) -> Iterator[RealServer]:
    """The shared server; afterwards the weights of the start are back under the label ``default``."""
    yield server
    server.frontend.post("/wake_up")
    server.frontend.post("/abort_weight_update")
    server.update("rl", "default")


@pytest.fixture(scope="session")
def engines(socket_directory: Path) -> Iterator[RealSet]:
    """Two real engines of one set, for both frontends."""
    directory = socket_directory / "set"
    directory.mkdir()
    started = RealSet(directory)
    yield started
    started.close()


@pytest.fixture(scope="module")
def started_set(kind: str, engines: RealSet) -> Iterator[SetServer]:
    """A frontend on both engines; tests take it as `server_set`."""
    started = SetServer(kind, engines)
    try:
        started.frontend.wait_ready(ENGINE_START_SECONDS)
        yield started
    finally:
        started.close()


@pytest.fixture
def server_set(started_set: SetServer) -> Iterator[SetServer]:
    """The shared set; afterwards both engines have the weights of the start under the label ``default``."""
    yield started_set
    started_set.frontend.post("/abort_weight_update")
    started_set.update("rl", "default")
    started_set.frontend.post("/resume")
    started_set.frontend.post("/abort_requests")
