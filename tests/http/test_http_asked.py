"""What a client asks for besides tokens, of a scripted engine: log-probs of the prompt, routed experts, sampling."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from frontend_process import GENERATE, error_of
from scripted_frontend import Mocked

from rollspan.protocol.messages import EngineError, FinishReason, LogprobsLists
from rollspan.provenance import Provenance

#: Of the prompt [5, 6, 7]: token, most probable ones, and the rank of the token.
PROMPT_ROWS = LogprobsLists(
    np.array([[6, 4, 9], [7, 8, 7]], np.int32),
    np.array([[-2.5, -0.25, -np.inf], [-1.0, -0.5, -1.0]], np.float32),
    np.array([9, 2], np.int32),
)
EXPERTS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": f"token_id:{token}"}


PROMPT_LOGPROBS = [
    None,
    {"6": entry(6, -2.5, 9), "4": entry(4, -0.25, 1), "9": entry(9, -9999.0, 2)},
    {"7": entry(7, -1.0, 2), "8": entry(8, -0.5, 1)},
]


def loaded(text: str) -> Any:
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)


def test_log_probs_of_the_prompt_are_in_the_root_by_token(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5, 6, 7], sampling_params={"prompt_logprobs": 2})
    request = mock.engine.next_request()
    assert request.sampling_params.prompt_logprobs == 2
    mock.engine.tokens(request.request_id, [1], new_prompt_logprobs=PROMPT_ROWS)
    mock.engine.tokens(request.request_id, [2], finish=FinishReason.LENGTH)
    assert answer.result().json()["prompt_logprobs"] == PROMPT_LOGPROBS


def test_the_first_sequence_asks_for_the_prompt_and_its_first_chunk_tells(
    mock: Mocked, pool: ThreadPoolExecutor
) -> None:
    params = {"prompt_logprobs": 2, "n": 2}
    answer = pool.submit(mock.frontend.stream_or_error, [5, 6, 7], sampling_params=params, stream=True)
    first, second = (mock.engine.next_request() for _ in range(2))
    assert [first.sampling_params.prompt_logprobs, second.sampling_params.prompt_logprobs] == [2, None]
    mock.engine.tokens(second.request_id, [1], finish=FinishReason.LENGTH)
    mock.engine.tokens(first.request_id, [1], new_prompt_logprobs=PROMPT_ROWS)
    mock.engine.tokens(first.request_id, [2], finish=FinishReason.LENGTH)
    chunks = answer.result()
    told = [chunk for chunk in chunks if "prompt_logprobs" in chunk]
    assert [chunk["choices"][0]["index"] for chunk in told] == [0]
    assert told[0]["prompt_logprobs"] == PROMPT_LOGPROBS
    assert told[0]["choices"][0]["token_ids"][0] == 1


def test_a_prompt_of_one_token_has_no_log_probs_but_the_null(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5], sampling_params={"prompt_logprobs": 0})
    mock.engine.tokens(mock.engine.next_request().request_id, [1], finish=FinishReason.LENGTH)
    assert answer.result().json()["prompt_logprobs"] == [None]


def test_an_engine_that_forgets_the_prompt_is_a_decode_error(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5, 6], sampling_params={"prompt_logprobs": 0})
    mock.engine.tokens(mock.engine.next_request().request_id, [1], finish=FinishReason.LENGTH)
    error_of(answer.result(), 500, "decode_error")


def test_routed_experts_are_a_npy_file_on_the_final_output(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    params = {"routed_experts": True, "routed_experts_prompt_start": 1}
    for stream in (False, True):
        ask = mock.frontend.stream_or_error if stream else mock.frontend.generate
        answer = pool.submit(ask, [5, 6, 7], sampling_params=params, stream=stream)
        request = mock.engine.next_request()
        assert request.sampling_params.routed_experts
        assert request.sampling_params.routed_experts_prompt_start == 1
        mock.engine.tokens(request.request_id, [1])
        mock.engine.tokens(request.request_id, [2], finish=FinishReason.LENGTH, routed_experts=EXPERTS)
        result = answer.result()
        choices = [chunk["choices"][0] for chunk in result] if stream else result.json()["choices"]
        told = [choice["routed_experts"] for choice in choices if "routed_experts" in choice]
        assert len(told) == 1
        experts = loaded(told[0])
        assert experts.dtype == np.uint8
        assert np.array_equal(experts, EXPERTS)


def test_cached_tokens_are_those_that_the_first_sequence_found(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5, 6, 7], sampling_params={"n": 2})
    first, second = (mock.engine.next_request().request_id for _ in range(2))
    mock.engine.tokens(first, [1], finish=FinishReason.LENGTH, prefill_stats={"num_cached_tokens": 1})
    mock.engine.tokens(second, [1], finish=FinishReason.LENGTH, prefill_stats={"num_cached_tokens": 2})
    assert answer.result().json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "param", "expected"),
    [
        ("unsupported_field", "sampling_params.bad_words", "unsupported_field"),
        ("invalid_request", "sampling_params.structured_outputs", "invalid_request"),
        (None, None, "invalid_request"),
    ],
)
def test_what_only_the_engine_can_refuse_is_a_400_before_the_headers(
    mock: Mocked, pool: ThreadPoolExecutor, stream: bool, reason: str | None, param: str | None, expected: str
) -> None:
    body = {"token_ids": [5], "sampling_params": {}, "stream": stream, "request_id": "r"}
    answer = pool.submit(mock.frontend.post, GENERATE, body)
    error = EngineError("validation_error", "the engine cannot do that", False, param, reason)
    request_id = mock.engine.next_request().request_id
    mock.engine.tokens(request_id, [], finish=FinishReason.ERROR, error=error, admission=None)
    assert error_of(answer.result(), 400, expected, param) == "the engine cannot do that"
    assert answer.result().headers["x-request-id"] == "r"


def test_the_samplers_parameters_reach_the_engine(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    params = {
        "min_p": 0.25,
        "presence_penalty": -2,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"3": -100, "31": 0.5},
        "allowed_token_ids": [3, 31, 5],
        "bad_words": ["größe", " x"],
        "structured_outputs": {"json": {"type": "object", "properties": {"b": {}, "a": {}}}},
        "skip_reading_prefix_cache": True,
    }
    answer = pool.submit(mock.frontend.generate, [5], sampling_params=params)
    request = mock.engine.next_request()
    sent = request.sampling_params
    assert (sent.min_p, sent.presence_penalty, sent.frequency_penalty, sent.repetition_penalty) == (0.25, -2, 0.5, 1.5)
    assert sent.logit_bias == {3: -100.0, 31: 0.5}
    assert sent.allowed_token_ids == (3, 31, 5)
    assert sent.bad_words == ("größe", " x")
    assert sent.structured_outputs == {"json": '{"type":"object","properties":{"b":{},"a":{}}}'}
    assert sent.skip_reading_prefix_cache is True
    mock.engine.tokens(request.request_id, [3], finish=FinishReason.LENGTH)
    assert answer.result().status_code == 200


def test_bounds_and_wishes_about_weights_reach_the_engine(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    asked = {"min_weight_commit": 3, "weight_wait_s": 2, "max_weight_lag": 0, "allow_stale_prefix": True}
    answer = pool.submit(mock.frontend.generate, [5], sampling_params={"n": 2}, **asked)
    for request in (mock.engine.next_request(), mock.engine.next_request()):
        assert request.provenance == Provenance(3, 2.0, 0, False, True)
        mock.engine.tokens(request.request_id, [3], finish=FinishReason.LENGTH)
    assert "kv_versions" not in answer.result().json()["choices"][0]
    assert "x-ignored-fields" not in answer.result().headers


def stamped(version: str, commit: int, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "commit": commit, "start": start, "end": end}


def test_what_tokens_attended_to_and_who_scored_the_prompt_is_told_on_request(
    mock: Mocked, pool: ThreadPoolExecutor
) -> None:
    for stream in (False, True):
        ask = mock.frontend.stream_or_error if stream else mock.frontend.generate
        params = {"prompt_logprobs": 0}
        answer = pool.submit(ask, [5, 6, 7], return_kv_versions=True, sampling_params=params, stream=stream)
        request = mock.engine.next_request()
        rows = LogprobsLists(np.array([[6], [7]]), np.array([[-1], [-2]], np.float32), np.array([1, 1]))
        first = {"kv_spans": [("a", 1, 0, 3)], "prompt_spans": [("a", 1, 1, 2), ("b", 2, 2, 3)]}
        mock.engine.tokens(request.request_id, [1], version="a", commit=1, new_prompt_logprobs=rows, **first)
        mock.engine.tokens(request.request_id, [2], version="b", commit=2, finish=FinishReason.LENGTH)
        body = answer.result() if stream else [answer.result().json()]
        (spans,) = [choice["kv_versions"] for part in body for choice in part["choices"] if "kv_versions" in choice]
        assert spans == [
            {"start": 0, "end": 1, "kv": [stamped("a", 1, 0, 3)]},
            {"start": 1, "end": 2, "kv": [stamped("a", 1, 0, 3), stamped("b", 2, 3, 4)]},
        ]
        (prompt,) = [part["prompt_weight_commits"] for part in body if "prompt_weight_commits" in part]
        assert prompt == [stamped("a", 1, 1, 2), stamped("b", 2, 2, 3)]
