"""Frontends on scripted engines."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from frontend_process import FrontendProcess
from mock_engine import MockEngine, hello_with

ENGINE_START_SECONDS = 100.0
"""The engine imports torch, which takes its time on a busy machine."""
FRONTENDS = ["python"] if os.environ.get("ROLLSPAN_PURE_PYTHON") == "1" else ["rust", "python"]


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
