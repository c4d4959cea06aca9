"""Real engines and frontends as processes, for tests that need the whole way of a request."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rollspan.config import EngineConfig
from rollspan.launcher import (
    EngineProcess,
    binary_places,
    engine_environment,
    find_http_binary,
    start_engine,
    start_process,
    stop_process,
)

FRONTENDS = ["python"] if os.environ.get("ROLLSPAN_PURE_PYTHON") == "1" else ["rust", "python"]
"""Frontends under test. A missing binary is a failure, unless the environment says that there is none on purpose."""

STOP_SECONDS = 5.0


def frontend_command(kind: str) -> list[str]:
    """Command of the ``rust`` or ``python`` frontend, without flags; a debug build wins over an installed binary."""
    if kind == "python":
        return [sys.executable, "-m", "rollspan.frontend"]
    target = os.environ.get("CARGO_TARGET_DIR")
    built = [Path(target) / "debug" / "rollspan-http"] if target and "ROLLSPAN_HTTP_BINARY" not in os.environ else []
    binary = next((path for path in built if path.is_file()), None) or find_http_binary()
    if binary is None:
        places = ", ".join(str(path) for path in [*built, *binary_places()])
        raise AssertionError(f"rollspan-http is not built (ROLLSPAN_PURE_PYTHON=1 tests without it): {places}")
    return [str(binary)]


class Server:
    """One engine, and the frontends in front of it, which start when a test first asks for one."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self.engine: EngineProcess = start_engine(config, directory, {"OMP_NUM_THREADS": "1"})
        self.config = config
        self._environment = engine_environment(config)
        self._flags = ["--weight-update-timeout", f"{config.weight_update_timeout:g}"]
        if config.weights_spool is not None:
            self._flags += ["--weights-spool", config.weights_spool]
        self._frontends: dict[str, Frontend] = {}

    def frontend(self, kind: str) -> Frontend:
        """The frontend of this kind, ready to serve."""
        if kind not in self._frontends:
            self._frontends[kind] = Frontend(kind, self.engine.socket_path, self._environment, *self._flags)
        return self._frontends[kind]

    def close(self) -> None:
        """Ends all processes."""
        for frontend in self._frontends.values():
            frontend.close()
        self.engine.stop(STOP_SECONDS)


class Frontend:
    """A frontend process; ``url`` is where it serves. Constructing it waits until it is ready."""

    def __init__(self, kind: str, engine_socket: Path, environment: dict[str, str], *flags: str) -> None:
        command = [*frontend_command(kind), "--engine", str(engine_socket), "--port", "0", "--watch-stdin", *flags]
        read_end, write_end = os.pipe()
        self.process = start_process(command, environment, stdout=write_end)
        os.close(write_end)
        with os.fdopen(read_end) as lines:
            events = {}
            for line in lines:
                event = json.loads(line)
                events[event["event"]] = event
                if "ready" in events:
                    break
        assert "ready" in events, f"the {kind} frontend ended before it was ready"
        self.url = f"http://{events['listening']['address']}"

    def close(self) -> None:
        """Ends the process."""
        stop_process(self.process, STOP_SECONDS)
