"""Start, death and shutdown: what a frontend says while its engine comes and goes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from frontend_process import (
    GENERATE,
    GET_ROUTES,
    POST_ROUTES,
    FrontendProcess,
    error_of,
    events,
    frontend_command,
    post_bytes,
    wait_until,
)
from real_server import RealEngine, RealServer
from scripted_frontend import ENGINE_START_SECONDS, FRONTENDS, Mocked, MockFactory

from rollspan.protocol.framing import FrameKind
from rollspan.protocol.messages import FinishReason

WITHIN_A_SECOND = 1.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def open_stream(mock: Mocked, pool: ThreadPoolExecutor, request_id: str = "open") -> httpx.Response:
    """A stream of which the first token has arrived."""
    body = {"token_ids": [5], "sampling_params": {}, "stream": True, "request_id": request_id}
    request = mock.frontend.http.build_request("POST", GENERATE, json=body)
    answer = pool.submit(lambda: mock.frontend.http.send(request, stream=True))
    mock.engine.tokens(mock.engine.next_request().request_id, [1], version="a", commit=1)
    return answer.result()


def test_every_route_is_503_while_the_engine_starts(mocks: MockFactory) -> None:
    mock = mocks.start(accept=False)
    for path in GET_ROUTES:
        if path != "/version":
            error_of(mock.frontend.get(path), 503, "engine_starting")
    for path in POST_ROUTES:
        error_of(mock.frontend.post(path, {}), 503, "engine_starting")
    assert mock.frontend.get("/version").json()["frontend"] == mock.frontend.kind
    mock.engine.accept()
    mock.frontend.wait_ready()
    assert mock.frontend.get("/health").status_code == 200
    assert mock.engine.client_hello is not None
    assert mock.engine.client_hello.role == "frontend"


def test_a_frontend_may_start_before_its_engine(kind: str, tmp_path: Path) -> None:
    from mock_engine import MockEngine

    directory = Path(os.path.relpath(tmp_path)) if len(str(tmp_path)) > 80 else tmp_path
    frontend = FrontendProcess(kind, directory / "late.sock")
    try:
        error_of(frontend.get("/health"), 503, "engine_starting")
        engine = MockEngine(directory / "late.sock")
        engine.accept()
        frontend.wait_ready()
        engine.close()
    finally:
        frontend.close()


@pytest.mark.parametrize("how", ["dead", "closed"])
def test_an_engine_that_cannot_start_ends_the_frontend(mocks: MockFactory, how: str) -> None:
    mock = mocks.start(accept=False)
    mock.engine.connect()
    if how == "dead":
        mock.engine.dead("no such model directory: /nowhere")
    else:
        mock.engine.close()
    assert mock.frontend.wait() == 1
    assert mock.frontend.next_event() is None
    if how == "dead":
        assert any("no such model directory: /nowhere" in line for line in mock.frontend.stderr_lines)


def test_an_engine_that_takes_too_long_ends_the_frontend(kind: str, tmp_path: Path) -> None:
    frontend = FrontendProcess(kind, tmp_path / "never.sock", "--engine-ready-timeout", "0.3")
    try:
        assert frontend.wait() == 1
    finally:
        frontend.close()


@pytest.mark.parametrize("how", ["closed", "dead", "garbage"])
def test_the_engines_death_reaches_every_open_request_at_once(
    mocks: MockFactory, pool: ThreadPoolExecutor, how: str
) -> None:
    mock = mocks.start()
    stream = open_stream(mock, pool)
    chunks = events(stream)
    assert next(chunks)["choices"][0]["token_ids"] == [1]
    waiting: list[Future[httpx.Response]] = [
        pool.submit(mock.frontend.generate, [5]),
        pool.submit(mock.frontend.generate, [5], stream=True),
        pool.submit(mock.frontend.post, "/pause?mode=wait"),
    ]
    for _ in range(2):
        mock.engine.next_request()
    mock.engine.next_call("pause_generation")
    begin = time.monotonic()
    if how == "closed":
        mock.engine.close()
    elif how == "dead":
        mock.engine.dead("out of memory")
    else:
        mock.engine.raw(FrameKind.OUTPUTS, b"\xc1 not msgpack")
    reason, status = ("decode_error", 500) if how == "garbage" else ("engine_dead", 503)
    for answer in waiting:
        message = error_of(answer.result(), status, reason)
        assert how != "dead" or "out of memory" in message
    *_, last = chunks
    assert last["error"]["reason"] == reason
    assert last["error"]["code"] == status
    assert time.monotonic() - begin < WITHIN_A_SECOND
    stream.close()
    error_of(mock.frontend.get("/health"), 503, "engine_dead")
    error_of(mock.frontend.generate([5]), 503, "engine_dead")
    error_of(mock.frontend.post("/resume"), 503, "engine_dead")
    assert mock.frontend.get("/version").status_code == 200
    if how == "garbage":
        errors = {name: value for name, value in mock.frontend.metrics().items() if "wire_decode_errors_total" in name}
        assert sum(errors.values()) == 1, errors
    assert mock.frontend.terminate() == 0


def test_a_hello_of_another_protocol_is_refused(mocks: MockFactory) -> None:
    mock = mocks.start(accept=False)
    mock.engine.connect()
    from mock_engine import hello_with

    from rollspan.protocol import codec

    mock.engine.raw(FrameKind.ENGINE_HELLO, codec.encode_engine_hello(hello_with(version=(2, 0))))
    assert mock.frontend.wait() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_frontend_ends_at_a_signal(mocks: MockFactory, number: int) -> None:
    mock = mocks.start()
    begin = time.monotonic()
    assert mock.frontend.terminate(number) == 0
    assert time.monotonic() - begin < 2
    assert mock.engine.link_closed.wait(5)


def test_a_frontend_ends_at_a_signal_while_its_engine_starts(mocks: MockFactory) -> None:
    mock = mocks.start(accept=False)
    assert mock.frontend.terminate() == 0


def test_shutdown_lets_requests_finish_in_time(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    mock = mocks.start("--shutdown-timeout", "10")
    answer = pool.submit(mock.frontend.generate, [5])
    request = mock.engine.next_request()
    health = mock.frontend.connect()
    ask_health(health)
    mock.frontend.process.send_signal(signal.SIGTERM)
    wait_until_refused(mock.frontend)
    mock.engine.tokens(request.request_id, [1, 2], finish=FinishReason.STOP)
    response = answer.result()
    assert response.status_code == 200
    assert response.json()["choices"][0]["token_ids"] == [1, 2]
    assert mock.frontend.wait() == 0
    health.close()


def test_shutdown_aborts_requests_that_take_too_long(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    mock = mocks.start("--shutdown-timeout", "0.5")
    stream = open_stream(mock, pool, "streamed")
    chunks = events(stream)
    next(chunks)
    collected = pool.submit(mock.frontend.generate, [5], request_id="collected")
    mock.engine.tokens(mock.engine.next_request().request_id, [7, 8], version="b", commit=2)
    mock.frontend.process.send_signal(signal.SIGTERM)
    choice = collected.result().json()["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 8], "abort")
    assert choice["weight_versions"] == [{"version": "b", "start": 0, "end": 2}]
    *_, last = chunks
    assert last["choices"][0]["finish_reason"] == "abort"
    assert last["choices"][0]["weight_versions"] == [{"version": "a", "start": 0, "end": 1}]
    assert mock.frontend.wait() == 0
    stream.close()


def test_closing_stdin_ends_the_frontend_at_once(mocks: MockFactory) -> None:
    mock = mocks.start()
    assert mock.frontend.process.stdin is not None
    mock.frontend.process.stdin.close()
    mock.frontend.wait()
    assert mock.engine.link_closed.wait(5)


def test_a_taken_port_is_one_readable_line(kind: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run_frontend(kind, "--engine", str(tmp_path / "x.sock"), "--port", str(port))
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line]
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line.lower()


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--engine", "x", "--port", "65536"],
        ["--engine", "x", "--port", "no"],
        ["--engine", "x", "--unknown"],
        ["--engine", "x", "--host", "0.0.0.0"],
        ["--engine", "x", "--max-queued-requests", "-1"],
    ],
)
def test_wrong_usage_exits_with_2(kind: str, flags: list[str]) -> None:
    result = run_frontend(kind, *flags)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr


def test_the_version_flag_prints_one_line(kind: str) -> None:
    import rollspan

    result = run_frontend(kind, "--version")
    assert result.returncode == 0
    assert result.stdout.split()[-1] == rollspan.__version__


def test_insecure_allows_another_address(mocks: MockFactory) -> None:
    mock = mocks.start("--host", "0.0.0.0", "--insecure")
    assert mock.frontend.address.startswith("0.0.0.0:")
    assert mock.frontend.get("/health").status_code == 200


def test_a_served_model_name_replaces_the_engines(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    mock = mocks.start("--served-model-name", "policy")
    (card,) = mock.frontend.get("/v1/models").json()["data"]
    assert (card["id"], card["root"]) == ("policy", "mock")
    message = error_of(mock.frontend.generate([5], model="mock"), 404, "model_not_found", "model")
    assert message == 'model "mock" does not exist; this server serves "policy"'
    answer = pool.submit(mock.frontend.generate, [5], model="policy")
    mock.engine.tokens(mock.engine.next_request().request_id, [1], finish=FinishReason.STOP)
    assert answer.result().json()["model"] == "policy"


def test_more_open_requests_than_allowed_are_refused(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    mock = mocks.start("--max-queued-requests", "2")
    answers = [pool.submit(mock.frontend.generate, [5]) for _ in range(2)]
    requests = [mock.engine.next_request() for _ in range(2)]
    for stream in (False, True):
        error_of(mock.frontend.generate([5], stream=stream), 429, "queue_full")
    for request in requests:
        mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP)
    assert [answer.result().status_code for answer in answers] == [200, 200]
    answer = pool.submit(mock.frontend.generate, [5])
    mock.engine.tokens(mock.engine.next_request().request_id, [1], finish=FinishReason.STOP)
    assert answer.result().status_code == 200


def test_strict_requests_refuse_unknown_fields(mocks: MockFactory) -> None:
    mock = mocks.start("--strict-requests")
    body = {"extra_body": {}, "sampling_params": {"output_kind": 2}, "stream_options": {"x": 1}}
    message = error_of(mock.frontend.generate([5], **body), 400, "unknown_field", "extra_body")
    assert message == "unknown fields: extra_body, sampling_params.output_kind, stream_options.x"
    assert not mock.engine.has_pending_request


def test_a_body_over_the_limit_is_refused_while_it_is_read(mocks: MockFactory) -> None:
    mock = mocks.start("--max-body-bytes", "1000")
    http = mock.frontend.http
    error_of(
        http.post(GENERATE, content=b"x" * 1001, headers={"Content-Type": "application/json"}), 413, "body_too_large"
    )
    error_of(http.post("/update_weights", content=b"x" * 1001), 413, "body_too_large")
    exactly = json.dumps({"token_ids": [99], "sampling_params": {}}).encode().ljust(1000)
    error_of(
        http.post(GENERATE, content=exactly, headers={"Content-Type": "application/json"}),
        400,
        "invalid_request",
        "token_ids",
    )
    with mock.frontend.connect() as connection:
        # No length is announced and the body never ends: the answer comes all the same.
        headers = "Host: t\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        connection.sendall(f"POST {GENERATE} HTTP/1.1\r\n{headers}\r\n".encode())
        connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def ask_health(connection: socket.socket) -> bytes:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
    return connection.recv(4096)


def wait_until_refused(frontend: FrontendProcess) -> None:
    """Waits until nobody listens any more."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            frontend.connect().close()
        except ConnectionRefusedError:
            return
        except ConnectionResetError:
            pass  # it was in the backlog when the listener was closed
    raise AssertionError("the frontend still accepts connections")


