"""Weight updates and sleep against a scripted engine: which calls go there, what is answered, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from frontend_process import error_of, wait_until
from scripted_frontend import Mocked, MockFactory

DIGEST = "blake3:" + "0f" * 32
COMMIT = {"weight_version": "step-1", "weight_commit": 4, "weight_digest": DIGEST}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def posted(
    mock: Mocked, pool: ThreadPoolExecutor, path: str, body: Any, method: str, args: list[Any], result: Any = None
) -> Any:
    """Posts, checks the one call that the engine gets, answers it, and returns the server's answer."""
    answer = pool.submit(mock.frontend.post, path, body)
    call = mock.engine.next_call(method)
    assert call.args == args
    mock.engine.reply(call, result)
    response = answer.result()
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers
    return response.json()


@pytest.mark.parametrize(
    ("body", "info"),
    [
        (None, {}),
        ({}, {}),
        ({"init_info": None}, {}),
        ({"init_info": {"master_address": "h", "world_size": 2}}, {"master_address": "h", "world_size": 2}),
        ({"init_info": [{"rank_offset": 1}]}, {"rank_offset": 1}),
    ],
)
def test_a_transfer_is_initialized_with_its_info(
    mock: Mocked, pool: ThreadPoolExecutor, body: Any, info: dict[str, Any]
) -> None:
    answer = posted(mock, pool, "/init_weight_transfer_engine", body, "init_weight_transfer_engine", [info])
    assert answer == {"message": "Weight transfer initialized"}


def test_a_transfer_is_shut_down(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = posted(mock, pool, "/shutdown_weight_transfer_engine", None, "shutdown_weight_transfer_engine", [])
    assert answer == {"message": "Weight transfer shut down"}


@pytest.mark.parametrize(
    ("body", "args"),
    [
        (None, []),
        ({"mode": None}, []),
        ({"mode": "staged"}, [{"mode": "staged"}]),
        ({"mode": "in_place"}, [{"mode": "in_place"}]),
    ],
)
def test_an_update_starts_in_the_mode_that_is_asked_for(
    mock: Mocked, pool: ThreadPoolExecutor, body: Any, args: list[Any]
) -> None:
    answer = posted(mock, pool, "/start_weight_update", body, "start_weight_update", args)
    assert answer == {"message": "Weight update started"}


@pytest.mark.parametrize(
    ("body", "args"),
    [
        (None, [None]),
        ({"weight_version": 1, "weight_digest": None, "partial": None}, ["1"]),
        ({"weight_digest": DIGEST}, [None, {"digest": DIGEST}]),
        ({"weight_version": "a", "partial": False}, ["a", {"partial": False}]),
        ({"weight_digest": DIGEST, "partial": True}, [None, {"digest": DIGEST, "partial": True}]),
    ],
)
def test_a_finish_may_name_label_digest_and_completeness(
    mock: Mocked, pool: ThreadPoolExecutor, body: Any, args: list[Any]
) -> None:
    answer = posted(mock, pool, "/finish_weight_update", body, "finish_weight_update", args, COMMIT)
    assert answer == {"message": "Weight update finished", **COMMIT}


@pytest.mark.parametrize("aborted", [True, False])
def test_an_abort_says_whether_an_update_was_open(mock: Mocked, pool: ThreadPoolExecutor, aborted: bool) -> None:
    answer = posted(mock, pool, "/abort_weight_update", None, "abort_weight_update", [], aborted)
    assert answer == {"status": "aborted", "aborted": aborted}


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/start_weight_update", {"mode": "x"}, 'mode must be staged or in_place, got "x"', "mode"),
        ("/start_weight_update", {"mode": ["staged"]}, 'mode must be staged or in_place, got ["staged"]', "mode"),
        (
            "/finish_weight_update",
            {"weight_digest": "blake3:0F"},
            'weight_digest must be blake3: and 64 lower-case hex digits, got "blake3:0F"',
            "weight_digest",
        ),
        ("/finish_weight_update", {"partial": 1}, "partial must be true or false, got 1", "partial"),
        (
            "/init_weight_transfer_engine",
            {"init_info": [{}, {}]},
            "init_info must be an object or a list of one object, got [{},{}]",
            "init_info",
        ),
        ("/weight_checker", {}, "action is required", "action"),
        ("/weight_checker", {"action": "x"}, 'action must be checksum, compare or reset, got "x"', "action"),
        ("/weight_checker", {"action": {}}, "action must be checksum, compare or reset, got {}", "action"),
        ("/weight_checker", {"action": "compare"}, "baseline is required", "baseline"),
        (
            "/weight_checker",
            {"action": "compare", "baseline": {"a": 1}},
            'baseline must be an object of digests by name, got {"a":1}',
            "baseline",
        ),
        (
            "/update_weights",
            {"weight_dir": 5},
            "weight_dir must be the path of a directory of safetensors, got 5",
            "weight_dir",
        ),
        (
            "/update_weights",
            {"weight_dir": "a", "update_info": {}},
            "weight_dir and update_info exclude each other: send one of them",
            "weight_dir",
        ),
        ("/sleep", {"level": 0}, "level must be 1 or 2, got 0", "level"),
        ("/sleep", {"level": True}, "level must be 1 or 2, got true", "level"),
        ("/sleep", {"level": "1"}, 'level must be 1 or 2, got "1"', "level"),
        ("/sleep?level=3", None, 'level must be 1 or 2, got "3"', "level"),
        ("/sleep?mode=retract", None, 'mode must be abort, wait or keep, got "retract"', "mode"),
        ("/sleep", {"mode": 1}, "mode must be abort, wait or keep, got 1", "mode"),
        ("/wake_up?tags=kv", None, 'tags must be a list of weights and kv_cache, got "kv" at index 0', "tags"),
        ("/wake_up", {"tags": "weights"}, 'tags must be a list of weights and kv_cache, got "weights"', "tags"),
        (
            "/wake_up",
            {"tags": ["weights", 1]},
            "tags must be a list of weights and kv_cache, got 1 at index 1",
            "tags",
        ),
    ],
)
def test_a_field_outside_its_range_is_named(mock: Mocked, path: str, body: Any, message: str, param: str) -> None:
    assert error_of(mock.frontend.post(path, body), 400, "invalid_request", param) == message
    assert mock.engine.pending_call() is None


