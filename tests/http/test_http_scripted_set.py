"""Two scripted engines behind one frontend: who gets which request and call, and what is told of each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend_process import GENERATE, error_of, wait_until
from scripted_frontend import MockedSet

from rollspan.frontend.routing import session_engine
from rollspan.protocol.messages import FinishReason

DIGEST = "blake3:" + "0f" * 32
OTHER = "blake3:" + "f0" * 32
INVALID = ("does not fit", "weights_invalid")
NONE_OPEN = ("none is open", "no_update_active")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


@pytest.fixture(scope="module")
def started(kind: str, socket_directory: Path) -> Iterator[MockedSet]:
    mocked = MockedSet(kind, socket_directory, 2)
    yield mocked
    mocked.close()


@pytest.fixture
def pair(started: MockedSet) -> MockedSet:
    """Two engines for all tests that leave them as they found them."""
    started.forget()
    return started


@pytest.fixture
def own(kind: str, socket_directory: Path) -> Iterator[MockedSet]:
    """Two engines for tests that end one of them."""
    mocked = MockedSet(kind, socket_directory, 2)
    yield mocked
    mocked.close()


def partial(answer: httpx.Response, status: int, reason: str) -> list[dict[str, Any]]:
    """Checks the error of a set and returns what it tells of each engine."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error", "engines"}
    assert (body["error"]["code"], body["error"]["reason"]) == (status, reason), body
    assert [outcome["engine_index"] for outcome in body["engines"]] == list(range(len(body["engines"])))
    return list(body["engines"])


def reasons(outcomes: list[dict[str, Any]]) -> list[str | None]:
    return [outcome["error"]["reason"] if "error" in outcome else None for outcome in outcomes]


def succeeded(answer: httpx.Response, results: list[Any], **fields: Any) -> None:
    outcomes = [{"engine_index": index, "result": result} for index, result in enumerate(results)]
    assert answer.json() == {**fields, "engines": outcomes}


def committed(commit: int, digest: str = DIGEST, label: str = "a") -> dict[str, Any]:
    return {"weight_version": label, "weight_commit": commit, "weight_digest": digest}


def served_by(pair: MockedSet, pool: ThreadPoolExecutor, headers: Any = None) -> int:
    """Which engine takes a request; it is answered there."""
    answer = pool.submit(pair.frontend.generate, [5], headers)
    wait_until(lambda: any(engine.has_pending_request for engine in pair.engines) or answer.done(), "a request")
    assert not answer.done(), answer.result().text
    (index,) = (index for index, engine in enumerate(pair.engines) if engine.has_pending_request)
    request = pair.engines[index].next_request()
    pair.engines[index].tokens(request.request_id, [1], finish=FinishReason.LENGTH, engine_index=index)
    assert answer.result().json()["engine_index"] == index
    return index


def test_requests_take_turns_where_all_are_idle_and_go_where_the_fewest_are_open(
    pair: MockedSet, pool: ThreadPoolExecutor
) -> None:
    first = served_by(pair, pool)
    assert [served_by(pair, pool) for _ in range(3)] == [1 - first, first, 1 - first]
    opened = [pool.submit(pair.frontend.generate, [5], request_id=f"open-{number}") for number in range(6)]
    for engine in pair.engines:
        for _ in range(3):
            engine.next_request()
    assert pair.frontend.post("/abort_requests", {"request_ids": ["open-0", "open-5"]}).json()["aborted"] == 2
    assert pair.frontend.post("/abort_requests").json()["aborted"] == 4
    for answer in opened:
        assert answer.result().json()["choices"][0]["finish_reason"] == "abort"
    assert {answer.result().json()["engine_index"] for answer in opened} == {0, 1}


