"""One engine of a comparison: a long-lived process of its own, spoken to in the JSON lines of ``peers/host.py``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HOST = Path(__file__).resolve().parent / "peers" / "host.py"
PEERS = {
    "transformers": "transformers_generate",
    "transformers-continuous": "transformers_continuous",
    "vllm": "vllm_llm",
}
"""Engine to compare with -> its file under ``peers/``."""
OURS = "rollspan"
_SECONDS_TO_END = 10.0
_TAIL_LINES = 12
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class SideError(Exception):
    """A side could not be started, refused what it was asked, or is gone; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a side is started with: its name, the file under ``peers/``, the interpreter, the environment."""

    name: str
    file: str
    python: str
    environment: Mapping[str, str]


def thread_environment(threads: int, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with all that makes a compute library use so many threads; the same for every side."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return {**base, **dict.fromkeys(names, str(threads)), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Side:
    """One engine in its process. Use as a context manager: leaving it ends the process and all that it started.

    While it is not asked anything it can be stopped with `rest`, so that an engine whose processes poll when idle costs
    the other side nothing.

    Args:
        program: what is run.
        load: the first object of ``peers/host.py``; it is sent at once, and `loaded` waits for the answer.

    Raises:
        SideError: the interpreter cannot be started.
    """

    def __init__(self, program: Program, load: Mapping[str, Any]) -> None:
        self.name = program.name
        self.facts: dict[str, Any] = {}
        self._program = program
        self._resting = False
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        try:
            self._process = subprocess.Popen(
                [program.python, str(HOST), program.file],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(program.environment),
                text=True,
                start_new_session=True,  # a Ctrl-C on the terminal is for the benchmark alone
            )
        except OSError as error:
            self._log.close()
            raise SideError(f"{self.name}: cannot start {program.python}: {error.strerror or error}") from None
        self._send({"op": "load", **load})

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def loaded(self) -> dict[str, Any]:
        """Waits until the model is loaded.

        Returns:
            ``{"facts": {...}, "seconds": S}``.

        Raises:
            SideError: the engine's package is missing, or it cannot load the model.
        """
        answer = self._receive()
        self.facts = answer["facts"]
        return answer

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one batch; adds ``cpu_seconds``, what all its processes used meanwhile, or None where it isn't known.

        Raises:
            SideError: the engine failed or died.
        """
        self.wake()
        self._send({"op": "collect"})
        self._receive()
        before = self._cpu_seconds()
        self._send(request)
        answer = self._receive()
        after = self._cpu_seconds()
        answer["cpu_seconds"] = None if before is None or after is None else after - before
        return answer

    def rest(self) -> None:
        """Stops all its processes until the next `ask`."""
        self._signal(signal.SIGSTOP)
        self._resting = True

    def wake(self) -> None:
        """Lets its processes run again."""
        if self._resting:
            self._signal(signal.SIGCONT)
            self._resting = False

    def close(self) -> None:
        """Ends the process, the rest of its session with it. May be called twice."""
        if self._log.closed:
            return
        self.wake()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a dead process is reported by what reads its answer
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            code = self._process.wait()
            ending = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise SideError(f"{self.name}: {self._program.python} {ending}{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(self._explained(str(answer["error"])))
        return answer

    def _explained(self, error: str) -> str:
        if error.startswith(("ModuleNotFoundError", "ImportError")):
            hint = f"give an interpreter that has it: --peer-python {self.name}=PATH"
            return f"{self.name}: {self._program.python}: {error}; {hint}"
        return f"{self.name}: {error}{self._tail()}"

    def _tail(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
        for pid, _ in self._members():  # those that made a process group of their own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _cpu_seconds(self) -> float | None:
        if sys.platform != "linux":
            return None
        return sum(seconds for _, seconds in self._members())

    def _members(self) -> list[tuple[int, float]]:
        """Process id and CPU seconds so far (10 ms steps) of each process in this side's session; Linux only."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
            try:
                fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(fields[3]) == self._process.pid:  # fields of proc(5) from the third on: 6 is the session
                found.append((int(stat.parent.name), (int(fields[11]) + int(fields[12])) / _TICKS))
        return found