def run_frontend(kind: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*frontend_command(kind), *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_connection_cut_in_the_middle_of_a_body_harms_nobody(mocks: MockFactory) -> None:
    mock = mocks.start()
    with mock.frontend.connect() as connection:
        connection.sendall(post_bytes(b"{" * 100)[:-50])
    assert mock.frontend.get("/health").status_code == 200
    assert not mock.engine.has_pending_request


def test_kill_9_of_the_engine_ends_every_request_within_a_second(
    socket_directory: Path, pool: ThreadPoolExecutor
) -> None:
    directory = socket_directory / "killed"
    directory.mkdir()
    engine = RealEngine(directory)
    servers = [RealServer(kind, engine) for kind in FRONTENDS]
    try:
        for server in servers:
            server.frontend.wait_ready(ENGINE_START_SECONDS)
        end_by_kill([server.frontend for server in servers], engine, pool)
    finally:
        for server in servers:
            server.close()
        engine.close()


def end_by_kill(frontends: list[FrontendProcess], engine: RealEngine, pool: ThreadPoolExecutor) -> None:
    params = {"ignore_eos": True, "n": 4}
    prompt = [1, 3, 4]
    with ExitStack() as stack:
        streams = [
            stack.enter_context(frontend.running_stream(prompt, sampling_params=params)) for frontend in frontends
        ]
        answers = [
            pool.submit(frontend.generate, prompt, sampling_params=params) for frontend in frontends for _ in range(3)
        ]
        for frontend in frontends:
            wait_until(lambda: frontend.metrics()["rollspan:num_requests_running"] > 4, "all running")  # noqa: B023
        begin = time.monotonic()
        engine.process.process.kill()
        for answer in answers:
            error_of(answer.result(), 503, "engine_dead")
        for chunks in streams:
            assert list(chunks)[-1]["error"]["reason"] == "engine_dead"
        assert time.monotonic() - begin < WITHIN_A_SECOND
    for frontend in frontends:
        error_of(frontend.get("/health"), 503, "engine_dead")
        assert frontend.terminate() == 0


def test_shutdown_answers_a_call_that_waits_for_the_engine(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    mock = mocks.start("--shutdown-timeout", "0.2")
    waiting = pool.submit(mock.frontend.post, "/pause?mode=wait")
    mock.engine.next_call("pause_generation")
    mock.frontend.process.send_signal(signal.SIGTERM)
    error_of(waiting.result(), 503, "shutting_down")
    assert mock.frontend.wait() == 0


def test_shutdown_does_not_wait_for_a_reader_that_never_reads(mocks: MockFactory) -> None:
    mock = mocks.start("--shutdown-timeout", "0.2")
    body = json.dumps({"token_ids": [5], "sampling_params": {}, "stream": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = mock.frontend.address.rpartition(":")
        connection.connect((host, int(port)))
        connection.sendall(post_bytes(body))
        request = mock.engine.next_request()
        for _ in range(100):
            mock.engine.tokens(request.request_id, [1] * 20_000)
        assert mock.frontend.get("/health").status_code == 200
        begin = time.monotonic()
        assert mock.frontend.terminate() == 0
        assert time.monotonic() - begin < 10
    assert not any("Traceback" in line for line in mock.frontend.stderr_lines)
