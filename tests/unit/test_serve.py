"""``rollspan serve`` as real processes: how it starts, how it ends, and what it leaves behind, which is nothing."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollspan import models
from rollspan.launcher import start_process, stop_process
from support.serve import END_SECONDS, Serve
from support.servers import FRONTENDS, Frontend, frontend_command

pytestmark = pytest.mark.slow

GENERATE = "/inference/v1/generate"


class Starter:
    """Starts servers with a temporary directory of their own and checks that nothing is left in it."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self._running: list[Serve] = []

    def __call__(self, kind: str, *arguments: str) -> Serve:
        environment = dict(os.environ)
        if kind == "rust":
            environment["ROLLSPAN_HTTP_BINARY"] = frontend_command("rust")[0]
        command = [sys.executable, "-m", "rollspan.cli"]
        self._running.append(Serve(self.temporary, command, environment, [*arguments, "--frontend", kind]))
        return self._running[-1]

    def assert_nothing_is_left(self) -> None:
        assert list(self.temporary.glob("rollspan-*")) == []
        assert not any(server.spool is not None and server.spool.exists() for server in self._running)

    def close(self) -> None:
        for server in self._running:
            server.close()


@pytest.fixture
def start() -> Iterator[Starter]:
    temporary = Path(tempfile.mkdtemp(prefix="rs-"))
    starter = Starter(temporary)
    yield starter
    starter.close()
    shutil.rmtree(temporary)


class Watched:
    """A process that may not be our child: a handle on it tells when it ends."""

    def __init__(self, pid: int) -> None:
        self._handle = os.pidfd_open(pid)

    def ends_within(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._handle], [], [], seconds)
        os.close(self._handle)
        return bool(readable)


def stream_events(lines: Iterator[str]) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in lines if line.startswith("data: "))


LONG_REQUEST = {
    "token_ids": [1, 2, 3],
    "stream": True,
    "sampling_params": {"max_tokens": 1000, "ignore_eos": True},
}


@pytest.mark.parametrize("kind", FRONTENDS)
def test_an_engine_killed_in_mid_stream_ends_the_request_and_the_server(start: Starter, kind: str) -> None:
    server = start(kind, "--port", "0")
    server.wait_until_ready()
    engine, frontend = Watched(server.engine), Watched(server.frontend)
    with httpx.stream("POST", server.url + GENERATE, json=LONG_REQUEST, timeout=END_SECONDS) as response:
        events = stream_events(response.iter_lines())
        assert "choices" in json.loads(next(events))
        os.kill(server.engine, signal.SIGKILL)
        killed = time.monotonic()
        *_, error, done = events
        assert time.monotonic() - killed < 2
    assert json.loads(error)["error"]["reason"] == "engine_dead"
    assert done == "[DONE]"
    code, lines = server.end()
    assert code == 1
    assert lines[-1] == "rollspan: error: the engine was killed by SIGKILL (by a user, or for lack of memory)"
    assert engine.ends_within(0)
    assert frontend.ends_within(0)
    start.assert_nothing_is_left()


@pytest.mark.parametrize("kind", FRONTENDS)
def test_of_two_engines_one_that_is_killed_is_started_again(start: Starter, kind: str) -> None:
    weights = Path(tempfile.mkdtemp(dir=start.temporary))
    shutil.copy(models.path() / "model.safetensors", weights)
    server = start(kind, "--port", "0", "--data-parallel-size", "2", "--weights-root", str(weights))
    server.wait_until_ready()
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "ignore_eos": True}}

    def served_by(client: httpx.Client) -> int:
        return int(client.post(GENERATE, json=body).raise_for_status().json()["engine_index"])

    with httpx.Client(base_url=server.url, timeout=END_SECONDS) as client:
        assert {served_by(client) for _ in range(2)} == {0, 1}
        os.kill(server.engines[1], signal.SIGKILL)
        ended = server.wait_for("engine_ended")
        assert (ended["engine_index"], ended["restart_seconds"]) == (1, 1.0)
        assert ended["message"] == "engine 1 was killed by SIGKILL (by a user, or for lack of memory)"
        assert {served_by(client) for _ in range(3)} == {0}
        assert server.wait_for("engine_started")["engine_index"] == 1
        deadline = time.monotonic() + 100
        while [record["state"] for record in client.get("/weight_history").json()["engines"]] != ["ready", "ready"]:
            assert time.monotonic() < deadline
        updated = client.post("/update_weights", json={"weight_dir": "."}).raise_for_status().json()
        assert [outcome["result"]["weight_commit"] for outcome in updated["engines"]] == [1, 1]
        assert {served_by(client) for _ in range(2)} == {0, 1}
    server.find_processes()
    watched = [Watched(pid) for pid in (*server.engines, server.frontend)]
    assert len(watched) == 3
    server.process.send_signal(signal.SIGTERM)
    code, lines = server.end()
    assert (code, lines[-1]) == (0, "rollspan: stopped")
    assert all(process.ends_within(0) for process in watched)
    start.assert_nothing_is_left()


