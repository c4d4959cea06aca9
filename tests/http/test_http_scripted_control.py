"""Control routes against a scripted engine: what is called, what is answered, and which refusal is which."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from frontend_process import GET_ROUTES, POST_ROUTES, error_of, post_bytes
from scripted_frontend import Mocked

from rollspan.protocol.messages import FinishReason


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.mark.parametrize(
    ("query", "body", "mode", "clear_cache"),
    [
        ("", None, "abort", True),
        ("?mode=abort", None, "abort", True),
        ("?mode=wait&clear_cache=false", None, "wait", False),
        ("?mode=keep&clear_cache=true", None, "keep", True),
        ("?mode=keep&clear_cache=0", None, "keep", False),
        ("?mode=keep&clear_cache=1", None, "keep", True),
        ("?mode=keep", None, "keep", True),
        ("?mode=retract", None, "keep", True),
        ("?mode=in_place", None, "keep", False),
        ("?mode=in_place&clear_cache=true", None, "keep", True),
        ("?mode=retract&clear_cache=false", None, "keep", False),
        ("", {"mode": "wait", "clear_cache": False}, "wait", False),
        ("?mode=keep", {"clear_cache": False}, "keep", False),
        ("", {}, "abort", True),
        ("", {"mode": None, "clear_cache": None}, "abort", True),
    ],
)
def test_pause_takes_its_mode_from_query_or_body(
    mock: Mocked, pool: ThreadPoolExecutor, query: str, body: Any, mode: str, clear_cache: bool
) -> None:
    answer = pool.submit(mock.frontend.post, f"/pause{query}", body)
    call = mock.engine.next_call("pause_generation")
    assert call.args == [mode, clear_cache]
    mock.engine.reply(call)
    assert answer.result().json() == {"status": "paused"}
    assert answer.result().status_code == 200


@pytest.mark.parametrize(
    ("query", "body", "param"),
    [
        ("?mode=stop", None, "mode"),
        ("?mode=", None, "mode"),
        ("?clear_cache=yes", None, "clear_cache"),
        ("", {"mode": 1}, "mode"),
        ("", {"clear_cache": "yes"}, "clear_cache"),
    ],
)
def test_pause_names_the_value_it_does_not_know(mock: Mocked, query: str, body: Any, param: str) -> None:
    error_of(mock.frontend.post(f"/pause{query}", body), 400, "invalid_request", param)


@pytest.mark.parametrize(
    ("query", "body", "running"),
    [
        ("", None, False),
        ("?reset_running_requests=true", None, True),
        ("?reset_running_requests=0&reset_external=1", {"reset_running_requests": True}, False),
        ("", {"reset_running_requests": True, "reset_external": False}, True),
    ],
)
def test_the_prefix_cache_is_reset_with_or_without_what_runs(
    mock: Mocked, pool: ThreadPoolExecutor, query: str, body: Any, running: bool
) -> None:
    answer = pool.submit(mock.frontend.post, f"/reset_prefix_cache{query}", body)
    call = mock.engine.next_call("reset_prefix_cache")
    assert call.args == [running]
    mock.engine.reply(call, True)
    assert answer.result().json() == {"success": True}
    assert "x-ignored-fields" not in answer.result().headers


def test_a_reset_names_the_flag_it_does_not_understand(mock: Mocked) -> None:
    for query, body, param in (
        ("?reset_external=maybe", None, "reset_external"),
        ("", {"reset_running_requests": 1}, "reset_running_requests"),
    ):
        error_of(mock.frontend.post(f"/reset_prefix_cache{query}", body), 400, "invalid_request", param)


@pytest.mark.parametrize(
    ("query", "config", "backend"),
    [
        ("", {"a": 1}, "disk"),
        ("?config_format=json", {"weight_transfer_backend": "shm"}, "shm"),
        ("?config_format=text", None, "disk"),
    ],
)
def test_server_info_has_vllms_groups_and_what_the_engine_says(
    mock: Mocked, pool: ThreadPoolExecutor, query: str, config: Any, backend: str
) -> None:
    answer = pool.submit(mock.frontend.get, f"/server_info{query}")
    facts = {"runner": "captured", "attention": "native", "numerics": {"batch_invariant": False}, "config": config}
    mock.engine.reply(mock.engine.next_call("server_info"), facts)
    body = answer.result().json()
    assert isinstance(body.pop("version"), str)
    assert body.pop("frontend") in ("rust", "python")
    assert body == {
        "vllm_config": {
            "model_config": {
                "model": "mock",
                "served_model_name": "mock",
                "architecture": "MockForCausalLM",
                "dtype": "float32",
                "max_model_len": 64,
                "max_logprobs": 20,
                "vocab_size": 32,
            },
            "cache_config": {"block_size": 16, "num_gpu_blocks": 64},
            "scheduler_config": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
            "device_config": {"device": "cpu"},
            "weight_transfer_config": {"backend": backend},
        },
        "engine": {
            "version": "0.0.0",
            "engine_index": 0,
            "pid": 1,
            "num_parameters": 1,
            "eos_token_ids": [2],
            **facts,
        },
    }


def test_server_info_knows_two_formats(mock: Mocked) -> None:
    error_of(mock.frontend.get("/server_info?config_format=yaml"), 400, "invalid_request", "config_format")


def test_a_superseded_pause_is_a_conflict(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.post, "/pause?mode=wait")
    mock.engine.refuse(mock.engine.next_call("pause_generation"), "resumed meanwhile", "pause_superseded")
    assert error_of(answer.result(), 409, "pause_superseded") == "resumed meanwhile"


def test_resume_and_is_paused_ask_the_engine(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.post, "/resume")
    mock.engine.reply(mock.engine.next_call("resume_scheduler"))
    assert answer.result().json() == {"status": "resumed"}
    for paused in (True, False):
        answer = pool.submit(mock.frontend.get, "/is_paused")
        mock.engine.reply(mock.engine.next_call("is_scheduler_paused"), paused)
        assert answer.result().json() == {"is_paused": paused}


def test_other_calls_go_on_while_a_pause_waits(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    waiting = pool.submit(mock.frontend.post, "/pause?mode=wait")
    call = mock.engine.next_call("pause_generation")
    answer = pool.submit(mock.frontend.get, "/weight_info")
    mock.engine.reply(mock.engine.next_call("get_weight_version"), "v7")
    assert answer.result().json() == {"weight_version": "v7"}
    assert not waiting.done()
    mock.engine.reply(call)
    assert waiting.result().status_code == 200


def test_bodies_on_get_and_odd_content_types_are_fine(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    def odd() -> list[int]:
        http = mock.frontend.http
        octets = {"Content-Type": "application/octet-stream"}
        text = {"Content-Type": "text/plain"}
        return [
            http.post("/pause?mode=keep&clear_cache=false", headers=octets).status_code,
            http.post("/resume", headers=text, content=b"  ").status_code,
            http.request("GET", "/is_paused", json={"anything": 1}).status_code,
            http.post("/start_weight_update", headers=octets).status_code,
            http.post("/update_weights", headers=text, content=b'{"update_info": {"path": "x"}}').status_code,
            http.post("/finish_weight_update").status_code,
        ]

    answer = pool.submit(odd)
    for method, result in (
        ("pause_generation", None),
        ("resume_scheduler", None),
        ("is_scheduler_paused", False),
        ("start_weight_update", None),
        ("update_weights", None),
        ("finish_weight_update", {"weight_version": "default", "weight_commit": 1}),
    ):
        mock.engine.reply(mock.engine.next_call(method), result)
    assert answer.result() == [200] * 6


def test_unknown_keys_of_control_bodies_are_named(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.post, "/start_weight_update", {"z": 1, "a b": 2})
    mock.engine.reply(mock.engine.next_call("start_weight_update"))
    assert answer.result().headers["x-ignored-fields"] == "a%20b,z"


def test_a_weight_update_goes_to_the_engine_call_by_call(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.post, "/start_weight_update")
    mock.engine.reply(mock.engine.next_call("start_weight_update"))
    assert answer.result().json() == {"message": "Weight update started"}
    for info in ({"path": "/w", "extra": [1]}, [{"path": "/w", "extra": [1]}]):
        answer = pool.submit(mock.frontend.post, "/update_weights", {"update_info": info})
        call = mock.engine.next_call("update_weights")
        assert call.args == [{"path": "/w", "extra": [1]}]
        mock.engine.reply(call)
        assert answer.result().json() == {"message": "Weights updated"}
    for sent, label in (
        ({"weight_version": "s-1"}, "s-1"),
        ({"weight_version": 7}, "7"),
        ({"weight_version": None}, None),
    ):
        answer = pool.submit(mock.frontend.post, "/finish_weight_update", sent)
        call = mock.engine.next_call("finish_weight_update")
        assert call.args == [label]
        mock.engine.reply(call, {"weight_version": label or "old", "weight_commit": 3})
        assert answer.result().json() == {
            "message": "Weight update finished",
            "weight_version": label or "old",
            "weight_commit": 3,
        }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "update_info is required"),
        ({"update_info": None}, "update_info is required"),
        ({"update_info": "x"}, 'update_info must be an object or a list of one object, got "x"'),
        ({"update_info": []}, "update_info must be an object or a list of one object, got []"),
        ({"update_info": [{}, {}]}, "update_info must be an object or a list of one object, got [{},{}]"),
    ],
)
def test_update_weights_wants_one_update_info(mock: Mocked, body: Any, message: str) -> None:
    assert error_of(mock.frontend.post("/update_weights", body), 400, "invalid_request", "update_info") == message


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("weights_invalid", 400),
        ("no_update_active", 409),
        ("update_active", 409),
        ("unknown_method", 400),
        ("invalid_request", 400),
        (None, 500),
        ("never_heard_of", 500),
    ],
)
def test_a_failed_call_keeps_its_reason(
    mock: Mocked, pool: ThreadPoolExecutor, reason: str | None, status: int
) -> None:
    answer = pool.submit(mock.frontend.post, "/update_weights", {"update_info": {"path": "x"}})
    mock.engine.refuse(mock.engine.next_call("update_weights"), "it said no", reason)
    known = reason if reason not in (None, "never_heard_of") else "internal_error"
    assert error_of(answer.result(), status, known) == "it said no"


@pytest.mark.parametrize(
    ("label", "kept"),
    [
        ("step-42", "step-42"),
        (7, "7"),
        (-1, "-1"),
        (2**63, "9223372036854775808"),
        ("é" * 128, "é" * 128),
        ("a b", "a b"),
    ],
)
def test_labels_are_strings_or_integers(mock: Mocked, pool: ThreadPoolExecutor, label: Any, kept: str) -> None:
    answer = pool.submit(mock.frontend.post, "/update_weight_version", {"new_version": label})
    call = mock.engine.next_call("set_weight_version")
    assert call.args == [kept]
    mock.engine.reply(call)
    assert answer.result().json() == {"success": True, "new_version": kept}


@pytest.mark.parametrize("label", ["", "a\nb", "\x7f", "\u0085", "x" * 257, "é" * 129, 1.5, True, [], {}])
@pytest.mark.parametrize(
    ("path", "field"), [("/update_weight_version", "new_version"), ("/finish_weight_update", "weight_version")]
)
def test_a_bad_label_is_refused(mock: Mocked, label: Any, path: str, field: str) -> None:
    shown = json.dumps(label, ensure_ascii=False)
    shown = shown if len(shown) <= 64 else shown[:64] + "..."
    message = error_of(mock.frontend.post(path, {field: label}), 400, "invalid_label", field)
    assert (
        message == f"{field} must be a string of 1 to 256 bytes without control characters or an integer, got {shown}"
    )


def test_a_new_label_is_required(mock: Mocked) -> None:
    for body in (None, {}):
        error_of(mock.frontend.post("/update_weight_version", body), 400, "invalid_request", "new_version")


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
def test_aborted_requests_answer_with_what_they_have(mock: Mocked, pool: ThreadPoolExecutor, path: str) -> None:
    answer = pool.submit(mock.frontend.generate, [5], request_id="to-abort", sampling_params={"n": 2})
    requests = [mock.engine.next_request().request_id for _ in range(2)]
    mock.engine.tokens(requests[0], [1, 2], finish=FinishReason.STOP, version="a", commit=1)
    mock.engine.tokens(requests[1], [3], version="a", commit=1)
    # A call and its answer: afterwards the frontend has read everything that was sent before it.
    settle(mock, pool)
    aborted = mock.frontend.post(path, {"request_ids": ["to-abort", "unknown", "to-abort"]})
    assert aborted.json() == {"status": "aborted", "aborted": 1}
    choices = answer.result().json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "abort"]
    assert [choice["token_ids"] for choice in choices] == [[1, 2], [3]]
    assert choices[1]["weight_versions"] == [{"version": "a", "start": 0, "end": 1}]
    assert mock.engine.next_abort() == requests[1]
    # A token that was on its way when the request was aborted changes nothing.
    mock.engine.tokens(requests[1], [4])
    again = mock.frontend.post(path, {"request_ids": ["to-abort"]})
    assert again.json() == {"status": "aborted", "aborted": 0}


@pytest.mark.parametrize("body", [None, {}, {"request_ids": None}])
def test_abort_without_ids_aborts_all(mock: Mocked, pool: ThreadPoolExecutor, body: Any) -> None:
    streamed = pool.submit(mock.frontend.stream, [5])
    collected = pool.submit(mock.frontend.generate, [5])
    ids = {mock.engine.next_request().request_id for _ in range(2)}
    settle(mock, pool)
    assert mock.frontend.post("/abort_requests", body).json() == {"status": "aborted", "aborted": 2}
    assert {mock.engine.next_abort() for _ in range(2)} == ids
    choice = collected.result().json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"], choice["weight_versions"]) == ("abort", [], [])
    (chunk,) = streamed.result()
    assert chunk["choices"][0]["finish_reason"] == "abort"
    assert chunk["choices"][0]["weight_versions"] == []


def test_abort_wants_a_list_of_strings(mock: Mocked) -> None:
    for value in ("x", {"a": 1}, 1):
        error_of(mock.frontend.post("/abort_requests", {"request_ids": value}), 400, "invalid_request", "request_ids")
    message = error_of(
        mock.frontend.post("/abort_requests", {"request_ids": ["a", 1]}), 400, "invalid_request", "request_ids"
    )
    assert message == "request_ids must be a list of strings, got 1 at index 1"
    for body in (None, {}):
        answer = mock.frontend.post("/inference/v1/abort_requests", body)
        error_of(answer, 400, "invalid_request", "request_ids")


@pytest.mark.parametrize("path", [path for path in POST_ROUTES if path != "/inference/v1/generate"])
def test_control_bodies_must_be_json_objects(mock: Mocked, path: str) -> None:
    http = mock.frontend.http
    error_of(http.post(path, content=b"{"), 400, "invalid_json")
    error_of(http.post(path, content=b"\v"), 400, "invalid_json")
    error_of(http.post(path, content=b"[]"), 400, "invalid_request")
    error_of(http.post(path, content=b'{"a": NaN}'), 400, "invalid_json")


@pytest.mark.parametrize("path", POST_ROUTES)
def test_get_on_a_post_route_is_405(mock: Mocked, path: str) -> None:
    answer = mock.frontend.get(path)
    error_of(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("path", GET_ROUTES)
def test_post_on_a_get_route_is_405(mock: Mocked, path: str) -> None:
    answer = mock.frontend.post(path)
    error_of(answer, 405, "method_not_allowed")
    assert "GET" in answer.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/nothing", "/pause/", "/inference/v1", "/v1/models/x"])
def test_unknown_routes_are_404_in_json(mock: Mocked, path: str) -> None:
    error_of(mock.frontend.get(path), 404, "not_found")
    error_of(mock.frontend.post(path, {"a": 1}), 404, "not_found")


@pytest.mark.parametrize(
    ("path", "content_type", "status"),
    [
        ("/inference/v1/generate", "text/plain", 415),
        ("/health", "application/json", 405),
        ("/nothing", "application/json", 404),
    ],
)
def test_an_early_refusal_does_not_break_the_connection(
    mock: Mocked, path: str, content_type: str, status: int
) -> None:
    body = b'{"token_ids": [1], "sampling_params": {}}'
    head, _, _ = post_bytes(body, f"Content-Type: {content_type}\r\n", path).partition(b"{")
    with mock.frontend.connect() as connection:
        connection.sendall(head)
        answer = read_answer(connection)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        # The body was not needed, but it is on its way; whoever is not told otherwise sends the next request after it.
        if b"connection: close" not in answer.lower():
            connection.sendall(body)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
            assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def read_answer(connection: socket.socket) -> bytes:
    """Head and body of one answer that has a length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += receive(connection, received)
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < length:
        body += receive(connection, received)
    return head + b"\r\n\r\n" + body


def receive(connection: socket.socket, so_far: bytes) -> bytes:
    piece = connection.recv(65536)
    assert piece, f"closed after {so_far!r}"
    return piece


def test_the_server_says_what_it_is(mock: Mocked) -> None:
    assert mock.frontend.get("/health").json() == {"status": "ok"}
    version = mock.frontend.get("/version").json()
    assert version["frontend"] == mock.frontend.kind
    assert set(version) == {"version", "frontend"}
    models = mock.frontend.get("/v1/models").json()
    assert models["object"] == "list"
    (card,) = models["data"]
    assert isinstance(card.pop("created"), int)
    assert card == {
        "id": "mock",
        "object": "model",
        "owned_by": "rollspan",
        "root": "mock",
        "parent": None,
        "max_model_len": 64,
    }


def settle(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    """Waits until the frontend has read everything that the engine has sent."""
    answer = pool.submit(mock.frontend.get, "/is_paused")
    mock.engine.reply(mock.engine.next_call("is_scheduler_paused"), False)
    assert answer.result().status_code == 200
