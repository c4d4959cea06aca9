"""Generate on the real engine with the embedded model: what a client sees."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from frontend_process import GENERATE, error_of, post_bytes, wait_until
from real_server import EOS, MAX_MODEL_LEN, VOCABULARY_SIZE, RealServer

from rollspan.models.task import Problem, split_problems

GREEDY = {"temperature": 0}
PROBLEMS = split_problems()[0][:64]
PROMPT = Problem(12, 34).prompt_ids


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as executor:
        yield executor


@pytest.fixture(scope="session")
def answers_of_both() -> dict[str, Any]:
    """What the frontend that was tested first answered."""
    return {}


def choice_of(server: RealServer, prompt: list[int], **params: Any) -> dict[str, Any]:
    response = server.frontend.generate(prompt, sampling_params=params)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> list[int]:
    return [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
        for token in choice["token_ids"]
    ]


def test_the_embedded_model_answers_sums(server: RealServer) -> None:
    solved = 0
    for problem in PROBLEMS[:16]:
        choice = choice_of(server, problem.prompt_ids, **GREEDY)
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        assert choice["token_ids"][-1] == EOS
        length = len(choice["token_ids"])
        assert [(span["start"], span["end"]) for span in choice["weight_versions"]] == [(0, length)]
        solved += problem.is_solved_by(choice["token_ids"])
    assert solved >= 8


def test_streamed_and_collected_answers_agree(server: RealServer) -> None:
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "ignore_eos": True, "logprobs": 2}
    collected = choice_of(server, PROMPT, **params)
    chunks = server.frontend.stream(PROMPT, sampling_params=params, stream_options={"include_usage": True})
    assert joined(chunks) == collected["token_ids"]
    content = [entry for chunk in chunks[:-1] for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert content == collected["logprobs"]["content"]
    terminal = chunks[-2]
    assert terminal["choices"][0]["finish_reason"] == "length"
    for key in ("weight_versions", "weight_commits", "stop_reason"):
        assert terminal["choices"][0][key] == collected[key]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    assert chunks[-1]["usage"]["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("asked", [0, 3, -1])
def test_logprobs_are_those_of_the_distribution(server: RealServer, asked: int) -> None:
    choice = choice_of(server, PROMPT, seed=3, max_tokens=8, ignore_eos=True, logprobs=asked)
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    for entry in content:
        assert entry["token"] == f"token_id:{entry['token_id']}"
        assert math.isfinite(entry["logprob"])
        assert entry["logprob"] <= 0
        top = entry["top_logprobs"]
        assert top[0] == {key: entry[key] for key in ("token", "token_id", "logprob", "rank")}
        ranks = [other["rank"] for other in top[1:]]
        assert ranks == sorted(ranks)
        ids = {other["token_id"] for other in top}
        assert len(ids) == len(top)
        if asked == -1:
            assert len(ids) == VOCABULARY_SIZE
            assert sum(math.exp(other["logprob"]) for other in top) == pytest.approx(1, abs=1e-3)
        else:
            assert asked <= len(top) <= asked + 1 or asked == 0
    assert choice_of(server, PROMPT, max_tokens=2)["logprobs"] is None


def test_a_seed_gives_the_same_tokens_from_both_frontends(server: RealServer, answers_of_both: dict[str, Any]) -> None:
    params = {"temperature": 1.5, "seed": 2**62 + 1, "max_tokens": 60, "ignore_eos": True, "top_k": 12, "top_p": 0.99}
    first = choice_of(server, PROMPT, **params)["token_ids"]
    assert first == choice_of(server, PROMPT, **params)["token_ids"]
    assert first == answers_of_both.setdefault("seeded", first)
    assert first != choice_of(server, PROMPT, **{**params, "seed": 7})["token_ids"]


def test_child_i_is_the_request_with_seed_plus_i(server: RealServer) -> None:
    params = {"temperature": 1.5, "seed": 11, "max_tokens": 20, "ignore_eos": True}
    response = server.frontend.generate(PROMPT, sampling_params={**params, "n": 4}).json()
    alone = [choice_of(server, PROMPT, **{**params, "seed": 11 + index})["token_ids"] for index in range(4)]
    assert [choice["token_ids"] for choice in response["choices"]] == alone
    assert response["usage"]["completion_tokens"] == 80
    chunks = server.frontend.stream(PROMPT, sampling_params={**params, "n": 4})
    assert [joined(chunks, index) for index in range(4)] == alone
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


def test_stop_tokens_end_the_output_and_are_part_of_it(server: RealServer) -> None:
    plain = choice_of(server, PROMPT, **GREEDY)["token_ids"]
    stopped = choice_of(server, PROMPT, **GREEDY, stop_token_ids=[plain[1]])
    assert stopped["token_ids"] == plain[:2]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", plain[1])
    later = choice_of(server, PROMPT, **GREEDY, stop_token_ids=[plain[1]], min_tokens=6, max_tokens=6)
    assert len(later["token_ids"]) == 6


def test_ignore_eos_goes_on_and_min_tokens_masks_it(server: RealServer) -> None:
    plain = choice_of(server, PROMPT, **GREEDY)["token_ids"]
    ignored = choice_of(server, PROMPT, **GREEDY, ignore_eos=True, max_tokens=12)
    assert ignored["token_ids"][: len(plain)] == plain
    assert (len(ignored["token_ids"]), ignored["finish_reason"]) == (12, "length")
    masked = choice_of(server, PROMPT, **GREEDY, min_tokens=8, max_tokens=9)
    assert EOS not in masked["token_ids"][:8]


def test_without_max_tokens_the_model_has_all_the_room(server: RealServer) -> None:
    prompt = PROMPT + [4] * (MAX_MODEL_LEN - len(PROMPT) - 3)
    choice = choice_of(server, prompt, **GREEDY, ignore_eos=True)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
    choice = choice_of(server, [*prompt, 4, 4], **GREEDY, ignore_eos=True, max_tokens=10**9)
    assert len(choice["token_ids"]) == 1
    error_of(server.frontend.generate([*prompt, 4, 4, 4]), 400, "prompt_too_long", "token_ids")


def test_64_requests_at_once_each_get_their_own_answer(server: RealServer, pool: ThreadPoolExecutor) -> None:
    def collected(problem: Problem) -> list[int]:
        return list(choice_of(server, problem.prompt_ids, **GREEDY)["token_ids"])

    def streamed(problem: Problem) -> list[int]:
        return joined(server.frontend.stream(problem.prompt_ids, sampling_params=GREEDY))

    alone = [collected(problem) for problem in PROBLEMS]
    halves = [*pool.map(collected, PROBLEMS[:32]), *pool.map(streamed, PROBLEMS[32:])]
    together = [
        future.result()
        for future in [pool.submit(streamed if i % 2 else collected, problem) for i, problem in enumerate(PROBLEMS)]
    ]
    assert halves == alone
    assert together == alone


def test_malformed_requests_leave_the_server_unharmed(server: RealServer) -> None:
    http = server.frontend.http
    for body in (
        b"",
        b"\x00",
        b"[" * 5000,
        b'{"token_ids": [1e400]}',
        json.dumps({"token_ids": [VOCABULARY_SIZE]}).encode(),
    ):
        assert http.post(GENERATE, content=body, headers={"Content-Type": "application/json"}).status_code == 400
    with server.frontend.connect() as connection:
        connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        connection.recv(4096)
    assert choice_of(server, PROMPT, **GREEDY)["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(server: RealServer, stream: bool) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"n": 4, "ignore_eos": True}, "stream": stream}
    aborted = 'rollspan:request_success_total{finished_reason="abort"}'
    before = server.frontend.metrics()[aborted]
    with server.frontend.connect() as connection:
        connection.sendall(post_bytes(json.dumps(body).encode()))
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        else:
            wait_until(lambda: server.frontend.metrics()["rollspan:num_requests_running"] == 4, "running")

    def gone() -> bool:
        samples = server.frontend.metrics()
        # The engine's gauges come a moment after what the frontend counts; before the first report they are 0 as well.
        idle = samples["rollspan:num_requests_running"] == samples["rollspan:kv_cache_usage_perc"] == 0
        return idle and samples[aborted] == before + 4

    wait_until(gone, "stopped, and its blocks free")


def test_skyrl_gets_what_it_reads(server: RealServer) -> None:
    body = {
        "sampling_params": {
            "n": 2,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_tokens": 6,
            "logprobs": 0,
            "output_kind": 2,
            "stop": None,
            "ignore_eos": True,
            "skip_special_tokens": True,
            "include_stop_str_in_output": True,
            "repetition_penalty": 1.0,
            "prompt_logprobs": None,
        },
        "model": server.frontend.get("/v1/models").json()["data"][0]["id"],
        "token_ids": PROMPT,
        "cache_salt": "0",
    }
    response = server.frontend.http.post(GENERATE, json=body, headers={"X-Session-ID": "session-1"})
    assert response.status_code == 200, response.text
    assert response.headers["x-ignored-fields"] == "sampling_params.output_kind"
    answer = response.json()
    assert answer["prompt_logprobs"] is None
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == 6
        assert all(isinstance(entry["logprob"], float) for entry in choice["logprobs"]["content"])
        assert choice["finish_reason"] == "length"


def test_renderers_get_what_they_read(server: RealServer) -> None:
    body = {
        "model": server.frontend.get("/v1/models").json()["data"][0]["id"],
        "token_ids": PROMPT,
        "sampling_params": {
            "temperature": 1.0,
            "max_tokens": 5,
            "stop_token_ids": [EOS],
            "logprobs": 1,
            "skip_special_tokens": False,
            "routed_experts_prompt_start": 0,
        },
        "cache_salt": "step-1",
        "priority": 0,
    }
    response = server.frontend.http.post(GENERATE, json=body, headers={"X-Session-ID": "s"})
    answer = response.json()
    assert response.status_code == 200, answer
    assert answer["request_id"]
    choice = answer["choices"][0]
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token}"
        assert math.isfinite(entry["logprob"])
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_a_stream_is_read_while_it_is_made(server: RealServer) -> None:
    with server.frontend.running_stream(PROMPT, sampling_params={"ignore_eos": True, "max_tokens": 500}) as chunks:
        first = next(chunks)
        wait_until(lambda: server.frontend.metrics()["rollspan:num_requests_running"] == 1, "running")
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in [first, *chunks]) == 500
