"""The supervisor over stand-ins for the engine and the frontend: small scripts that say and do what a test needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollspan import supervisor
from rollspan.launcher import EngineProcess, LaunchError, start_process
from rollspan.supervisor import OPEN_REQUESTS_SECONDS, Supervisor

PRELUDE = """
import json, os, signal, sys
def event(**data): print(json.dumps(data), flush=True)
def on_term(action): signal.signal(signal.SIGTERM, action)
def end_politely(name): on_term(lambda *_: (open(sys.argv[2], "a").write(name + " "), sys.exit(0)))
def engine_is_up(): open(sys.argv[1], "w").close()
def await_engine(): open(sys.argv[1]).close()
"""
SERVING_ENGINE = "end_politely('engine'); engine_is_up(); signal.pause()"
SERVING_FRONTEND = """
end_politely("frontend")
await_engine()
event(event="listening", address="127.0.0.1:1234"); event(event="ready"); signal.pause()
"""


class Pair:
    """Two scripts under one supervisor, and what it reported."""

    def __init__(self, directory: Path) -> None:
        self._meeting = directory / "engine-is-up"
        os.mkfifo(self._meeting)
        self.log = directory / "log"
        self.engine: subprocess.Popen[bytes] | None = None
        self.frontend: subprocess.Popen[bytes] | None = None
        self.reported: list[Mapping[str, Any]] = []
        self.on_ready: Callable[[], None] = lambda: None

    def run(self, engine: str, frontend: str) -> Any:
        return Supervisor(self._report, shutdown_timeout=1.0).run(
            [partial(self._start_engine, engine)], partial(self._start_frontend, frontend)
        )

    def _report(self, event: Mapping[str, Any]) -> None:
        self.reported.append(event)
        if event["event"] == "ready":
            self.on_ready()

    def _start_engine(self, script: str) -> EngineProcess:
        self.engine = self._start(script)
        return EngineProcess(self.engine, Path("/nowhere"))

    def _start_frontend(self, script: str) -> subprocess.Popen[bytes]:
        self.frontend = self._start(script)
        return self.frontend

    def _start(self, script: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PRELUDE + script, str(self._meeting), str(self.log)]
        return start_process(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def assert_nothing_runs(self) -> None:
        for process in (self.engine, self.frontend):
            assert process is not None
            with pytest.raises(ProcessLookupError):
                os.kill(process.pid, 0)


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Whoever runs the tests may have had them ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def signal_myself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_frontend_and_then_the_engine(pair: Pair, number: int) -> None:
    pair.on_ready = signal_myself(number)
    assert pair.run(SERVING_ENGINE, SERVING_FRONTEND) is None
    assert pair.log.read_text() == "frontend engine "
    pair.assert_nothing_runs()


def test_a_second_signal_ends_both_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SAME_SIGNAL_SECONDS", 0.0)
    pair.on_ready = signal_myself(signal.SIGINT)
    signals_back = "on_term(lambda *_: os.kill(os.getppid(), signal.SIGINT))\n"
    began = time.monotonic()
    failure = pair.run(
        "on_term(signal.SIG_IGN); engine_is_up(); signal.pause()",
        signals_back + 'await_engine(); event(event="ready")\nwhile True: signal.pause()',
    )
    assert failure.message == "stopped by force: the frontend had not ended"
    assert time.monotonic() - began < 5
    pair.assert_nothing_runs()


def test_a_signal_that_arrives_twice_at_once_is_one(pair: Pair) -> None:
    def send_two() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    pair.on_ready = send_two
    assert pair.run(SERVING_ENGINE, SERVING_FRONTEND) is None
    assert pair.log.read_text() == "frontend engine "


def test_a_killed_engine_ends_the_frontend_a_second_later(pair: Pair) -> None:
    pair.on_ready = lambda: os.kill(pair.engine.pid, signal.SIGKILL)  # type: ignore[union-attr]
    began = time.monotonic()
    failure = pair.run(SERVING_ENGINE, SERVING_FRONTEND)
    assert OPEN_REQUESTS_SECONDS <= time.monotonic() - began < OPEN_REQUESTS_SECONDS + 4
    assert failure.message == "the engine was killed by SIGKILL (by a user, or for lack of memory)"
    assert failure.exit_code == 1
    pair.assert_nothing_runs()


def test_a_killed_frontend_ends_the_engine(pair: Pair) -> None:
    pair.on_ready = lambda: os.kill(pair.frontend.pid, signal.SIGTERM)  # type: ignore[union-attr]
    failure = pair.run(SERVING_ENGINE, SERVING_FRONTEND.replace("end_politely", "str"))
    assert failure.message == "the frontend was killed by SIGTERM"
    pair.assert_nothing_runs()


def test_an_engine_that_cannot_start_is_reported_once_with_its_reason(
    pair: Pair, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = pair.run("sys.exit('rollspan engine: no config.json in /models/x')", SERVING_FRONTEND)
    assert failure.message == "the engine ended with exit code 1: no config.json in /models/x"
    assert "config.json" not in capfd.readouterr().err
    pair.assert_nothing_runs()


def test_an_engine_that_cannot_start_is_the_cause_even_when_the_frontend_ends_first(pair: Pair) -> None:
    """The frontend hears of it over the link, while the engine is still tidying up."""
    failure = pair.run(
        "open(sys.argv[1]).read(); sys.exit('error: no room')",
        "until_my_end = open(sys.argv[1], 'w'); event(event='listening', address='127.0.0.1:1234'); sys.exit(1)",
    )
    assert failure.message == "the engine ended with exit code 1: no room"


def test_a_crash_shows_the_whole_traceback_and_its_last_line_is_the_reason(
    pair: Pair, capfd: pytest.CaptureFixture[str]
) -> None:
    failure = pair.run("def step(): raise ValueError('no room')\nstep()", SERVING_FRONTEND)
    assert failure.message == "the engine ended with exit code 1: ValueError: no room"
    assert "Traceback" in capfd.readouterr().err


def test_a_taken_port_is_reported_and_the_engine_ended(pair: Pair) -> None:
    failure = pair.run(SERVING_ENGINE, "sys.exit('error: cannot listen on 127.0.0.1:80: address in use')")
    assert failure.message == "the frontend ended with exit code 1: cannot listen on 127.0.0.1:80: address in use"
    assert failure.exit_code == 1
    pair.assert_nothing_runs()


def test_wrong_usage_of_the_frontend_keeps_its_exit_code(pair: Pair) -> None:
    failure = pair.run(SERVING_ENGINE, "print('error: --port 70000', file=sys.stderr); sys.exit(2)")
    assert failure.message.endswith("--port 70000")
    assert failure.exit_code == 2


def test_a_frontend_that_cannot_be_started_leaves_no_engine(pair: Pair) -> None:
    starting = Supervisor(pair.reported.append, shutdown_timeout=1.0)
    with pytest.raises(LaunchError, match="cannot start /no/such/program: No such file or directory"):
        starting.run([partial(pair._start_engine, SERVING_ENGINE)], lambda: start_process(["/no/such/program"]))
    assert pair.engine is not None
    assert pair.engine.returncode is not None


def test_events_are_reported_in_order(pair: Pair) -> None:
    pair.on_ready = signal_myself(signal.SIGTERM)
    pair.run(SERVING_ENGINE, SERVING_FRONTEND)
    assert pair.reported == [{"event": "listening", "address": "127.0.0.1:1234"}, {"event": "ready"}]


def test_log_lines_are_passed_on_as_they_come(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    pair.on_ready = signal_myself(signal.SIGTERM)
    logging = "print('INFO loading', file=sys.stderr)\nprint('error: odd, but going on', file=sys.stderr)\n"
    pair.run(logging + "print('INFO loaded', file=sys.stderr)\n" + SERVING_ENGINE, SERVING_FRONTEND)
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["INFO loading", "error: odd, but going on", "INFO loaded"]


def test_a_hangup_that_nohup_has_ignored_stays_ignored(pair: Pair) -> None:
    def hang_up_and_then_fail() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        assert pair.engine is not None
        os.kill(pair.engine.pid, signal.SIGKILL)

    pair.on_ready = hang_up_and_then_fail
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert pair.run(SERVING_ENGINE, SERVING_FRONTEND) is not None


def test_the_previous_signal_handlers_are_put_back(pair: Pair) -> None:
    before = signal.getsignal(signal.SIGTERM)
    pair.on_ready = signal_myself(signal.SIGTERM)
    pair.run(SERVING_ENGINE, SERVING_FRONTEND)
    assert signal.getsignal(signal.SIGTERM) is before


class Trio(Pair):
    """Two engines and a frontend; engine 1 runs a script of its own, the last of several from then on."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.second: list[subprocess.Popen[bytes]] = []

    def run_set(self, second: list[str], first: str = SERVING_ENGINE, frontend: str = SERVING_FRONTEND) -> Any:
        def start_second() -> EngineProcess:
            self.second.append(self._start(second[min(len(self.second), len(second) - 1)]))
            return EngineProcess(self.second[-1], Path("/nowhere"))

        supervised = Supervisor(self._report, shutdown_timeout=1.0)
        return supervised.run(
            [partial(self._start_engine, first), start_second], partial(self._start_frontend, frontend)
        )

    def assert_nothing_runs(self) -> None:
        super().assert_nothing_runs()
        for process in self.second:
            assert process.returncode is not None