def test_there_is_no_draft_model(mock: Mocked) -> None:
    answer = mock.frontend.post("/start_draft_weight_update")
    assert error_of(answer, 400, "unsupported_field") == "there is no draft model to update"


def test_a_directory_is_a_whole_update_in_one_request(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    body = {"weight_dir": "/ckpt/step-1", "weight_version": "step-1", "extra": 1}
    answer = pool.submit(mock.frontend.post, "/update_weights", body)
    for method, args, result in (
        ("start_weight_update", [], None),
        ("update_weights", [{"backend": "disk", "path": "/ckpt/step-1"}], None),
        ("finish_weight_update", ["step-1"], COMMIT),
    ):
        call = mock.engine.next_call(method)
        assert call.args == args
        mock.engine.reply(call, result)
    assert answer.result().json() == {"message": "Weights updated", **COMMIT}
    assert answer.result().headers["x-ignored-fields"] == "extra"


def test_the_same_directory_again_waits_for_the_first_and_is_done_again(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answers = [pool.submit(mock.frontend.post, "/update_weights", {"weight_dir": "w"}) for _ in range(2)]
    for commit in (1, 2):
        for method, result in (
            ("start_weight_update", None),
            ("update_weights", None),
            ("finish_weight_update", {**COMMIT, "weight_commit": commit}),
        ):
            mock.engine.reply(mock.engine.next_call(method), result)
    assert {answer.result().json()["weight_commit"] for answer in answers} == {1, 2}


@pytest.mark.parametrize("failing", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_a_directory_that_fails_is_answered_with_why_and_the_next_one_starts(
    mock: Mocked, pool: ThreadPoolExecutor, failing: str
) -> None:
    answer = pool.submit(mock.frontend.post, "/update_weights", {"weight_dir": "w"})
    for method in ("start_weight_update", "update_weights", "finish_weight_update"):
        call = mock.engine.next_call(method)
        if method == failing:
            mock.engine.refuse(call, "does not fit", "weights_invalid")
            break
        mock.engine.reply(call, None)
    assert error_of(answer.result(), 400, "weights_invalid") == "does not fit"
    again = pool.submit(mock.frontend.post, "/update_weights", {"weight_dir": "w"})
    mock.engine.refuse(mock.engine.next_call("start_weight_update"), "one is open", "update_active")
    error_of(again.result(), 409, "update_active")


def test_the_history_is_the_engines_record(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    for record, consistent in (
        ({"engine_index": 0, "state": "ready", "weight_digest": DIGEST, "commits": [{"a": [1.5, None]}]}, True),
        ({"engine_index": 0, "state": "ready", "weight_digest": None}, True),
        ({"engine_index": 0, "state": "updating", "weight_digest": DIGEST}, False),
        ({"engine_index": 0, "state": "inconsistent", "weight_digest": None}, False),
    ):
        answer = pool.submit(mock.frontend.get, "/weight_history")
        mock.engine.reply(mock.engine.next_call("get_weight_history"), record)
        assert answer.result().json() == {"engines": [record], "consistent": consistent}


@pytest.mark.parametrize(
    ("body", "args", "result"),
    [
        ({"action": "checksum"}, ["checksum"], {"checksums": {"a": DIGEST}}),
        ({"action": "reset", "baseline": None}, ["reset"], {"status": "reset"}),
        (
            {"action": "compare", "baseline": {"a": "x"}},
            ["compare", {"a": "x"}],
            {"match": False, "mismatches": ["a"]},
        ),
    ],
)
def test_the_checker_passes_on_what_the_engine_finds(
    mock: Mocked, pool: ThreadPoolExecutor, body: Any, args: list[Any], result: Any
) -> None:
    assert posted(mock, pool, "/weight_checker", body, "check_weights", args, result) == result


@pytest.mark.parametrize(
    ("query", "body", "args"),
    [
        ("", None, [1, "abort"]),
        ("?level=2&mode=keep", None, [2, "keep"]),
        ("?level=1", {"level": 2, "mode": "wait"}, [1, "wait"]),
        ("", {"level": 2, "mode": None}, [2, "abort"]),
    ],
)
def test_sleep_takes_level_and_mode_from_query_or_body(
    mock: Mocked, pool: ThreadPoolExecutor, query: str, body: Any, args: list[Any]
) -> None:
    answer = posted(mock, pool, f"/sleep{query}", body, "sleep", args)
    assert answer == {"status": "sleeping", "level": args[0]}


@pytest.mark.parametrize(
    ("query", "body", "tags"),
    [
        ("", None, None),
        ("?tags=weights", None, ["weights"]),
        ("?tags=weights&tags=kv_cache", {"tags": ["weights"]}, ["weights", "kv_cache"]),
        ("", {"tags": ["kv_cache"]}, ["kv_cache"]),
        ("", {"tags": []}, None),
    ],
)
@pytest.mark.parametrize("sleeping", [True, False])
def test_waking_up_says_whether_something_still_sleeps(
    mock: Mocked, pool: ThreadPoolExecutor, query: str, body: Any, tags: Any, sleeping: bool
) -> None:
    answer = pool.submit(mock.frontend.post, f"/wake_up{query}", body)
    call = mock.engine.next_call("wake_up")
    assert call.args == [tags]
    mock.engine.reply(call)
    mock.engine.reply(mock.engine.next_call("is_sleeping"), sleeping)
    assert answer.result().json() == {"status": "sleeping" if sleeping else "awake", "tags": tags}


def test_is_sleeping_asks_the_engine(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    for sleeping in (True, False):
        answer = pool.submit(mock.frontend.get, "/is_sleeping")
        mock.engine.reply(mock.engine.next_call("is_sleeping"), sleeping)
        assert answer.result().json() == {"is_sleeping": sleeping}


def test_the_world_is_one_engine_whatever_the_body_says(mock: Mocked) -> None:
    assert mock.frontend.get("/get_world_size").json() == {"world_size": 1}
    assert mock.frontend.http.request("GET", "/get_world_size", json={"a": 1}).json() == {"world_size": 1}


UNFIT = {
    "inconsistent": (
        503,
        "weights_inconsistent",
        "the weights are not whole: an update in place was cut off, or they were reset or dropped; update them all",
    ),
    "undeclared": (
        503,
        "weights_undeclared",
        "nobody has named the weights yet: finish an update with a weight_version, or POST /update_weight_version",
    ),
    "sleeping": (409, "engine_sleeping", "the engine sleeps: POST /wake_up"),
}


@pytest.mark.parametrize("state", UNFIT)
def test_health_tells_why_nothing_can_be_generated(mocks: MockFactory, state: str) -> None:
    status, reason, message = UNFIT[state]
    mock = mocks.start(weight_state=state)
    assert error_of(mock.frontend.get("/health"), status, reason) == message
    for commit, later in ((1, "ready"), (2, state), (3, "updating")):
        mock.engine.stats("a", commit, weight_state=later)
        wait_until(lambda commit=commit: mock.frontend.metrics()["rollspan:weight_commit"] == commit, "the stats")  # type: ignore[misc]
        health = mock.frontend.get("/health")
        assert health.status_code == (status if later == state else 200)


def test_uploads_are_off_without_a_directory_for_them(mock: Mocked) -> None:
    http = mock.frontend.http
    for answer in (
        http.put("/weight_uploads/u/a.safetensors", content=b"x"),
        http.get("/weight_uploads/u"),
        http.delete("/weight_uploads/u"),
        mock.frontend.post("/update_weights", {"update_info": {"backend": "http", "upload": "u"}}),
    ):
        assert error_of(answer, 404, "not_found") == "weight uploads are off: start the server with --weights-spool DIR"
