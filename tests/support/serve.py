"""``rollspan serve`` as a process, for tests of how it starts and ends."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

END_SECONDS = 10.0


class Serve:
    """A running ``rollspan serve`` and the processes below it, with a temporary directory of their own.

    ``command`` starts the ``rollspan`` command; ``environment`` is all that it gets besides that directory.
    """

    def __init__(
        self, temporary: Path, command: Sequence[str], environment: Mapping[str, str], arguments: Sequence[str]
    ) -> None:
        environment = {**environment, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        environment.pop("XDG_RUNTIME_DIR", None)
        self.errors = temporary / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, "serve", *arguments, "--events"],
                env=environment,
                cwd=temporary,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.url = ""
        self.engines: list[int] = []
        self.frontend = 0
        self.spool: Path | None = None

    def wait_until_ready(self) -> None:
        """Reads events until the server is ready, and finds its processes."""
        self.url = self.wait_for("ready")["url"]
        self.find_processes()

    def wait_for(self, name: str) -> dict[str, Any]:
        """Reads events up to the next one of this name."""
        assert self.process.stdout is not None
        event: dict[str, Any] = {}
        while event.get("event") != name:
            line = self.process.stdout.readline()
            assert line, self.errors.read_text()
            event = json.loads(line)
        return event

    def find_processes(self) -> None:
        """Finds the engines, by index, and the frontend."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
        engines = (pid for pid, command in commands.items() if "rollspan.engine" in command)
        self.engines = sorted(engines, key=lambda pid: re.findall(r"engine-(\d+)\.sock", commands[pid]))
        (self.frontend,) = (pid for pid, command in commands.items() if "--engine" in command.split("\0"))
        words = commands[self.frontend].split("\0")
        self.spool = Path(words[words.index("--weights-spool") + 1])

    @property
    def engine(self) -> int:
        """The only engine."""
        (pid,) = self.engines
        return pid

    def end(self) -> tuple[int, list[str]]:
        """Waits for the launcher's end; returns its exit code and the lines of stderr that are its own."""
        code = self.process.wait(END_SECONDS)
        return code, [line for line in self.errors.read_text().splitlines() if line.startswith("rollspan: ")]

    def close(self) -> None:
        """Ends everything."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
