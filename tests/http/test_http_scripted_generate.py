"""Generate against a scripted engine: exactly these outputs in, exactly these bytes out."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from frontend_process import GENERATE, error_of, events, post_bytes
from scripted_frontend import Mocked

from rollspan.protocol.messages import EngineCoreOutput, EngineError, FinishReason, LogprobsLists


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def top_two(*rows: tuple[tuple[int, float], tuple[int, float], tuple[int, float], int]) -> LogprobsLists:
    """Log-probs of positions: sampled, first, second as (token, log-prob), and the sampled token's rank."""
    return LogprobsLists(
        token_ids=np.array([[entry[0] for entry in row[:3]] for row in rows], dtype=np.int32),
        logprobs=np.array([[entry[1] for entry in row[:3]] for row in rows], dtype=np.float32),
        sampled_ranks=np.array([row[3] for row in rows], dtype=np.int32),
    )


def test_a_collected_answer_has_every_field_of_the_contract(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5, 6, 7], request_id="r-1", return_token_ids=True)
    request = mock.engine.next_request()
    assert request.prompt_token_ids == [5, 6, 7]
    assert request.external_req_id == "r-1"
    assert request.request_id.startswith("r-1-")
    assert len(request.request_id) == len("r-1-") + 8
    assert request.sampling_params.max_tokens == 61
    assert request.sampling_params.eos_token_id == 2
    mock.engine.tokens(request.request_id, [10], version="a", commit=3, admission=("a", 3))
    mock.engine.tokens(request.request_id, [11, 2], finish=FinishReason.STOP, version="b", commit=4)
    response = answer.result()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "r-1"
    assert "x-ignored-fields" not in response.headers
    body = response.json()
    assert isinstance(body.pop("created"), int)
    assert body == {
        "request_id": "r-1",
        "model": "mock",
        "output_mode": "tokens",
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": None,
        },
        "engine_index": 0,
        "weight_version": "default",
        "weight_commit": 0,
        "prompt_token_ids": [5, 6, 7],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "choices": [
            {
                "index": 0,
                "token_ids": [10, 11, 2],
                "finish_reason": "stop",
                "stop_reason": None,
                "logprobs": None,
                "routed_experts": None,
                "weight_versions": [
                    {"version": "a", "start": 0, "end": 1},
                    {"version": "b", "start": 1, "end": 3},
                ],
                "weight_commits": [{"commit": 3, "start": 0, "end": 1}, {"commit": 4, "start": 1, "end": 3}],
            }
        ],
    }


def test_a_stream_sends_a_chunk_a_step_and_a_terminal_chunk(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    body = {"token_ids": [5], "sampling_params": {}, "stream": True, "request_id": "s-1", "return_token_ids": True}
    answer = pool.submit(lambda: mock.frontend.http.send(streaming_request(mock, body), stream=True))
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [10], version="a", commit=1)
    response = answer.result()
    assert response.headers["x-request-id"] == "s-1"
    chunks = events(response)
    assert next(chunks) == {
        "request_id": "s-1",
        "choices": [{"index": 0, "token_ids": [10], "finish_reason": None}],
        "prompt_token_ids": [5],
    }
    mock.engine.tokens(request.request_id, [11, 12], version="b", commit=2)
    assert next(chunks) == {
        "request_id": "s-1",
        "choices": [{"index": 0, "token_ids": [11, 12], "finish_reason": None}],
    }
    mock.engine.tokens(request.request_id, [], finish=FinishReason.ABORT, version="b", commit=2)
    last = next(chunks)
    assert isinstance(last.pop("created"), int)
    assert last == {
        "request_id": "s-1",
        "model": "mock",
        "engine_index": 0,
        "weight_version": "default",
        "weight_commit": 0,
        "choices": [
            {
                "index": 0,
                "token_ids": [],
                "finish_reason": "abort",
                "stop_reason": None,
                "weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 3}],
                "weight_commits": [{"commit": 1, "start": 0, "end": 1}, {"commit": 2, "start": 1, "end": 3}],
            }
        ],
    }
    assert list(chunks) == []
    response.close()


