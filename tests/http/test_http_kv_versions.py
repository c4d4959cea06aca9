"""Provenance on the real engine: which weights computed the KV of an output, and bounds on the age of weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from frontend_process import error_of, wait_until
from real_server import RealServer

from rollspan.models.task import Problem

PROMPT = Problem(12, 34).prompt_ids
LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def commit_of(server: RealServer) -> int:
    (record,) = server.frontend.get("/weight_history").json()["engines"]
    return int(record["weight_commit"])


def asked(server: RealServer, sampling: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    return server.frontend.generate(PROMPT, sampling_params={"temperature": 0, **(sampling or {})}, **fields)


def choice_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


@contextmanager
def begun_together(
    server: RealServer, pool: ThreadPoolExecutor, **fields: Any
) -> Iterator[tuple[Future[httpx.Response], Iterator[dict[str, Any]]]]:
    """A long request collected and one as a stream, let go at the same moment: while one runs, so does the other."""
    frontend = server.frontend

    def both_wait() -> bool:
        # Each pause is answered with how many wait; a request that comes to a paused engine tells nobody.
        assert frontend.post("/pause?mode=keep&clear_cache=false").status_code == 200
        return frontend.metrics()["rollspan:num_requests_waiting"] == 2

    assert not both_wait()
    with ExitStack() as stack:
        collected = pool.submit(asked, server, LONG, **fields)
        stream = frontend.running_stream(PROMPT, sampling_params=LONG, **fields)
        opening = pool.submit(stack.enter_context, stream)
        wait_until(both_wait, "both wait")
        assert frontend.post("/resume").status_code == 200
        yield collected, opening.result()


def start(server: RealServer) -> None:
    assert server.frontend.post("/start_weight_update").status_code == 200


def finish(server: RealServer, directory: str, label: str) -> None:
    """The rest of an update that was started."""
    answer = server.frontend.post("/update_weights", {"update_info": {"path": directory}})
    assert answer.status_code == 200, answer.text
    assert server.frontend.post("/finish_weight_update", {"weight_version": label}).status_code == 200


def kv(label: str, commit: int, first: int, end: int) -> dict[str, Any]:
    return {"version": label, "commit": commit, "start": first, "end": end}


def flat(segments: list[dict[str, Any]], token: int) -> list[int]:
    """Commits of the KV that a token attended to, position by position."""
    (segment,) = [segment for segment in segments if segment["start"] <= token < segment["end"]]
    commits = [span["commit"] for span in segment["kv"] for _ in range(span["start"], span["end"])]
    assert len(commits) == len(PROMPT) + segment["end"] - 1
    return commits[: len(PROMPT) + token]


def test_without_an_update_all_kv_is_of_the_weights_in_force(restored: RealServer) -> None:
    commit = commit_of(restored)
    params = {"ignore_eos": True, "max_tokens": 5}
    choice = choice_of(asked(restored, params, return_kv_versions=True))
    expected = [{"start": 0, "end": 5, "kv": [kv("default", commit, 0, len(PROMPT) + 4)]}]
    assert choice["kv_versions"] == expected
    chunks = restored.frontend.stream(PROMPT, sampling_params={"temperature": 0, **params}, return_kv_versions=True)
    told = [chunk["choices"][0].get("kv_versions") for chunk in chunks]
    assert told == [None] * (len(chunks) - 1) + [expected]
    assert "kv_versions" not in choice_of(asked(restored, params))


@pytest.mark.parametrize("cleared", [False, True])
def test_an_update_in_flight_keeps_the_kv_or_has_it_computed_again(
    restored: RealServer, pool: ThreadPoolExecutor, cleared: bool
) -> None:
    server = restored
    commit = commit_of(server)
    with begun_together(server, pool, return_kv_versions=True) as (collected, chunks):
        received = [next(chunks) for _ in range(3)]
        assert server.frontend.post(f"/pause?mode=keep&clear_cache={str(cleared).lower()}").status_code == 200
        server.update("zero", "zeros")
        assert server.frontend.post("/resume").status_code == 200
        received += list(chunks)
    for choice in (received[-1]["choices"][0], choice_of(collected.result())):
        old, new = choice["weight_commits"]
        assert (old["commit"], new["commit"]) == (commit, commit + 1)
        segments = choice["kv_versions"]
        assert segments[0]["start"] == 0
        assert segments[-1]["end"] == new["end"] == 400
        assert all(one["end"] == other["start"] for one, other in itertools.pairwise(segments))
        boundary = new["start"]
        assert flat(segments, boundary - 1) == [commit] * (len(PROMPT) + boundary - 1)
        first, last = flat(segments, boundary), flat(segments, 399)
        if cleared:
            assert first == [commit + 1] * (len(PROMPT) + boundary)
            assert last == [commit + 1] * (len(PROMPT) + 399)
        else:
            kept = len(PROMPT) + boundary - 1
            assert first == [commit] * kept + [commit + 1]
            assert last == [commit] * kept + [commit + 1] * (len(PROMPT) + 399 - kept)


def test_each_of_several_sequences_has_its_own_kv_versions(restored: RealServer) -> None:
    response = asked(restored, {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 4}, return_kv_versions=True)
    for choice in response.json()["choices"]:
        (segment,) = choice["kv_versions"]
        assert (segment["start"], segment["end"]) == (0, len(choice["token_ids"]))


def test_the_weights_that_scored_the_prompt_are_beside_its_log_probs(restored: RealServer) -> None:
    commit = commit_of(restored)
    params = {"prompt_logprobs": 1, "max_tokens": 1}
    expected = [{"version": "default", "commit": commit, "start": 1, "end": len(PROMPT)}]
    assert asked(restored, params).json()["prompt_weight_commits"] == expected
    first = restored.frontend.stream(PROMPT, sampling_params=params)[0]
    assert first["prompt_weight_commits"] == expected


def test_a_request_that_needs_newer_weights_is_refused_with_its_status(restored: RealServer) -> None:
    commit = commit_of(restored)
    assert asked(restored, {"max_tokens": 1}, min_weight_commit=commit).status_code == 200
    for fields in ({}, {"weight_wait_s": 20}, {"stream": True}):
        answer = asked(restored, {"max_tokens": 1}, min_weight_commit=commit + 1, **fields)
        message = error_of(answer, 409, "stale_weights", "min_weight_commit")
        assert f"{commit + 1} or newer, in force is {commit}" in message


def test_a_request_may_wait_for_the_update_that_is_open(restored: RealServer, pool: ThreadPoolExecutor) -> None:
    server = restored
    commit = commit_of(server)
    start(server)
    params = {"max_tokens": 3, "ignore_eos": True}
    bound = {"min_weight_commit": commit + 1, "weight_wait_s": 60}
    waiting = [pool.submit(asked, server, params, stream=stream, **bound) for stream in (False, True)]
    impatient = asked(server, params, min_weight_commit=commit + 1, weight_wait_s=0.05)
    error_of(impatient, 409, "stale_weights", "min_weight_commit")
    assert not any(answer.done() for answer in waiting)
    finish(server, "zero", "zeros")
    answer = waiting[0].result().json()
    assert (answer["weight_version"], answer["weight_commit"]) == ("zeros", commit + 1)
    assert answer["choices"][0]["token_ids"] == [0, 0, 0]
    assert '"weight_version":"zeros"' in waiting[1].result().text.replace(" ", "")


def test_a_wait_ends_with_the_update_that_was_dropped(restored: RealServer, pool: ThreadPoolExecutor) -> None:
    server = restored
    start(server)
    bound = {"min_weight_commit": commit_of(server) + 1, "weight_wait_s": 60}
    waiting = pool.submit(asked, server, {"max_tokens": 1}, **bound)
    # The engine has taken it in once it answers a call that came later.
    wait_until(lambda: server.frontend.get("/is_paused").status_code == 200, "the engine answers")
    assert server.frontend.post("/abort_weight_update").json()["aborted"] is True
    error_of(waiting.result(), 409, "stale_weights", "min_weight_commit")


@pytest.mark.parametrize("lag", [0, 1])
def test_an_output_that_lags_too_far_behind_ends_with_what_it_has(
    restored: RealServer, pool: ThreadPoolExecutor, lag: int
) -> None:
    server = restored
    commit = commit_of(server)
    with begun_together(server, pool, max_weight_lag=lag) as (collected, chunks):
        received = [next(chunks)]
        assert server.frontend.post("/pause?mode=keep&clear_cache=false").status_code == 200
        for number in range(lag + 1):
            server.update("zero", f"zeros-{number}")
        assert server.frontend.post("/resume").status_code == 200
        received += list(chunks)
    streamed = [token for chunk in received for token in chunk["choices"][0]["token_ids"]]
    for choice, tokens in (
        (choice_of(collected.result()), None),
        (received[-1]["choices"][0], streamed),
    ):
        length = len(choice["token_ids"] if tokens is None else tokens)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "stale_weights")
        assert choice["weight_commits"] == [{"commit": commit, "start": 0, "end": length}]
        assert 0 < length < 400


def test_an_output_within_its_lag_goes_on(restored: RealServer) -> None:
    server = restored
    with server.frontend.running_stream(PROMPT, sampling_params=LONG, max_weight_lag=1) as chunks:
        received = [next(chunks)]
        server.update("zero", "zeros")
        received += list(chunks)
    last = received[-1]["choices"][0]
    assert (last["finish_reason"], len(last["weight_commits"])) == ("length", 2)


def test_a_prompt_may_use_stale_kv_only_when_it_says_so(restored: RealServer) -> None:
    server = restored
    prompt = [3 + position % 9 for position in range(100)]

    def of(**fields: Any) -> dict[str, Any]:
        params = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
        answer = server.frontend.generate(prompt, sampling_params=params, return_kv_versions=True, **fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    commit = commit_of(server)
    of()
    server.update("zero", "zeros")
    stale = of(allow_stale_prefix=True)
    cached = stale["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    spans = [kv("default", commit, 0, cached), kv("zeros", commit + 1, cached, len(prompt) + 1)]
    assert stale["choices"][0]["kv_versions"] == [{"start": 0, "end": 2, "kv": spans}]
    fresh = of()
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    whole = [kv("zeros", commit + 1, 0, len(prompt) + 1)]
    assert fresh["choices"][0]["kv_versions"] == [{"start": 0, "end": 2, "kv": whole}]
