"""Frontends on scripted engines."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
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


class MockedSet:
    """Scripted engines of one set, and the frontend in front of them. ``commits`` are in force at first (default 0)."""

    def __init__(self, kind: str, directory: Path, size: int, *flags: str, commits: Sequence[int] = ()) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=directory))
        self.engines = [MockEngine(self.directory / f"{index}.sock") for index in range(size)]
        try:
            self.frontend = FrontendProcess(kind, [engine.path for engine in self.engines], *flags)
        except BaseException:
            self._close_engines()
            raise
        for index, engine in enumerate(self.engines):
            engine.accept(hello_with(engine_index=index, weight_commit=commits[index] if commits else 0))
        self.frontend.wait_ready()

    def restart(self, index: int, **hello: Any) -> None:
        """Puts a new engine in the place of one that was closed, and greets the frontend."""
        path = self.engines[index].path
        path.unlink()
        self.engines[index] = MockEngine(path)
        self.engines[index].accept(hello_with(engine_index=index, **hello))

    def forget(self) -> None:
        """Drops what the engines have received and nobody asked for."""
        for engine in self.engines:
            engine.forget()

    def expect(self, method: str, args: list[Any], results: Sequence[Any] = (None, None)) -> None:
        """Each engine gets this call, and answers with its result; a tuple is a refusal: (message, reason)."""
        for engine, result in zip(self.engines, results, strict=True):
            call = engine.next_call(method)
            assert call.args == args
            if isinstance(result, tuple):
                engine.refuse(call, *result)
            else:
                engine.reply(call, result)

    def close(self) -> None:
        """Ends everything."""
        self.frontend.close()
        self._close_engines()

    def _close_engines(self) -> None:
        for engine in self.engines:
            engine.close()


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