def test_a_killed_frontend_ends_the_server(start: Starter) -> None:
    server = start(FRONTENDS[0], "--port", "0")
    server.wait_until_ready()
    engine = Watched(server.engine)
    os.kill(server.frontend, signal.SIGKILL)
    code, lines = server.end()
    assert code == 1
    assert lines[-1] == "rollspan: error: the frontend was killed by SIGKILL (by a user, or for lack of memory)"
    assert engine.ends_within(0)
    start.assert_nothing_is_left()


@pytest.mark.parametrize("kind", FRONTENDS)
def test_a_killed_launcher_takes_both_with_it(start: Starter, kind: str) -> None:
    server = start(kind, "--port", "0")
    server.wait_until_ready()
    engine, frontend = Watched(server.engine), Watched(server.frontend)
    upload = httpx.put(f"{server.url}/weight_uploads/u/a.safetensors", content=b"x" * 1000, timeout=END_SECONDS)
    assert upload.status_code == 200
    assert server.spool is not None
    assert (server.spool / "u" / "a.safetensors").exists()
    server.process.kill()
    assert engine.ends_within(2)
    assert frontend.ends_within(2)
    start.assert_nothing_is_left()


@pytest.mark.parametrize("kind", FRONTENDS)
def test_ctrl_c_ends_it_in_good_order(start: Starter, kind: str) -> None:
    server = start(kind, "--port", "0", "--served-model-name", "sums", "--weight-version", "step-1")
    server.wait_until_ready()
    engine, frontend = Watched(server.engine), Watched(server.frontend)
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 5, "ignore_eos": True}}
    answer = httpx.post(server.url + GENERATE, json=body, timeout=END_SECONDS).raise_for_status().json()
    assert answer["model"] == "sums"
    assert answer["choices"][0]["weight_versions"] == [{"version": "step-1", "start": 0, "end": 5}]
    assert httpx.get(server.url + "/version").json()["frontend"] == kind
    server.process.send_signal(signal.SIGINT)
    code, lines = server.end()
    assert code == 0
    assert lines[-1] == "rollspan: stopped"
    assert engine.ends_within(0)
    assert frontend.ends_within(0)
    start.assert_nothing_is_left()


@pytest.mark.parametrize("kind", FRONTENDS)
def test_a_taken_port_is_told_in_one_line(start: Starter, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(kind, "--port", str(port))
        code, lines = server.end()
    assert code == 1
    assert lines[-1].startswith("rollspan: error: the frontend ended with exit code 1: ")
    assert f"127.0.0.1:{port}" in lines[-1]
    start.assert_nothing_is_left()


def test_an_engine_that_cannot_load_its_model_is_told_in_one_line(start: Starter) -> None:
    broken = start.temporary / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    server = start(FRONTENDS[0], str(broken), "--port", "0")
    code = server.process.wait(100)
    lines = server.errors.read_text().splitlines()
    assert code == 1
    assert lines[-1].startswith("rollspan: error: the engine ended with exit code 1: ")
    assert "broken" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    start.assert_nothing_is_left()


@pytest.mark.parametrize("kind", FRONTENDS)
def test_an_address_that_others_reach_needs_a_word_of_consent(start: Starter, kind: str) -> None:
    server = start(kind, "--host", "0.0.0.0", "--port", "0")
    code, lines = server.end()
    assert code == 2
    assert "--insecure" in lines[-1]
    start.assert_nothing_is_left()


def test_an_engine_and_its_frontend_run_apart(socket_path: Path) -> None:
    command = [sys.executable, "-m", "rollspan.cli", "engine", "add2-sft", "--socket", str(socket_path)]
    engine = start_process(command)
    try:
        frontend = Frontend(FRONTENDS[0], socket_path, dict(os.environ))
        cards = httpx.get(frontend.url + "/v1/models", timeout=END_SECONDS).json()["data"]
        assert [card["id"] for card in cards] == ["add2-sft"]
        frontend.close()
    finally:
        assert stop_process(engine, END_SECONDS) == 0
    assert not socket_path.exists()
