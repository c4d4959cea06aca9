"""Two real engines behind one frontend: one set of weights, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from frontend_process import GENERATE, error_of, wait_until
from real_server import WEIGHTS_FILE
from real_set import SetServer

from rollspan.frontend.routing import session_engine
from rollspan.models.task import Problem

PROMPT = Problem(12, 34).prompt_ids
PARAMS = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
LONG = {**PARAMS, "max_tokens": 450}
OTHER = "blake3:" + "00" * 32
START_SECONDS = 100.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def generated(server: SetServer, rank: int | None = None, session: str | None = None) -> dict[str, Any]:
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    headers |= {} if session is None else {"X-Session-ID": session}
    answer = server.frontend.generate(PROMPT, headers, sampling_params=PARAMS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def tokens(server: SetServer, rank: int) -> list[int]:
    return list(generated(server, rank)["choices"][0]["token_ids"])


def streaming(server: SetServer, stack: ExitStack, rank: int) -> Iterator[dict[str, Any]]:
    """A long stream on one engine, of which the first chunk has come."""
    body = {"token_ids": PROMPT, "sampling_params": LONG, "stream": True}
    headers = {"X-data-parallel-rank": str(rank)}
    response = stack.enter_context(server.frontend.http.stream("POST", GENERATE, json=body, headers=headers))
    lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
    assert response.status_code == 200
    next(lines)
    return lines


def test_requests_are_spread_and_answers_name_their_engine(server_set: SetServer, pool: ThreadPoolExecutor) -> None:
    served = list(pool.map(lambda _: generated(server_set)["engine_index"], range(8)))
    assert set(served) == {0, 1}
    for session in map(str, range(5)):
        expected = session_engine(session, [0, 1])
        assert {generated(server_set, session=session)["engine_index"] for _ in range(2)} == {expected}
    assert [generated(server_set, rank)["engine_index"] for rank in (1, 0)] == [1, 0]


def test_an_update_commits_in_both_under_one_number_and_digest(server_set: SetServer) -> None:
    before = tokens(server_set, 0)
    assert tokens(server_set, 1) == before
    answer = server_set.update("zero", "zeros")
    results = [outcome["result"] for outcome in answer["engines"]]
    assert results[0] == results[1] == {key: answer[key] for key in results[0]}
    assert server_set.history()["consistent"] is True
    for rank in (0, 1):
        answer = generated(server_set, rank)
        assert answer["choices"][0]["token_ids"] == [0] * 6
        assert (answer["weight_version"], answer["weight_commit"]) == ("zeros", results[0]["weight_commit"])
    assert server_set.frontend.get("/weight_info").json() == {"weight_version": "zeros"}


def test_what_fails_anywhere_changes_nothing_anywhere(server_set: SetServer) -> None:
    frontend, before = server_set.frontend, server_set.history()
    commits = [record["weight_commit"] for record in before["engines"]]
    failing: list[tuple[Any, Any, int, str]] = [
        ({"path": "nowhere"}, None, 400, "weights_invalid"),
        ([{"path": "zero"}, {"path": "nowhere"}], None, 400, "weights_invalid"),
        ({"path": "zero"}, {"weight_digest": OTHER}, 409, "digest_mismatch"),
        ([{"path": "zero"}, {"path": "sft"}], None, 409, "digest_mismatch"),
    ]
    for info, finish, status, reason in failing:
        assert frontend.post("/start_weight_update").status_code == 200
        answer = frontend.post("/update_weights", {"update_info": info})
        if answer.status_code == 200:
            answer = frontend.post("/finish_weight_update", finish)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason), answer.text
        assert server_set.states() == ["ready", "ready"]
        assert [record["weight_commit"] for record in server_set.history()["engines"]] == commits
    assert tokens(server_set, 0) == tokens(server_set, 1)
    assert server_set.update("zero")["weight_commit"] == 1 + max(commits)


def test_both_engines_read_one_upload(server_set: SetServer) -> None:
    frontend, spool = server_set.frontend, server_set.engines.checkpoints.spool
    content = (server_set.engines.checkpoints.weights_root / "zero" / WEIGHTS_FILE).read_bytes()
    assert frontend.http.put("/weight_uploads/u/model.safetensors", content=content).status_code == 200
    assert frontend.post("/start_weight_update").status_code == 200
    answer = frontend.post("/update_weights", {"update_info": {"backend": "http", "upload": "u"}})
    assert answer.status_code == 200, answer.text
    assert list(spool.iterdir()) == []
    assert frontend.post("/finish_weight_update").status_code == 200
    assert tokens(server_set, 0) == tokens(server_set, 1) == [0] * 6


def test_a_pause_holds_both(server_set: SetServer, pool: ThreadPoolExecutor) -> None:
    frontend = server_set.frontend
    assert frontend.post("/pause?mode=keep").json()["status"] == "paused"
    assert frontend.get("/is_paused").json() == {"is_paused": True}
    waiting = [pool.submit(tokens, server_set, rank) for rank in (0, 1)]
    server_set.update("zero")
    assert not any(answer.done() for answer in waiting)
    assert frontend.post("/resume").json()["status"] == "resumed"
    assert [answer.result() for answer in waiting] == [[0] * 6] * 2
    assert frontend.get("/is_paused").json() == {"is_paused": False}


def test_one_engine_dies_and_the_other_goes_on_until_it_is_back(server_set: SetServer) -> None:
    frontend, engines = server_set.frontend, server_set.engines
    server_set.update("zero", "zeros")
    with ExitStack() as stack:
        streams = [streaming(server_set, stack, rank) for rank in (0, 1)]
        engines.kill(1)
        *_, error, done = streams[1]
        assert '"reason":"engine_dead"' in error
        assert done == "[DONE]"
        *_, end, done = streams[0]
        assert '"finish_reason":"length"' in end
        assert done == "[DONE]"
    assert frontend.get("/health").json() == {"status": "ok"}
    assert {generated(server_set)["engine_index"] for _ in range(3)} == {0}
    history = server_set.history()
    assert [record["state"] for record in history["engines"]] == ["ready", "dead"]
    assert history["consistent"] is False
    alone = server_set.update("sft", "alone")["weight_commit"]

    engines.start(1)
    wait_until(lambda: server_set.states() == ["ready", "ready"], "engine 1 is back", START_SECONDS)
    assert server_set.history()["consistent"] is False
    assert {generated(server_set)["engine_index"] for _ in range(3)} == {0}
    error_of(frontend.generate(PROMPT, {"X-data-parallel-rank": "1"}), 503, "engine_dead")
    assert frontend.get("/weight_info").json() == {"weight_version": "alone"}
    answer = server_set.update("zero")
    assert (answer["weight_version"], answer["weight_commit"]) == ("alone", alone + 1)
    assert server_set.history()["consistent"] is True
    for rank in (0, 1):
        answer = generated(server_set, rank)
        assert (answer["weight_version"], answer["weight_commit"]) == ("alone", alone + 1)
        assert answer["choices"][0]["token_ids"] == [0] * 6
