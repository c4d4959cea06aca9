"""A frontend under test as a process, and the small HTTP helpers that the tests share."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

WAIT_SECONDS = 20.0
BINARY_NAME = "rollspan-http"
GENERATE = "/inference/v1/generate"
POST_ROUTES = [
    "/inference/v1/generate",
    "/inference/v1/abort_requests",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/abort_requests",
    "/sleep",
    "/wake_up",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/start_draft_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/abort_weight_update",
    "/update_weight_version",
    "/weight_checker",
]
GET_ROUTES = [
    "/health",
    "/version",
    "/v1/models",
    "/metrics",
    "/is_paused",
    "/is_sleeping",
    "/weight_info",
    "/weight_history",
    "/server_info",
    "/get_world_size",
]


def frontend_command(kind: str) -> list[str]:
    """The command of the ``rust`` or ``python`` frontend, without flags.

    The binary that this interpreter's environment has comes before the one that cargo built last, perhaps elsewhere.
    """
    if kind == "python":
        return [sys.executable, "-m", "rollspan.frontend"]
    from rollspan.launcher import binary_places, find_http_binary

    target = Path(os.environ.get("CARGO_TARGET_DIR") or Path(__file__).parents[2] / "target")
    own = [Path(sysconfig.get_path("scripts")) / BINARY_NAME, target / "debug" / BINARY_NAME]
    if "ROLLSPAN_HTTP_BINARY" in os.environ:
        own = []
    binary = next((path for path in own if path.is_file()), None) or find_http_binary()
    if binary is None:
        places = ", ".join(str(path) for path in [*own, *binary_places()])
        raise AssertionError(f"rollspan-http is not built (ROLLSPAN_PURE_PYTHON=1 tests without it): {places}")
    return [str(binary)]


class FrontendProcess:
    """A frontend on one or several engines. ``url`` is set once it listens; `wait_ready` waits for their hellos."""

    def __init__(self, kind: str, engines: Path | Sequence[Path], *flags: str) -> None:
        self.kind = kind
        sockets = [engines] if isinstance(engines, Path) else engines
        chosen = [word for path in sockets for word in ("--engine", str(path))]
        self.process = subprocess.Popen(
            [*frontend_command(kind), *chosen, "--port", "0", "--watch-stdin", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.stderr_lines: list[str] = []
        self._threads = [
            threading.Thread(target=self._read_stdout, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        event = self.next_event()
        assert event is not None, f"the frontend ended: {''.join(self.stderr_lines)}"
        assert event["event"] == "listening"
        self.address = event["address"]
        self.url = f"http://{self.address}"
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_SECONDS)

    def next_event(self, timeout: float = WAIT_SECONDS) -> dict[str, Any] | None:
        """The next JSON line on stdout; None when the process has closed it."""
        return self._events.get(timeout=timeout)

    def wait_ready(self, timeout: float = WAIT_SECONDS) -> FrontendProcess:
        """Waits until the engine has said hello."""
        assert self.next_event(timeout) == {"event": "ready"}
        return self

    def generate(self, token_ids: list[int], headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """Posts a generate request; ``sampling_params`` defaults to ``{}``."""
        body = {"token_ids": token_ids, "sampling_params": {}, **fields}
        return self.http.post(GENERATE, json=body, headers=headers)

    def stream(self, token_ids: list[int], **fields: Any) -> list[dict[str, Any]]:
        """A streamed generate request: its chunks, once it has ended as it must, with ``[DONE]``."""
        body = {"token_ids": token_ids, "sampling_params": {}, "stream": True, **fields}
        with self.http.stream("POST", GENERATE, json=body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return list(events(response))

    def stream_or_error(self, token_ids: list[int], **fields: Any) -> list[dict[str, Any]] | httpx.Response:
        """The chunks of a stream, or the answer when it was refused before it began."""
        body = {"token_ids": token_ids, "sampling_params": {}, **fields}
        with self.http.stream("POST", GENERATE, json=body) as response:
            if response.status_code == 200:
                return list(events(response))
            response.read()
            return response

    @contextmanager
    def running_stream(self, token_ids: list[int], **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The chunks of a stream of which the engine has begun to generate."""
        body = {"token_ids": token_ids, "sampling_params": {}, "stream": True, **fields}
        with self.http.stream("POST", GENERATE, json=body) as response:
            assert response.status_code == 200, response.read()
            yield events(response)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Posts JSON, or nothing at all."""
        return self.http.post(path, **({} if body is None else {"json": body}), **options)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def connect(self) -> socket.socket:
        """A raw connection."""
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics: ``name{labels}`` without the labels of the model and of engine 0 -> value."""
        response = self.get("/metrics")
        assert response.status_code == 200
        samples = {}
        for line in response.text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[_without_model(name)] = float(value)
        return samples

    def terminate(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Waits for the end; all of stderr has been read then. Returns the exit code."""
        code = self.process.wait(WAIT_SECONDS)
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        return code

    def close(self) -> None:
        """Ends the process, however it fares."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _read_stdout(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr_lines.append(line)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Asks again and again, for as long as ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream, which must end with ``[DONE]`` and nothing after it."""
    done = False
    for line in response.iter_lines():
        if not line:
            continue
        assert not done, f"after [DONE]: {line}"
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            done = True
        else:
            yield json.loads(line[len("data: ") :])
    assert done, "the stream did not end with [DONE]"


def error_of(response: httpx.Response, status: int, reason: str, param: str | None = None) -> str:
    """Checks an error answer and returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "reason"}
    assert (error["code"], error["reason"], error["param"]) == (status, reason, param), error
    assert error["type"].endswith("Error")
    if status in (429, 503):
        assert response.headers["retry-after"] == "1"
    return str(error["message"])


def post_bytes(body: bytes, headers: str = "Content-Type: application/json\r\n", path: str = GENERATE) -> bytes:
    """A raw POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def _without_model(sample: str) -> str:
    name, brace, labels = sample.partition("{")
    dropped = ("model_name=", 'engine="0"')
    kept = [label for label in labels.rstrip("}").split(",") if label and not label.startswith(dropped)]
    return name + (brace + ",".join(kept) + "}" if kept else "")