def test_a_chunk_carries_its_own_spans_and_usage_when_asked(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_weight_versions": True}
    body = {"token_ids": [5, 6], "sampling_params": {}, "stream": True, "stream_options": options}
    answer = pool.submit(lambda: mock.frontend.http.send(streaming_request(mock, body), stream=True))
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [10, 11], version="a", commit=1)
    response = answer.result()
    chunks = events(response)
    first = next(chunks)
    assert first["choices"][0]["weight_versions"] == [{"version": "a", "start": 0, "end": 2}]
    assert first["choices"][0]["weight_commits"] == [{"commit": 1, "start": 0, "end": 2}]
    assert first["usage"]["completion_tokens"] == 2
    assert "prompt_token_ids" not in first
    mock.engine.tokens(request.request_id, [12], version="b", commit=2)
    assert next(chunks)["choices"][0]["weight_versions"] == [{"version": "b", "start": 2, "end": 3}]
    mock.engine.tokens(request.request_id, [13], finish=FinishReason.LENGTH, version="b", commit=2)
    terminal = next(chunks)
    assert terminal["choices"][0]["token_ids"] == [13]
    assert terminal["choices"][0]["weight_versions"] == [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 4},
    ]
    usage = next(chunks)
    assert usage["choices"] == []
    assert usage["request_id"] == terminal["request_id"]
    assert usage["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": None,
    }
    assert list(chunks) == []
    response.close()


@pytest.mark.parametrize("asked", [0, 2])
def test_logprobs_have_both_spellings_and_the_sampled_token_first(
    mock: Mocked, pool: ThreadPoolExecutor, asked: int
) -> None:
    answer = pool.submit(mock.frontend.generate, [5], sampling_params={"logprobs": asked})
    request = mock.engine.next_request()
    assert request.sampling_params.logprobs == asked
    rows = top_two(
        ((10, -1.5), (9, -0.5), (10, -1.5), 2),
        ((11, -0.25), (11, -0.25), (3, float("-inf")), 1),
    )
    mock.engine.tokens(request.request_id, [10, 11], finish=FinishReason.LENGTH, new_logprobs=rows)
    content = answer.result().json()["choices"][0]["logprobs"]["content"]
    sampled = {"token": "token_id:10", "token_id": 10, "logprob": -1.5, "rank": 2}
    others = [{"token": "token_id:9", "token_id": 9, "logprob": -0.5, "rank": 1}]
    assert content[0] == {**sampled, "top_logprobs": [sampled] + (others if asked else [])}
    sampled = {"token": "token_id:11", "token_id": 11, "logprob": -0.25, "rank": 1}
    others = [{"token": "token_id:3", "token_id": 3, "logprob": -9999.0, "rank": 2}]
    assert content[1] == {**sampled, "top_logprobs": [sampled] + (others if asked else [])}


