"""Runs one engine and one frontend together: both start at once, and neither outlives the other or this process.

Threads only read the children's output and wait for their ends; every decision is taken in :meth:`Supervisor.run`, from
one queue of events.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from rollspan.launcher import EngineProcess, stop_process

OPEN_REQUESTS_SECONDS = 1.0
"""What the frontend gets to tell its open requests that the engine is dead."""
CAUSE_SECONDS = 5.0
"""What an engine that has told its frontend that it cannot start gets to end, so that it is named as the cause."""
STOP_SECONDS = 5.0
SAME_SIGNAL_SECONDS = 0.5
"""Signals this close together are one request to stop: programs that stop a whole group send two."""
LAST_OUTPUT_SECONDS = 0.5
"""How long a dead child's stderr is read on, in case that a process of its own keeps the pipe open."""

LAST_WORDS = re.compile(r"(?:[\w. -]+: )?error: (?P<said>.*)|rollspan[\w -]*: (?P<told>.*)")
"""How a child says why it ends. Log lines begin otherwise."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Report = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Event:
    """Something that happened: ``kind`` is ``exit``, ``signal`` or the ``event`` of a JSON line of a child."""

    kind: str
    source: str
    data: Mapping[str, Any] = field(default_factory=dict)


Events = queue.SimpleQueue[Event]  # a signal handler may put into it at any moment, which SimpleQueue allows


@dataclass(frozen=True)
class Failure:
    """Why a server ended by itself, in one line, and the exit code that says so."""

    message: str
    exit_code: int = 1


class Child:
    """A child process whose stdout is a sequence of JSON events and whose stderr is the log.

    A line of stderr like ``error: ...`` or ``rollspan engine: ...`` is held back until the next one: when it is the
    last, it is the reason of the child's end, and it is reported as such instead of being shown twice.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], events: Events) -> None:
        self.name = name
        self.process = process
        self.last_line = ""
        self._events = events
        self._stdout = self._thread(self._read_events, process.stdout)
        self._stderr = self._thread(self._read_log, process.stderr)
        threading.Thread(target=self._await_end, name=f"{name} end", daemon=True).start()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def failure(self) -> Failure:
        """How the process ended, with the last line that it wrote to stderr; wrong usage of it is wrong usage of us."""
        code = self.process.returncode
        if code == -signal.SIGKILL:
            return Failure(f"the {self.name} was killed by SIGKILL (by a user, or for lack of memory)")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f": {self.last_line}" if self.last_line else ""
        return Failure(f"the {self.name} {how}{reason}", 2 if code == 2 else 1)

    def _thread(self, target: Callable[[IO[bytes]], None], stream: IO[bytes] | None) -> threading.Thread:
        thread = threading.Thread(target=target, args=(stream,), name=f"{self.name} output", daemon=True)
        thread.start()
        return thread

    def _read_events(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                try:
                    data = json.loads(line)
                except ValueError:
                    data = None
                if isinstance(data, dict) and isinstance(data.get("event"), str):
                    self._events.put(Event(data["event"], self.name, data))
                else:
                    _show(_text(line))

    def _read_log(self, stream: IO[bytes]) -> None:
        held = None
        with stream:
            for raw in stream:
                line = _text(raw)
                if held is not None:
                    _show(held)
                words = LAST_WORDS.fullmatch(line)
                held = line if words else None
                if held is None:
                    _show(line)
                self.last_line = (words["said"] or words["told"]) if words else line.strip() or self.last_line

    def _await_end(self) -> None:
        self.process.wait()
        self._stderr.join(LAST_OUTPUT_SECONDS)
        self._stdout.join(LAST_OUTPUT_SECONDS)
        self._events.put(Event("exit", self.name))


class Supervisor:
    """Starts both processes and watches them until a signal or the end of one of them.

    ``report`` is called with the frontend's events: ``{"event": "listening", "address": "HOST:PORT"}`` and ``{"event":
    "ready"}``.
    """

    def __init__(self, report: Report, *, shutdown_timeout: float) -> None:
        self._report = report
        self._shutdown_timeout = shutdown_timeout
        self._events: Events = queue.SimpleQueue()
        self._children: list[Child] = []
        self._listening = self._ready = False
        self._signalled_at = -math.inf

    def run(
        self, engine: Callable[[], EngineProcess], frontend: Callable[[], subprocess.Popen[bytes]]
    ) -> Failure | None:
        """Runs until the end; returns None after a graceful stop, else what went wrong.

        Raises:
            LaunchError: one of the two cannot be started; nothing is left running.
        """
        heeded = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not _ignored(number)]
        previous = {number: signal.signal(number, self._signalled) for number in heeded}
        try:
            self._children.append(Child("engine", engine().process, self._events))
            self._children.append(Child("frontend", frontend(), self._events))
            return self._watch()
        finally:
            for child in self._children:
                stop_process(child.process, 0)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        self._events.put(Event("signal", signal.Signals(number).name))

    def _watch(self) -> Failure | None:
        engine, frontend = self._children
        while True:
            event = self._events.get()
            if event.kind == "signal":
                self._signalled_at = time.monotonic()
                return self._stop(frontend, engine)
            if event.kind == "exit":
                failed = engine if event.source == engine.name else frontend
                return self._fail(failed)
            self._listening = self._listening or event.kind == "listening"
            self._ready = self._ready or event.kind == "ready"
            self._report(event.data)

    def _stop(self, frontend: Child, engine: Child) -> Failure | None:
        """The frontend first, which lets open requests end, then the engine; another signal ends both at once."""
        for child, seconds in ((frontend, self._shutdown_timeout + STOP_SECONDS), (engine, STOP_SECONDS)):
            child.process.terminate()
            if not self._await_exit(child, seconds):
                return Failure(f"stopped by force: the {child.name} had not ended")
        return None

    def _fail(self, failed: Child) -> Failure:
        """Ends the other process too; the frontend may first tell its open requests that the engine is dead."""
        engine, frontend = self._children
        other = frontend if failed is engine else engine
        if failed is engine and self._ready:
            self._await_exit(frontend, OPEN_REQUESTS_SECONDS)
        if failed is frontend and self._listening and not self._ready and self._await_exit(engine, CAUSE_SECONDS):
            failed = engine
        other.process.terminate()
        self._await_exit(other, STOP_SECONDS)
        return failed.failure

    def _await_exit(self, child: Child, seconds: float) -> bool:
        """Whether ``child`` ended within ``seconds`` and before a signal asked for a quick end."""
        deadline = time.monotonic() + seconds
        while child.running:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if event.kind == "signal" and time.monotonic() - self._signalled_at > SAME_SIGNAL_SECONDS:
                return False
        return True


def _ignored(number: signal.Signals) -> bool:
    """Whether whoever started us had this signal ignored, as ``nohup`` does with SIGHUP."""
    return signal.getsignal(number) is signal.SIG_IGN


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r\n")


def _show(line: str) -> None:
    """Passes a line on to stderr. Nobody reading it is no reason to stop draining the child's pipe."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
