"""The life of weight updates on the real engine: digests, histories, what is dropped and what is mended."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontend_process import error_of, wait_until
from real_server import HEAD, NORM, WEIGHTS_FILE, RealServer
from safetensors.numpy import load_file, save_file

from rollspan.models.task import Problem

PROMPT = Problem(12, 34).prompt_ids
OTHER = "blake3:" + "00" * 32


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def record(server: RealServer) -> dict[str, Any]:
    """The engine's record in the history."""
    (found,) = server.frontend.get("/weight_history").json()["engines"]
    return dict(found)


def digest(server: RealServer) -> str:
    """Digest of the weights in force, once it is known."""
    wait_until(lambda: record(server)["weight_digest"] is not None, "a digest")
    return str(record(server)["weight_digest"])


def commit_of(server: RealServer) -> int:
    return int(record(server)["weight_commit"])


def sent(server: RealServer, path: str | Path) -> None:
    """Starts an update and sends a directory of weights."""
    assert server.frontend.post("/start_weight_update").status_code == 200
    answer = server.frontend.post("/update_weights", {"update_info": {"path": str(path)}})
    assert answer.status_code == 200, answer.text


def greedy(server: RealServer, **fields: Any) -> dict[str, Any]:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    answer = server.frontend.generate(PROMPT, sampling_params=params, **fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_the_history_tells_what_became_of_each_update(restored: RealServer) -> None:
    server = restored
    before, first = commit_of(server), digest(server)
    server.update("zero", "zeros")
    server.frontend.post("/update_weight_version", {"new_version": "renamed"})
    sent(server, "rl")
    error_of(server.frontend.post("/finish_weight_update", {"weight_digest": OTHER}), 409, "digest_mismatch")
    now = record(server)
    assert (now["engine_index"], now["state"], now["declared"], now["update"]) == (0, "ready", True, None)
    assert (now["weight_version"], now["weight_commit"]) == ("renamed", before + 1)
    assert now["weight_digest"] != first
    update, relabel = now["commits"][-2:]
    assert (update["kind"], update["weight_version"], update["weight_commit"]) == ("update", "zeros", before + 1)
    assert update["weight_digest"] == relabel["weight_digest"] == now["weight_digest"]
    tensors = load_file(server.engine.weights_root / "zero" / WEIGHTS_FILE)
    assert update["tensors"] == len(tensors)
    assert update["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert update["partial"] is False
    assert "zero" in update["source"]
    assert {"receive", "verify", "prepare", "commit"} <= update["seconds"].keys()
    assert (relabel["kind"], relabel["weight_version"], relabel["weight_commit"]) == ("relabel", "renamed", before + 1)
    assert now["failures"][-1]["reason"] == "digest_mismatch"
    assert now["commits"][0]["kind"] == "load"


def test_the_same_weights_have_the_same_digest_and_a_commit_of_their_own(restored: RealServer) -> None:
    server = restored
    commit, before, tokens = commit_of(server), digest(server), greedy(server)["choices"][0]["token_ids"]
    sent(server, "rl")
    answer = server.frontend.post("/finish_weight_update", {"weight_version": "same", "weight_digest": before}).json()
    expected = {"weight_version": "same", "weight_commit": commit + 1, "weight_digest": before}
    assert answer == {"message": "Weight update finished", **expected}
    assert greedy(server)["choices"][0]["token_ids"] == tokens
    history = server.frontend.get("/weight_history").json()
    assert history["consistent"] is True
    assert history["engines"][0]["state"] == "ready"


def test_a_digest_that_differs_drops_the_update_and_nothing_else(restored: RealServer) -> None:
    server = restored
    commit, before = commit_of(server), digest(server)
    sent(server, "zero")
    message = error_of(server.frontend.post("/finish_weight_update", {"weight_digest": OTHER}), 409, "digest_mismatch")
    assert OTHER in message
    assert (commit_of(server), digest(server), server.label()) == (commit, before, "default")
    error_of(server.frontend.post("/finish_weight_update"), 409, "no_update_active")
    assert server.update("zero") == commit + 1


def test_an_update_may_be_aborted_at_any_time(restored: RealServer) -> None:
    server = restored
    commit, tokens = commit_of(server), greedy(server)["choices"][0]["token_ids"]
    sent(server, "zero")
    open_update = record(server)
    assert open_update["state"] == "updating"
    assert open_update["update"]["tensors"] > 0
    assert server.frontend.get("/weight_history").json()["consistent"] is False
    assert server.frontend.get("/health").status_code == 200
    for aborted in (True, False):
        answer = server.frontend.post("/abort_weight_update")
        assert answer.json() == {"status": "aborted", "aborted": aborted}
    error_of(server.frontend.post("/finish_weight_update"), 409, "no_update_active")
    assert (commit_of(server), greedy(server)["choices"][0]["token_ids"]) == (commit, tokens)
    assert server.update("zero") == commit + 1
    assert greedy(server)["choices"][0]["token_ids"] == [0] * 6


def test_a_part_of_the_weights_must_say_so(restored: RealServer) -> None:
    server = restored
    commit = commit_of(server)
    head = server.engine.tensors(**{HEAD: None})[HEAD]
    part = server.engine.save("head-only", {HEAD: head})
    for body in (None, {"partial": False}):
        sent(server, part)
        error_of(server.frontend.post("/finish_weight_update", body), 400, "weights_invalid")
    sent(server, part)
    assert server.frontend.post("/finish_weight_update", {"partial": True}).json()["weight_commit"] == commit + 1
    assert greedy(server)["choices"][0]["token_ids"] == [0] * 6
    assert record(server)["commits"][-1]["partial"] is True
    whole = digest(server)
    server.update("zero")
    assert digest(server) == whole


def test_a_delta_replaces_values_of_the_weights_it_is_based_on(restored: RealServer) -> None:
    server = restored
    head = server.engine.tensors()[HEAD]
    everything = {
        f"{HEAD}.indices": np.arange(head.size, dtype=np.int64),
        f"{HEAD}.values": np.zeros_like(head).ravel(),
    }
    path = server.engine.save("delta", everything)
    commit = commit_of(server)
    for delta, reason in (({"base_commit": commit - 1}, "base_mismatch"), ({"base_digest": OTHER}, "base_mismatch")):
        assert server.frontend.post("/start_weight_update").status_code == 200
        info = {"path": str(path), "delta": delta}
        error_of(server.frontend.post("/update_weights", {"update_info": info}), 409, reason)
    assert server.frontend.post("/start_weight_update").status_code == 200
    info = {"path": str(path), "delta": {"base_commit": commit, "base_digest": digest(server)}}
    assert server.frontend.post("/update_weights", {"update_info": info}).status_code == 200
    assert server.frontend.post("/finish_weight_update").json()["weight_commit"] == commit + 1
    assert greedy(server)["choices"][0]["token_ids"] == [0] * 6


def test_an_update_in_place_needs_a_pause_and_mends_what_a_failure_left(restored: RealServer) -> None:
    server, frontend = restored, restored.frontend
    commit, label = commit_of(server), server.label()
    error_of(frontend.post("/start_weight_update", {"mode": "in_place"}), 409, "pause_required")
    assert frontend.post("/pause?mode=keep").status_code == 200
    assert frontend.post("/start_weight_update", {"mode": "in_place"}).status_code == 200
    error_of(frontend.post("/resume"), 409, "update_active")
    broken = server.engine.new_directory("broken")
    zeros = server.engine.tensors(**{HEAD: None})
    save_file({key: value for key, value in zeros.items() if key != NORM}, broken / WEIGHTS_FILE)
    assert frontend.post("/update_weights", {"update_info": {"path": str(broken)}}).status_code == 200
    error_of(frontend.post("/finish_weight_update", {"partial": False}), 400, "weights_invalid")
    assert record(server)["state"] == "inconsistent"
    assert frontend.get("/weight_history").json()["consistent"] is False
    wait_until(lambda: frontend.get("/health").status_code == 503, "health tells it")
    error_of(frontend.get("/health"), 503, "weights_inconsistent")
    error_of(frontend.post("/resume"), 503, "weights_inconsistent")
    for stream in (False, True):
        error_of(frontend.generate(PROMPT, stream=stream), 503, "weights_inconsistent")
    assert (commit_of(server), server.label()) == (commit, label)
    assert frontend.post("/start_weight_update", {"mode": "in_place"}).status_code == 200
    assert frontend.post("/update_weights", {"update_info": {"path": "zero"}}).status_code == 200
    assert frontend.post("/finish_weight_update", {"weight_version": "mended"}).json()["weight_commit"] == commit + 1
    assert frontend.post("/resume").status_code == 200
    wait_until(lambda: frontend.get("/health").status_code == 200, "healthy again")
    assert greedy(server)["choices"][0]["token_ids"] == [0] * 6


def test_a_directory_in_one_request_is_a_whole_update_and_may_come_twice(restored: RealServer) -> None:
    server, frontend = restored, restored.frontend
    commit = commit_of(server)
    path = str(server.engine.weights_root / "zero")
    first, second = (frontend.post("/update_weights", {"weight_dir": path}) for _ in range(2))
    assert first.json() == {
        "message": "Weights updated",
        "weight_version": "default",
        "weight_commit": commit + 1,
        "weight_digest": digest(server),
    }
    assert second.json() == {**first.json(), "weight_commit": commit + 2}
    assert greedy(server)["choices"][0]["token_ids"] == [0] * 6
    named = frontend.post("/update_weights", {"weight_dir": "rl", "weight_version": 7}).json()
    assert (named["weight_version"], named["weight_commit"]) == ("7", commit + 3)
    error_of(frontend.post("/update_weights", {"weight_dir": "nowhere"}), 400, "weights_invalid")
    assert frontend.post("/start_weight_update").status_code == 200
    error_of(frontend.post("/update_weights", {"weight_dir": "rl"}), 409, "update_active")


def test_a_request_may_bound_the_age_of_its_weights(restored: RealServer, pool: ThreadPoolExecutor) -> None:
    server, frontend = restored, restored.frontend
    commit = commit_of(server)
    assert greedy(server, min_weight_commit=commit)["weight_commit"] == commit
    for wait in (0, 0.0, 30):
        for stream in (False, True):
            answer = frontend.generate(PROMPT, min_weight_commit=commit + 1, weight_wait_s=wait, stream=stream)
            error_of(answer, 409, "stale_weights", "min_weight_commit")
    sent(server, "zero")
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    waiting = pool.submit(
        frontend.generate, PROMPT, min_weight_commit=commit + 1, weight_wait_s=30, sampling_params=params
    )
    too_short = frontend.generate(PROMPT, min_weight_commit=commit + 1, weight_wait_s=0.05)
    error_of(too_short, 409, "stale_weights", "min_weight_commit")
    assert not waiting.done()
    assert frontend.post("/finish_weight_update").status_code == 200
    assert waiting.result().json()["weight_commit"] == commit + 1
    assert waiting.result().json()["choices"][0]["token_ids"] == [0] * 6


def test_a_request_that_waits_for_an_update_is_refused_when_that_is_dropped(
    restored: RealServer, pool: ThreadPoolExecutor
) -> None:
    server, frontend = restored, restored.frontend
    commit = commit_of(server)
    sent(server, "zero")
    waiting = pool.submit(frontend.generate, PROMPT, min_weight_commit=commit + 1, weight_wait_s=60, request_id="w")
    wait_until(lambda: frontend.metrics()["rollspan:num_requests_waiting"] > 0 or waiting.done(), "it waits")
    assert not waiting.done()
    assert frontend.post("/abort_weight_update").json()["aborted"] is True
    error_of(waiting.result(), 409, "stale_weights", "min_weight_commit")


@pytest.mark.parametrize("lag", [0, 1])
def test_an_output_that_lags_too_far_behind_ends_with_what_it_has(restored: RealServer, lag: int) -> None:
    server = restored
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 500}
    with server.frontend.running_stream(PROMPT, sampling_params=params, max_weight_lag=lag) as chunks:
        received = [next(chunks)]
        server.frontend.post("/pause?mode=keep&clear_cache=false")
        for _ in range(lag + 1):
            server.update("rl")
        server.frontend.post("/resume")
        received += list(chunks)
    end = received[-1]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("abort", "stale_weights")
    tokens = sum(len(chunk["choices"][0]["token_ids"]) for chunk in received)
    assert 0 < tokens < 500
    assert end["weight_commits"] == [{"commit": commit_of(server) - lag - 1, "start": 0, "end": tokens}]


def test_the_checker_compares_single_tensors(restored: RealServer) -> None:
    server, frontend = restored, restored.frontend
    before = frontend.post("/weight_checker", {"action": "checksum"}).json()["checksums"]
    assert set(before) >= {HEAD, NORM}
    same = frontend.post("/weight_checker", {"action": "compare", "baseline": before}).json()
    assert same == {"match": True, "mismatches": []}
    server.update("zero")
    other = frontend.post("/weight_checker", {"action": "compare", "baseline": before}).json()
    assert other == {"match": False, "mismatches": [HEAD]}


def test_updates_and_how_long_they_took_are_counted(restored: RealServer) -> None:
    server = restored
    before = server.frontend.metrics()
    server.update("sft")
    sent(server, "rl")
    server.frontend.post("/finish_weight_update", {"weight_digest": OTHER})
    failures = 'rollspan:weight_updates_total{result="failure"}'
    wait_until(lambda: server.frontend.metrics()[failures] == before[failures] + 1, "the failure is counted")
    after = server.frontend.metrics()
    for name in (
        'rollspan:weight_updates_total{result="success"}',
        "rollspan:weight_update_stall_seconds_count",
        *(f'rollspan:weight_update_duration_seconds_count{{phase="{phase}"}}' for phase in ("receive", "commit")),
    ):
        assert after[name] == before[name] + 1, name


def test_stale_tokens_are_counted(restored: RealServer) -> None:
    server = restored
    before = server.frontend.metrics()
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}
    with server.frontend.running_stream(PROMPT, sampling_params=params) as chunks:
        received = [next(chunks)]
        server.frontend.post("/pause?mode=keep&clear_cache=false")
        server.update("sft")
        server.frontend.post("/resume")
        received += list(chunks)
    first, second = (span["end"] - span["start"] for span in received[-1]["choices"][0]["weight_commits"])
    after = server.frontend.metrics()
    for lag, tokens in (("0", second), ("1", first)):
        name = f'rollspan:generation_tokens_by_lag_total{{lag="{lag}"}}'
        assert after[name] - before[name] == tokens
