"""Runs engines and one frontend together: all start at once, and none outlives the frontend or this process.

A single engine that ends takes the server with it. Of several, one that ends once the server is ready is started again.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from rollspan.launcher import EngineProcess, LaunchError, stop_process

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

RESTART_SECONDS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits before an engine is started again: for the first time, the second ..., the last one for all later times."""
STEADY_SECONDS = 300.0
"""An engine that has run for so long has recovered: its next restart is a first one."""

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
        self.started = time.monotonic()
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
            return Failure(f"{self.name} was killed by SIGKILL (by a user, or for lack of memory)")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f": {self.last_line}" if self.last_line else ""
        return Failure(f"{self.name} {how}{reason}", 2 if code == 2 else 1)

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


@dataclass
class Place:
    """One engine of the set: how to start it, who runs there, how often it was started again, and when it will be."""

    start: Callable[[], EngineProcess]
    child: Child
    restarts: int = 0
    due: float | None = None


class Supervisor:
    """Starts all processes and watches them until a signal, or the end of one that the server cannot do without.

    ``report`` is called with the frontend's events, ``{"event": "listening", "address": "HOST:PORT"}`` and ``{"event":
    "ready"}``, and with those of engines that are started again: ``{"event": "engine_ended", "engine_index": int,
    "message": str, "restart_seconds": float}`` and ``{"event": "engine_started", "engine_index": int}``.
    """

    def __init__(self, report: Report, *, shutdown_timeout: float) -> None:
        self._report = report
        self._shutdown_timeout = shutdown_timeout
        self._events: Events = queue.SimpleQueue()
        self._places: list[Place] = []
        self._frontend: Child | None = None
        self._listening = self._ready = False
        self._signalled_at = -math.inf

    def run(
        self, engines: Sequence[Callable[[], EngineProcess]], frontend: Callable[[], subprocess.Popen[bytes]]
    ) -> Failure | None:
        """Runs until the end; returns None after a graceful stop, else what went wrong.

        Raises:
            LaunchError: one of them cannot be started; nothing is left running.
        """
        heeded = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not _ignored(number)]
        previous = {number: signal.signal(number, self._signalled) for number in heeded}
        try:
            for index, start in enumerate(engines):
                name = f"engine {index}" if len(engines) > 1 else "the engine"
                self._places.append(Place(start, Child(name, start().process, self._events)))
            self._frontend = Child("the frontend", frontend(), self._events)
            return self._watch(self._frontend)
        finally:
            for child in self._children:
                stop_process(child.process, 0)
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def _children(self) -> list[Child]:
        """The frontend first."""
        engines = [place.child for place in self._places]
        return engines if self._frontend is None else [self._frontend, *engines]

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        self._events.put(Event("signal", signal.Signals(number).name))

    def _watch(self, frontend: Child) -> Failure | None:
        while True:
            event = self._next_event()
            if event is None:
                self._restart()
                continue
            if event.kind == "signal":
                self._signalled_at = time.monotonic()
                return self._stop()
            if event.kind == "exit":
                ended = next(child for child in self._children if child.name == event.source)
                place = next((place for place in self._places if place.child is ended), None)
                if place is None or len(self._places) == 1 or not self._ready:
                    return self._fail(ended, frontend)
                if time.monotonic() - ended.started > STEADY_SECONDS:
                    place.restarts = 0
                self._plan_restart(place, ended.failure.message)
                continue
            self._listening = self._listening or event.kind == "listening"
            self._ready = self._ready or event.kind == "ready"
            self._report(event.data)

    def _next_event(self) -> Event | None:
        """The next event; None when an engine is due to be started again."""
        due = min((place.due for place in self._places if place.due is not None), default=None)
        try:
            return self._events.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        except queue.Empty:
            return None

    def _plan_restart(self, place: Place, message: str) -> None:
        seconds = RESTART_SECONDS[min(place.restarts, len(RESTART_SECONDS) - 1)]
        place.restarts += 1
        place.due = time.monotonic() + seconds
        ended = {"engine_index": self._places.index(place), "message": message, "restart_seconds": seconds}
        self._report({"event": "engine_ended", **ended})

    def _restart(self) -> None:
        """Starts again what is due; what cannot be started is tried later, like what ends at once."""
        now = time.monotonic()
        for index, place in enumerate(self._places):
            if place.due is None or place.due > now:
                continue
            place.due = None
            stop_process(place.child.process, 0)  # it has ended; its pipe has not
            try:
                process = place.start().process
            except LaunchError as error:
                self._plan_restart(place, str(error))
                continue
            place.child = Child(place.child.name, process, self._events)
            self._report({"event": "engine_started", "engine_index": index})

    def _stop(self) -> Failure | None:
        """The frontend first, which lets open requests end, then the engines; another signal ends all at once."""
        frontend, *engines = self._children
        for children, seconds in (([frontend], self._shutdown_timeout + STOP_SECONDS), (engines, STOP_SECONDS)):
            for child in children:
                child.process.terminate()
            for child in children:
                if not self._await_exit(child, seconds):
                    return Failure(f"stopped by force: {child.name} had not ended")
        return None

    def _fail(self, failed: Child, frontend: Child) -> Failure:
        """Ends the other processes too; the frontend may first tell its open requests that the engine is dead."""
        engines = [place.child for place in self._places]
        if failed in engines and self._ready:
            self._await_exit(frontend, OPEN_REQUESTS_SECONDS)
        if failed is frontend and self._listening and not self._ready:
            failed = self._dead_engine(engines, CAUSE_SECONDS) or failed
        others = [child for child in self._children if child is not failed]
        for child in others:
            child.process.terminate()
        for child in others:
            self._await_exit(child, STOP_SECONDS)
        return failed.failure

    def _dead_engine(self, engines: Sequence[Child], seconds: float) -> Child | None:
        """The engine that ends within ``seconds``, where one does: then the frontend has heard of it first."""
        deadline = time.monotonic() + seconds
        while all(child.running for child in engines):
            if not self._await_event(deadline):
                return None
        return next(child for child in engines if not child.running)

    def _await_exit(self, child: Child, seconds: float) -> bool:
        """Whether ``child`` ended within ``seconds`` and before a signal asked for a quick end."""
        deadline = time.monotonic() + seconds
        while child.running:
            if not self._await_event(deadline):
                return False
        return True

    def _await_event(self, deadline: float) -> bool:
        """Whether something happened before the deadline that is no signal to end quickly."""
        try:
            event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return False
        return event.kind != "signal" or time.monotonic() - self._signalled_at <= SAME_SIGNAL_SECONDS


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