def test_n_children_have_their_own_ids_seeds_and_stamps(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(
        mock.frontend.generate, [5], request_id="n", sampling_params={"n": 3, "seed": 2**63 - 2, "max_tokens": 9}
    )
    requests = [mock.engine.next_request() for _ in range(3)]
    internal = requests[0].request_id.removeprefix("0_")
    assert [request.request_id for request in requests] == [f"{i}_{internal}" for i in range(3)]
    assert internal.startswith("n-")
    assert [request.sampling_params.seed for request in requests] == [2**63 - 2, 2**63 - 1, 0]
    assert [request.sampling_params.n for request in requests] == [1, 1, 1]
    for index in (2, 0, 1):
        label = "new" if index == 1 else "old"
        mock.engine.tokens(
            requests[index].request_id,
            [index] * (index + 1),
            finish=FinishReason.STOP,
            stop_reason=index,
            version=label,
            commit=int(label == "new"),
            admission=(label, int(label == "new")),
        )
    body = answer.result().json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in body["choices"]] == [[0], [1, 1], [2, 2, 2]]
    assert [choice["stop_reason"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["weight_versions"][0]["version"] for choice in body["choices"]] == ["old", "new", "old"]
    assert (body["weight_version"], body["weight_commit"]) == (None, None)
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens"] == 1


def test_tokens_without_a_label_get_a_span_of_their_own(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5])
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [1], version=None, commit=None)
    mock.engine.tokens(request.request_id, [2], finish=FinishReason.STOP, version="a", commit=1)
    choice = answer.result().json()["choices"][0]
    assert choice["weight_versions"] == [
        {"version": None, "start": 0, "end": 1},
        {"version": "a", "start": 1, "end": 2},
    ]
    answer = pool.submit(mock.frontend.generate, [5])
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP, version=None, commit=None, admission=None)
    body = answer.result().json()
    assert body["choices"][0]["weight_versions"] is None
    assert body["choices"][0]["weight_commits"] is None
    assert body["weight_version"] is None
    answer = pool.submit(mock.frontend.generate, [5])
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [], finish=FinishReason.ABORT)
    assert answer.result().json()["choices"][0]["weight_versions"] == []


def test_a_request_without_an_id_gets_a_random_one(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5])
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP)
    response = answer.result()
    request_id = response.json()["request_id"]
    assert response.headers["x-request-id"] == request_id
    assert len(bytes.fromhex(request_id)) == 16
    assert request.request_id.startswith(f"{request_id}-")


def test_the_header_names_the_request_before_the_body(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5], {"X-Request-Id": "of-header"}, request_id="of-body")
    request = mock.engine.next_request()
    assert request.external_req_id == "of-header"
    mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP)
    assert answer.result().json()["request_id"] == "of-header"


def test_an_id_in_use_is_refused_and_free_again_afterwards(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5], request_id="same")
    request = mock.engine.next_request()
    for stream in (False, True):
        refused = mock.frontend.generate([5], request_id="same", stream=stream)
        message = error_of(refused, 409, "duplicate_request_id", "request_id")
        assert message == 'request_id "same" is already in use by an open request'
        assert refused.headers["x-request-id"] == "same"
    mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP)
    assert answer.result().status_code == 200
    answer = pool.submit(mock.frontend.generate, [5], request_id="same")
    again = mock.engine.next_request()
    assert again.request_id != request.request_id
    mock.engine.tokens(again.request_id, [1], finish=FinishReason.STOP)
    assert answer.result().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("engine_paused", 503, "engine_paused"),
        ("nan_logits", 500, "nan_logits"),
        ("validation_error", 400, "invalid_request"),
        ("engine_error", 500, "engine_error"),
        ("something_new", 500, "internal_error"),
    ],
)
def test_a_refusal_before_the_first_token_is_a_real_status(
    mock: Mocked, pool: ThreadPoolExecutor, code: str, status: int, reason: str, stream: bool
) -> None:
    answer = pool.submit(mock.frontend.generate, [5], request_id="refused", stream=stream)
    request = mock.engine.next_request()
    error = EngineError(code, "the engine's words", retryable=status == 503)
    mock.engine.tokens(request.request_id, [], finish=FinishReason.ERROR, error=error)
    response = answer.result()
    assert error_of(response, status, reason) == "the engine's words"
    assert response.headers["x-request-id"] == "refused"


