"""One suite for both frontends: every test here runs against ``rollspan-http`` and ``python -m rollspan.frontend``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frontend_process import FrontendProcess
from mock_engine import MockEngine, hello_with
from real_server import RealEngine, RealServer

ENGINE_START_SECONDS = 100.0
"""The engine imports torch, which takes its time on a busy machine."""
FRONTENDS = ["python"] if os.environ.get("ROLLSPAN_PURE_PYTHON") == "1" else ["rust", "python"]


@pytest.fixture(scope="session", params=FRONTENDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which frontend is under test."""
    return str(request.param)


@pytest.fixture(scope="session")
def socket_directory() -> Iterator[Path]:
    """A short path: Unix socket addresses hold about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="rsp-") as name:
        yield Path(name)


class Mocked:
    """A scripted engine and the frontend in front of it."""

    def __init__(self, engine: MockEngine, frontend: FrontendProcess) -> None:
        self.engine = engine
        self.frontend = frontend


class MockFactory:
    """Makes scripted engines with frontends, and cleans up after the test."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._made: list[Mocked] = []

    def start(self, *flags: str, accept: bool = True, **hello: Any) -> Mocked:
        """A frontend on a new scripted engine; with ``accept`` False the engine is still starting."""
        descriptor, name = tempfile.mkstemp(suffix=".sock", dir=self._directory)
        os.close(descriptor)
        Path(name).unlink()
        engine = MockEngine(Path(name))
        try:
            frontend = FrontendProcess(self._kind, engine.path, *flags)
        except BaseException:
            engine.close()
            raise
        made = Mocked(engine, frontend)
        self._made.append(made)
        if accept:
            engine.accept(hello_with(**hello))
            frontend.wait_ready()
        return made

    def close(self) -> None:
        """Ends everything that was started."""
        for made in self._made:
            made.frontend.close()
            made.engine.close()
        self._made.clear()


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
