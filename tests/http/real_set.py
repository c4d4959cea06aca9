"""Two real engines of one set with the embedded model, and a frontend on both."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from frontend_process import FrontendProcess
from real_server import Checkpoints

from rollspan.config import EngineConfig
from rollspan.launcher import EngineProcess, start_engine

SIZE = 2


class RealSet:
    """Engine processes that share weights and spool; `kill` and `start` play the supervisor."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoints = Checkpoints(directory)
        self.processes: list[EngineProcess] = []
        for index in range(SIZE):
            self.processes.append(self._start(index))

    def kill(self, index: int) -> None:
        """An engine is gone from one moment to the next."""
        self.processes[index].process.send_signal(signal.SIGKILL)
        self.processes[index].process.wait()

    def start(self, index: int) -> None:
        """Starts it again; does not wait."""
        self.processes[index].stop(0)
        self.processes[index] = self._start(index)

    def _start(self, index: int) -> EngineProcess:
        config: dict[str, Any] = {**self.checkpoints.config, "engine_index": index, "num_engines": SIZE}
        return start_engine(EngineConfig(**config), self.directory)

    def close(self) -> None:
        """Ends all processes."""
        for process in self.processes:
            process.stop()


class SetServer:
    """A frontend on a set of real engines."""

    def __init__(self, kind: str, engines: RealSet) -> None:
        self.engines = engines
        sockets = [process.socket_path for process in engines.processes]
        self.frontend = FrontendProcess(kind, sockets, "--weights-spool", str(engines.checkpoints.spool))

    def history(self) -> dict[str, Any]:
        """What /weight_history answers."""
        return dict(self.frontend.get("/weight_history").json())

    def states(self) -> list[str]:
        """State of each engine."""
        return [record["state"] for record in self.history()["engines"]]

    def update(self, path: str, label: str | None = None) -> dict[str, Any]:
        """A whole weight update of the set."""
        for step, body in (("start_weight_update", None), ("update_weights", {"update_info": {"path": path}})):
            answer = self.frontend.post(f"/{step}", body)
            assert answer.status_code == 200, answer.text
        answer = self.frontend.post("/finish_weight_update", None if label is None else {"weight_version": label})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def close(self) -> None:
        """Ends the frontend."""
        self.frontend.close()