STEADY = "end_politely('second'); signal.pause()"


@pytest.fixture
def trio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trio:
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (0.01, 0.02))
    return Trio(tmp_path)


def test_of_several_engines_one_that_ends_is_started_again(trio: Trio) -> None:
    def heed(event: Mapping[str, Any]) -> None:
        if event["event"] == "ready":
            trio.second[0].kill()
        elif event["event"] == "engine_started" and len(trio.second) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    report = trio._report
    trio._report = lambda event: (report(event), heed(event))[0]  # type: ignore[method-assign]
    assert trio.run_set([STEADY, "sys.exit('error: no room')", STEADY]) is None
    killed = "engine 1 was killed by SIGKILL (by a user, or for lack of memory)"
    failed = "engine 1 ended with exit code 1: no room"
    assert trio.reported[2:] == [
        {"event": "engine_ended", "engine_index": 1, "message": killed, "restart_seconds": 0.01},
        {"event": "engine_started", "engine_index": 1},
        {"event": "engine_ended", "engine_index": 1, "message": failed, "restart_seconds": 0.02},
        {"event": "engine_started", "engine_index": 1},
    ]
    assert trio.log.read_text().split()[0] == "frontend"
    trio.assert_nothing_runs()


def test_an_engine_that_ran_well_and_cannot_be_started_again_is_tried_less_and_less_often(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (0.01, 0.02, 0.03))
    monkeypatch.setattr(supervisor, "STEADY_SECONDS", 0.0)
    start = trio._start

    def start_once(script: str) -> Any:
        if script == STEADY and trio.second:
            raise LaunchError("cannot start it")
        return start(script)

    def heed(event: Mapping[str, Any]) -> None:
        if event["event"] == "ready":
            trio.second[0].kill()
        elif event["event"] == "engine_ended" and event["restart_seconds"] == 0.03:
            os.kill(os.getpid(), signal.SIGTERM)

    report = trio._report
    trio._start = start_once  # type: ignore[method-assign]
    trio._report = lambda event: (report(event), heed(event))[0]  # type: ignore[method-assign]
    assert trio.run_set([STEADY]) is None
    ended = [event for event in trio.reported if event["event"] == "engine_ended"]
    assert [event["restart_seconds"] for event in ended] == [0.01, 0.02, 0.03]
    assert {event["message"] for event in ended[1:]} == {"cannot start it"}
    trio.assert_nothing_runs()


def test_an_engine_of_several_that_cannot_start_ends_all(trio: Trio) -> None:
    frontend = "end_politely('frontend'); event(event='listening', address='127.0.0.1:1234'); signal.pause()"
    failure = trio.run_set(["await_engine(); sys.exit('error: no room')"], frontend=frontend)
    assert failure.message == "engine 1 ended with exit code 1: no room"
    trio.assert_nothing_runs()


def test_a_signal_while_an_engine_waits_for_its_restart_stops_all(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_SECONDS", (60.0,))

    def heed(event: Mapping[str, Any]) -> None:
        if event["event"] == "ready":
            trio.second[0].kill()
        elif event["event"] == "engine_ended":
            os.kill(os.getpid(), signal.SIGTERM)

    report = trio._report
    trio._report = lambda event: (report(event), heed(event))[0]  # type: ignore[method-assign]
    assert trio.run_set([STEADY]) is None
    trio.assert_nothing_runs()