def test_a_session_stays_with_its_engine(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    for session in (*(f"session-{number}" for number in range(6)), "größe", "\U0001f600"):
        for _ in range(2):
            assert served_by(pair, pool, {b"X-Session-ID": session.encode()}) == session_engine(session, [0, 1])


def test_a_client_may_choose_the_engine(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    for rank in (1, 1, 0, 1):
        assert served_by(pair, pool, {"X-data-parallel-rank": str(rank), "X-Session-ID": "s"}) == rank
    for value in ("2", "-1", "one", "1.0", "", "٣"):
        answer = pair.frontend.http.post(
            GENERATE, json={"token_ids": [1], "sampling_params": {}}, headers={"X-data-parallel-rank": value.encode()}
        )
        message = error_of(answer, 400, "invalid_request", "X-data-parallel-rank")
        assert message == f'X-data-parallel-rank must be an integer from 0 to 1, got "{value}"'


def test_an_id_is_taken_in_the_whole_set(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    opened = pool.submit(pair.frontend.generate, [5], {"X-data-parallel-rank": "0"}, request_id="same")
    pair.engines[0].next_request()
    answer = pair.frontend.generate([5], {"X-data-parallel-rank": "1"}, request_id="same")
    error_of(answer, 409, "duplicate_request_id", "request_id")
    assert not pair.engines[1].has_pending_request
    pair.frontend.post("/abort_requests")
    assert opened.result().status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "method", "args", "answer"),
    [
        ("/pause?mode=keep", None, "pause_generation", ["keep", True], {"status": "paused"}),
        ("/resume", None, "resume_scheduler", [], {"status": "resumed"}),
        ("/sleep", {"level": 2}, "sleep", [2, "abort"], {"status": "sleeping", "level": 2}),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"a": 1}},
            "init_weight_transfer_engine",
            [{"a": 1}],
            {"message": "Weight transfer initialized"},
        ),
        (
            "/shutdown_weight_transfer_engine",
            None,
            "shutdown_weight_transfer_engine",
            [],
            {"message": "Weight transfer shut down"},
        ),
        (
            "/update_weight_version",
            {"new_version": "b"},
            "set_weight_version",
            ["b"],
            {"success": True, "new_version": "b"},
        ),
    ],
)
def test_control_calls_go_to_all_engines_and_tell_what_became_of_each(
    pair: MockedSet, pool: ThreadPoolExecutor, path: str, body: Any, method: str, args: list[Any], answer: Any
) -> None:
    posted = pool.submit(pair.frontend.post, path, body)
    pair.expect(method, args)
    succeeded(posted.result(), [None, None], **answer)
    posted = pool.submit(pair.frontend.post, path, body)
    pair.expect(method, args, [None, ("not now", "update_active")])
    outcomes = partial(posted.result(), 502, "partial_failure")
    assert outcomes[0] == {"engine_index": 0, "result": None}
    assert reasons(outcomes) == [None, "update_active"]
    assert "engine 1: not now" in posted.result().json()["error"]["message"]
    posted = pool.submit(pair.frontend.post, path, body)
    pair.expect(method, args, [("not now", "update_active")] * 2)
    assert reasons(partial(posted.result(), 409, "update_active")) == ["update_active"] * 2
    posted = pool.submit(pair.frontend.post, path, body)
    pair.expect(method, args, [("no", "update_active"), ("never", "unknown_method")])
    assert reasons(partial(posted.result(), 502, "partial_failure")) == ["update_active", "unknown_method"]


@pytest.mark.parametrize(
    ("path", "method", "key", "values"),
    [
        ("/is_paused", "is_scheduler_paused", "is_paused", (True, False)),
        ("/is_sleeping", "is_sleeping", "is_sleeping", (True, False)),
        ("/weight_info", "get_weight_version", "weight_version", ("a", "b")),
    ],
)
def test_what_is_asked_of_the_set_is_what_its_engines_agree_on(
    pair: MockedSet, pool: ThreadPoolExecutor, path: str, method: str, key: str, values: tuple[Any, Any]
) -> None:
    answer = pool.submit(pair.frontend.get, path)
    pair.expect(method, [], [values[0]] * 2)
    assert answer.result().json() == {key: values[0]}
    answer = pool.submit(pair.frontend.get, path)
    pair.expect(method, [], values)
    outcomes = partial(answer.result(), 502, "partial_failure")
    assert [outcome["result"] for outcome in outcomes] == list(values)