def test_an_error_after_the_headers_ends_every_choice_and_then_is_an_event(
    mock: Mocked, pool: ThreadPoolExecutor
) -> None:
    body = {"token_ids": [5], "sampling_params": {"n": 3}, "stream": True}
    answer = pool.submit(lambda: mock.frontend.http.send(streaming_request(mock, body), stream=True))
    requests = [mock.engine.next_request().request_id for _ in range(3)]
    mock.engine.tokens(requests[0], [1], version="a", commit=1)
    response = answer.result()
    chunks = events(response)
    assert next(chunks)["choices"][0]["token_ids"] == [1]
    mock.engine.tokens(requests[1], [2], finish=FinishReason.STOP, version="a", commit=1)
    assert next(chunks)["choices"][0]["finish_reason"] == "stop"
    mock.engine.tokens(requests[0], [], finish=FinishReason.ERROR, error=EngineError("nan_logits", "not finite"))
    *ends, last = chunks
    response.close()
    assert {chunk["choices"][0]["index"] for chunk in ends} == {0, 2}
    assert [chunk["choices"][0]["finish_reason"] for chunk in ends] == ["error", "error"]
    assert [chunk["choices"][0]["token_ids"] for chunk in ends] == [[], []]
    spans = {chunk["choices"][0]["index"]: chunk["choices"][0]["weight_versions"] for chunk in ends}
    assert spans == {0: [{"version": "a", "start": 0, "end": 1}], 2: []}
    assert last == {
        "error": {
            "message": "not finite",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
            "reason": "nan_logits",
        }
    }
    assert mock.engine.next_abort() == requests[2]


def test_one_failed_child_fails_the_request_and_stops_the_others(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.generate, [5], sampling_params={"n": 2})
    first, second = mock.engine.next_request(), mock.engine.next_request()
    mock.engine.tokens(first.request_id, [], finish=FinishReason.ERROR, error=EngineError("nan_logits", "not finite"))
    error_of(answer.result(), 500, "nan_logits")
    assert mock.engine.next_abort() == second.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(mock: Mocked, stream: bool) -> None:
    body = json.dumps({"token_ids": [5], "sampling_params": {"n": 2}, "stream": stream}).encode()
    with mock.frontend.connect() as connection:
        connection.sendall(post_bytes(body))
        requests = {mock.engine.next_request().request_id for _ in range(2)}
        if stream:
            mock.engine.tokens(min(requests), [1])
            assert b"data: " in read_until(connection, b"data: ")
    assert {mock.engine.next_abort() for _ in range(2)} == requests


def test_a_slow_reader_gets_everything_in_fewer_chunks(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    steps = 6000
    body = {
        "token_ids": [5],
        "sampling_params": {},
        "stream": True,
        "stream_options": {"include_weight_versions": True},
    }
    answer = pool.submit(lambda: mock.frontend.http.send(streaming_request(mock, body), stream=True))
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [0], version="v0", commit=0)
    response = answer.result()
    for step in range(1, steps):
        # The engine never waits: all of this is taken although nobody reads the answer.
        mock.engine.tokens(request.request_id, [step % 32], version=f"v{step // 1000}", commit=step // 1000)
    mock.engine.tokens(request.request_id, [], finish=FinishReason.LENGTH, version="v5", commit=5)
    assert mock.frontend.get("/health").status_code == 200
    chunks = list(events(response))
    response.close()
    token_ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert token_ids == [step % 32 for step in range(steps)]
    assert chunks[-1]["choices"][0]["weight_versions"] == [
        {"version": f"v{i}", "start": 1000 * i, "end": 1000 * (i + 1)} for i in range(6)
    ]


def test_empty_steps_send_no_chunk(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(mock.frontend.stream, [5])
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [1])
    mock.engine.batch([EngineCoreOutput(request.request_id, [])])
    mock.engine.tokens(request.request_id, [2], finish=FinishReason.STOP)
    assert all(chunk["choices"][0]["token_ids"] for chunk in answer.result())


def streaming_request(mock: Mocked, body: dict[str, Any]) -> Any:
    return mock.frontend.http.build_request("POST", GENERATE, json=body)


def read_until(connection: Any, marker: bytes) -> bytes:
    received = b""
    while marker not in received:
        piece = connection.recv(4096)
        assert piece, received
        received += piece
    return received
