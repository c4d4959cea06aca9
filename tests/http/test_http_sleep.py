"""Sleep and waking up on the real engine: memory goes and comes, and nothing is generated in between."""

from __future__ import annotations

from typing import Any

import pytest
from frontend_process import error_of, wait_until
from real_server import RealServer

from rollspan.models.task import Problem

PROMPT = Problem(12, 34).prompt_ids
PARAMS = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}


def tokens(server: RealServer) -> list[int]:
    answer = server.frontend.generate(PROMPT, sampling_params=PARAMS)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def is_sleeping(server: RealServer) -> bool:
    return bool(server.frontend.get("/is_sleeping").json()["is_sleeping"])


def record(server: RealServer) -> dict[str, Any]:
    (found,) = server.frontend.get("/weight_history").json()["engines"]
    return dict(found)


def refused(server: RealServer) -> None:
    """Checks that a sleeping engine says so everywhere."""
    assert is_sleeping(server)
    assert record(server)["state"] == "sleeping"
    for stream in (False, True):
        error_of(server.frontend.generate(PROMPT, stream=stream), 409, "engine_sleeping")
    wait_until(lambda: server.frontend.get("/health").status_code == 409, "health tells it")
    error_of(server.frontend.get("/health"), 409, "engine_sleeping")


def test_an_engine_that_wakes_up_is_as_before(restored: RealServer) -> None:
    server = restored
    before, commit = tokens(server), record(server)["weight_commit"]
    assert server.frontend.post("/sleep").json() == {"status": "sleeping", "level": 1}
    refused(server)
    assert server.frontend.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert not is_sleeping(server)
    assert tokens(server) == before
    wait_until(lambda: server.frontend.get("/health").status_code == 200, "healthy again")
    assert (record(server)["state"], record(server)["weight_commit"]) == ("ready", commit)
    assert server.frontend.post("/wake_up").json() == {"status": "awake", "tags": None}
    assert tokens(server) == before


def test_parts_wake_up_one_by_one_and_weights_may_be_updated_before_the_cache_is_back(restored: RealServer) -> None:
    server, frontend = restored, restored.frontend
    assert frontend.post("/sleep?level=1&mode=wait").status_code == 200
    error_of(frontend.post("/start_weight_update"), 409, "engine_sleeping")
    assert frontend.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
    refused(server)
    server.update("zero", "zeros")
    assert frontend.post("/wake_up?tags=kv_cache").json() == {"status": "awake", "tags": ["kv_cache"]}
    assert tokens(server) == [0] * 6


def test_weights_that_were_dropped_come_back_with_a_complete_update_only(restored: RealServer) -> None:
    server, frontend = restored, restored.frontend
    before = tokens(server)
    assert frontend.post("/sleep", {"level": 2}).json() == {"status": "sleeping", "level": 2}
    refused(server)
    frontend.post("/wake_up", {"tags": ["weights"]})
    assert record(server)["state"] == "inconsistent"
    error_of(frontend.generate(PROMPT), 503, "weights_inconsistent")
    frontend.post("/wake_up")
    assert record(server)["state"] == "inconsistent"
    wait_until(lambda: frontend.get("/health").status_code == 503, "health tells it")
    error_of(frontend.get("/health"), 503, "weights_inconsistent")
    server.update("rl", "again")
    assert tokens(server) == before


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_what_runs_is_ended_or_waited_for_before_the_engine_sleeps(restored: RealServer, mode: str) -> None:
    server = restored
    params = {**PARAMS, "max_tokens": 400}
    with server.frontend.running_stream(PROMPT, sampling_params=params) as chunks:
        received = [next(chunks)]
        assert server.frontend.post(f"/sleep?mode={mode}").status_code == 200
        received += list(chunks)
    end = received[-1]["choices"][0]
    assert end["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in received) == end["weight_commits"][-1]["end"]


def test_requests_that_a_sleep_keeps_go_on_where_they_were(restored: RealServer) -> None:
    server, params = restored, {**PARAMS, "max_tokens": 400}
    expected = server.frontend.generate(PROMPT, sampling_params=params).json()["choices"][0]["token_ids"]
    with server.frontend.running_stream(PROMPT, sampling_params=params) as chunks:
        received = [next(chunks)]
        assert server.frontend.post("/sleep?mode=keep").status_code == 200
        refused(server)
        assert server.frontend.post("/wake_up").status_code == 200
        received += list(chunks)
    assert [token for chunk in received for token in chunk["choices"][0]["token_ids"]] == expected


def test_an_open_update_and_sleep_exclude_each_other(restored: RealServer) -> None:
    frontend = restored.frontend
    assert frontend.post("/start_weight_update").status_code == 200
    error_of(frontend.post("/sleep"), 409, "update_active")
    assert not is_sleeping(restored)
    assert frontend.post("/abort_weight_update").json()["aborted"] is True
    assert frontend.post("/sleep").status_code == 200