def test_infos_are_one_for_all_or_one_for_each(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    for path, name, method in (
        ("/init_weight_transfer_engine", "init_info", "init_weight_transfer_engine"),
        ("/update_weights", "update_info", "update_weights"),
    ):
        for info, sent in (
            ({"a": 1}, [{"a": 1}, {"a": 1}]),
            ([{"a": 1}], [{"a": 1}, {"a": 1}]),
            ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}]),
        ):
            answer = pool.submit(pair.frontend.post, path, {name: info})
            for engine, expected in zip(pair.engines, sent, strict=True):
                call = engine.next_call(method)
                assert call.args == [expected]
                engine.reply(call)
            assert answer.result().status_code == 200
        answer = pair.frontend.post(path, {name: [{}, {}, {}]})
        message = error_of(answer, 400, "invalid_request", name)
        assert message == f"{name} must be an object or a list of 1 or 2 objects, got [{{}},{{}},{{}}]"


def begun(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    """An update that is open everywhere."""
    answer = pool.submit(pair.frontend.post, "/start_weight_update")
    pair.expect("start_weight_update", [])
    succeeded(answer.result(), [None, None], message="Weight update started")


def test_an_update_is_verified_everywhere_before_it_commits_under_one_number(
    pair: MockedSet, pool: ThreadPoolExecutor
) -> None:
    begun(pair, pool)
    answer = pool.submit(pair.frontend.post, "/update_weights", {"update_info": {"path": "w"}})
    pair.expect("update_weights", [{"path": "w"}])
    succeeded(answer.result(), [None, None], message="Weights updated")
    body = {"weight_version": "a", "partial": True, "weight_digest": DIGEST}
    answer = pool.submit(pair.frontend.post, "/finish_weight_update", body)
    options = {"digest": DIGEST, "partial": True}
    pair.expect("prepare_weight_update", [options], [{"weight_digest": DIGEST}] * 2)
    pair.expect("get_weight_commit", [], [3, 7])
    pair.expect("finish_weight_update", ["a", {**options, "commit": 8}], [committed(8)] * 2)
    succeeded(answer.result(), [committed(8)] * 2, message="Weight update finished", **committed(8))


def test_an_update_that_does_not_start_everywhere_is_open_nowhere(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(pair.frontend.post, "/start_weight_update", {"mode": "in_place"})
    pair.expect("start_weight_update", [{"mode": "in_place"}], [None, ("pause first", "pause_required")])
    call = pair.engines[0].next_call("abort_weight_update")
    pair.engines[0].reply(call, True)
    outcomes = partial(answer.result(), 409, "pause_required")
    assert reasons(outcomes) == [None, "pause_required"]
    assert pair.engines[1].pending_call() is None


@pytest.mark.parametrize("step", ["update_weights", "prepare_weight_update"])
def test_what_fails_in_one_engine_before_the_last_step_is_dropped_in_all(
    pair: MockedSet, pool: ThreadPoolExecutor, step: str
) -> None:
    begun(pair, pool)
    if step == "update_weights":
        answer = pool.submit(pair.frontend.post, "/update_weights", {"update_info": {"path": "w"}})
    else:
        answer = pool.submit(pair.frontend.post, "/finish_weight_update")
    waiting = pair.engines[1].next_call(step)
    pair.engines[0].refuse(pair.engines[0].next_call(step), *INVALID)
    for engine, was_open in zip(pair.engines, (False, True), strict=True):
        engine.reply(engine.next_call("abort_weight_update"), was_open)
    pair.engines[1].refuse(waiting, "aborted", "update_aborted")
    outcomes = partial(answer.result(), 400, "weights_invalid")
    assert reasons(outcomes) == ["weights_invalid", "update_aborted"]
    begun(pair, pool)


def test_engines_that_would_differ_commit_nothing(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    begun(pair, pool)
    answer = pool.submit(pair.frontend.post, "/finish_weight_update")
    pair.expect("prepare_weight_update", [{}], [{"weight_digest": DIGEST}, {"weight_digest": OTHER}])
    pair.expect("abort_weight_update", [], [True, True])
    partial(answer.result(), 409, "digest_mismatch")
    message = answer.result().json()["error"]["message"]
    assert message == f"the engines would have different weights: engine 0: {DIGEST}, engine 1: {OTHER}"


def test_a_failure_in_the_last_step_says_which_engines_have_committed(own: MockedSet, pool: ThreadPoolExecutor) -> None:
    begun(own, pool)
    answer = pool.submit(own.frontend.post, "/finish_weight_update")
    own.expect("prepare_weight_update", [{}], [{"weight_digest": DIGEST}] * 2)
    own.expect("get_weight_commit", [], [0, 0])
    own.expect("finish_weight_update", [None, {"commit": 1}], [committed(1), ("out of memory", "internal_error")])
    outcomes = partial(answer.result(), 502, "partial_failure")
    assert outcomes[0] == {"engine_index": 0, "result": committed(1)}
    assert reasons(outcomes) == [None, "internal_error"]
    assert answer.result().json()["error"]["message"] == "1 of 2 engines failed (engine 1: out of memory)"


def test_a_finish_that_is_sent_again_is_answered_as_before(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(pair.frontend.post, "/finish_weight_update", {"weight_version": "a"})
    pair.expect("prepare_weight_update", [{}], [NONE_OPEN] * 2)
    pair.expect("abort_weight_update", [], [False, False])
    pair.expect("finish_weight_update", ["a"], [committed(4)] * 2)
    succeeded(answer.result(), [committed(4)] * 2, message="Weight update finished", **committed(4))
    answer = pool.submit(pair.frontend.post, "/finish_weight_update", {"weight_version": "b"})
    pair.expect("prepare_weight_update", [{}], [NONE_OPEN] * 2)
    pair.expect("abort_weight_update", [], [False, False])
    pair.expect("finish_weight_update", ["b"], [NONE_OPEN] * 2)
    partial(answer.result(), 409, "no_update_active")


@pytest.mark.parametrize(("results", "aborted"), [([True, True], True), ([False, True], True), ([False, False], False)])
def test_an_abort_goes_to_all(pair: MockedSet, pool: ThreadPoolExecutor, results: list[bool], aborted: bool) -> None:
    answer = pool.submit(pair.frontend.post, "/abort_weight_update")
    pair.expect("abort_weight_update", [], results)
    succeeded(answer.result(), results, status="aborted", aborted=aborted)


def test_the_history_has_a_record_for_each(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    for second, consistent in (
        ({"state": "ready", "weight_digest": DIGEST}, True),
        ({"state": "ready", "weight_digest": OTHER}, False),
        ({"state": "inconsistent", "weight_digest": None}, False),
    ):
        records = [{"engine_index": 0, "state": "ready", "weight_digest": DIGEST}, {"engine_index": 1, **second}]
        answer = pool.submit(pair.frontend.get, "/weight_history")
        pair.expect("get_weight_history", [], records)
        assert answer.result().json() == {"engines": records, "consistent": consistent}
    records = [{"engine_index": index, "state": "ready", "weight_digest": None} for index in range(2)]
    answer = pool.submit(pair.frontend.get, "/weight_history")
    pair.expect("get_weight_history", [], records)
    assert answer.result().json()["consistent"] is False


def test_the_checker_looks_at_all(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(pair.frontend.post, "/weight_checker", {"action": "compare", "baseline": {"a": "x"}})
    results = [{"match": False, "mismatches": ["b", "a"]}, {"match": True, "mismatches": []}]
    pair.expect("check_weights", ["compare", {"a": "x"}], results)
    succeeded(answer.result(), results, match=False, mismatches=["a", "b"])
    for second, status in (({"a": DIGEST}, 200), ({"a": OTHER}, 502)):
        answer = pool.submit(pair.frontend.post, "/weight_checker", {"action": "checksum"})
        pair.expect("check_weights", ["checksum"], [{"checksums": {"a": DIGEST}}, {"checksums": second}])
        assert answer.result().status_code == status
        if status == 200:
            assert answer.result().json() == {"checksums": {"a": DIGEST}}


def test_the_server_says_how_many_it_is(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    assert pair.frontend.get("/get_world_size").json() == {"world_size": 2}
    assert pair.frontend.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
    error_of(pair.frontend.get("/get_world_size?include_dp=2"), 400, "invalid_request", "include_dp")
    answer = pool.submit(pair.frontend.get, "/server_info")
    pair.expect("server_info", [], [{"dtype": "a"}, {"dtype": "b"}])
    info = answer.result().json()
    assert info["vllm_config"]["parallel_config"]["data_parallel_size"] == 2
    assert [(engine["engine_index"], engine["dtype"]) for engine in info["engines"]] == [(0, "a"), (1, "b")]
    assert info["engine"] == info["engines"][0]


def test_each_engine_has_metrics_of_its_own(pair: MockedSet, pool: ThreadPoolExecutor) -> None:
    def samples() -> dict[str, float]:
        return {name: value for name, value in pair.frontend.metrics().items() if "weight_version_info" in name}

    for index, engine in enumerate(pair.engines):
        engine.stats(f"label-{index}", 3 + index)
    expected = {
        'rollspan:weight_version_info{version="label-0"}': 1.0,
        'rollspan:weight_version_info{engine="1",version="label-1"}': 1.0,
    }
    wait_until(lambda: samples() == expected, "both labels")
    text = pair.frontend.get("/metrics").text
    assert all('engine="0"' in line or 'engine="1"' in line for line in text.splitlines() if not line.startswith("#"))
    assert text.count("# TYPE rollspan:weight_commit gauge") == 1


def test_health_is_that_of_the_fittest_and_requests_go_there(own: MockedSet, pool: ThreadPoolExecutor) -> None:
    own.engines[0].stats("a", 0, weight_state="inconsistent")
    wait_until(lambda: {served_by(own, pool) for _ in range(3)} == {1}, "requests go to the one that can generate")
    assert own.frontend.get("/health").json() == {"status": "ok"}
    own.engines[1].stats("a", 0, weight_state="sleeping")
    wait_until(lambda: own.frontend.get("/health").status_code != 200, "health tells it")
    error_of(own.frontend.get("/health"), 503, "weights_inconsistent")


def test_a_dead_engine_ends_its_requests_and_comes_back_after_the_next_commit(
    own: MockedSet, pool: ThreadPoolExecutor
) -> None:
    frontend = own.frontend
    opened = [
        pool.submit(frontend.generate, [5], {"X-data-parallel-rank": str(rank)}, request_id=f"r-{rank}")
        for rank in range(2)
    ]
    survivor = own.engines[0].next_request()
    own.engines[1].next_request()
    own.engines[1].dead("out of memory")
    assert "out of memory" in error_of(opened[1].result(), 503, "engine_dead")
    own.engines[0].tokens(survivor.request_id, [1], finish=FinishReason.LENGTH)
    assert opened[0].result().status_code == 200
    assert frontend.get("/health").json() == {"status": "ok"}
    assert [served_by(own, pool) for _ in range(3)] == [0, 0, 0]
    assert (
        served_by(own, pool, {"X-Session-ID": next(s for s in map(str, range(99)) if session_engine(s, [0, 1]))}) == 0
    )
    message = error_of(frontend.generate([5], {"X-data-parallel-rank": "1"}), 503, "engine_dead")
    assert message.startswith("engine 1 takes no requests: ")
    answer = pool.submit(frontend.get, "/weight_history")
    record = {"engine_index": 0, "state": "ready", "weight_digest": DIGEST}
    own.engines[0].reply(own.engines[0].next_call("get_weight_history"), record)
    dead = {"engine_index": 1, "state": "dead", "weight_digest": None}
    assert answer.result().json() == {"engines": [record, dead], "consistent": False}

    own.restart(1)
    wait_until(lambda: is_back(own, pool), "the frontend has found it")
    assert [served_by(own, pool) for _ in range(3)] == [0, 0, 0]
    error_of(frontend.generate([5], {"X-data-parallel-rank": "1"}), 503, "engine_dead")
    own.engines[0].stats("kept", 6, paused=True)
    begun(own, pool)
    answer = pool.submit(frontend.post, "/finish_weight_update")
    own.expect("prepare_weight_update", [{}], [{"weight_digest": DIGEST}] * 2)
    own.expect("get_weight_commit", [], [6, 0])
    for engine, label in zip(own.engines, (None, "kept"), strict=True):
        call = engine.next_call("finish_weight_update")
        assert call.args == [label, {"commit": 7}]
        engine.reply(call, committed(7, label="kept"))
    call = own.engines[1].next_call("pause_generation")
    assert call.args == ["keep", False]
    own.engines[1].reply(call)
    assert answer.result().json()["weight_commit"] == 7
    assert {served_by(own, pool) for _ in range(3)} == {0, 1}


def test_a_frontend_that_starts_late_leaves_out_who_has_missed_commits(
    kind: str, socket_directory: Path, pool: ThreadPoolExecutor
) -> None:
    late = MockedSet(kind, socket_directory, 3, commits=(4, 0, 4))
    try:
        assert [served_by(late, pool) for _ in range(4)] == [0, 2, 0, 2]
        message = error_of(late.frontend.generate([5], {"X-data-parallel-rank": "1"}), 503, "engine_dead")
        reason = "it was restarted or has missed a commit, and waits for the next weight update"
        assert message == f"engine 1 takes no requests: {reason}"
    finally:
        late.close()


def is_back(own: MockedSet, pool: ThreadPoolExecutor) -> bool:
    """Whether a control call reaches both engines."""
    answer = pool.submit(own.frontend.post, "/resume")
    own.engines[0].reply(own.engines[0].next_call("resume_scheduler"))
    call = own.engines[1].pending_call()
    while call is None and not answer.done():
        call = own.engines[1].pending_call()
    if call is not None:
        own.engines[1].reply(call)
    return answer.result().status_code == 200 and call is not None


def test_an_engine_that_is_back_with_other_weights_does_not_hold_up_a_partial_update(
    own: MockedSet, pool: ThreadPoolExecutor
) -> None:
    own.engines[1].close()
    own.restart(1)
    wait_until(lambda: is_back(own, pool), "the frontend has found it")
    begun(own, pool)
    answer = pool.submit(own.frontend.post, "/update_weights", {"update_info": {"delta": {"base_commit": 3}}})
    own.expect("update_weights", [{"delta": {"base_commit": 3}}], [None, ("another base", "base_mismatch")])
    own.engines[1].reply(own.engines[1].next_call("abort_weight_update"), False)
    assert answer.result().status_code == 200
    assert reasons(answer.result().json()["engines"]) == [None, "base_mismatch"]
    answer = pool.submit(own.frontend.post, "/finish_weight_update")
    for method, args, result in (
        ("prepare_weight_update", [{}], {"weight_digest": DIGEST}),
        ("get_weight_commit", [], 3),
        ("finish_weight_update", [None, {"commit": 4}], committed(4)),
    ):
        call = own.engines[0].next_call(method)
        assert call.args == args
        own.engines[0].reply(call, result)
    assert answer.result().json()["weight_commit"] == 4
    assert {served_by(own, pool) for _ in range(3)} == {0}


def test_without_any_engine_everything_is_told_so(own: MockedSet, pool: ThreadPoolExecutor) -> None:
    for engine in own.engines:
        engine.dead("gone")
    wait_until(lambda: own.frontend.get("/health").status_code == 503, "both are gone")
    wait_until(lambda: own.frontend.get("/health").json()["error"]["reason"] == "engine_dead", "both are gone")
    error_of(own.frontend.generate([5]), 503, "engine_dead")
    error_of(own.frontend.post("/pause"), 503, "engine_dead")
    for index in range(2):
        own.restart(index)
    wait_until(lambda: own.frontend.get("/health").json()["error"]["reason"] == "engine_starting", "one is back")
    error_of(own.frontend.generate([5]), 503, "engine_starting")
