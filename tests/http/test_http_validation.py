"""Bad and odd requests: 4xx naming the field, in the same words from both frontends, and a server that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend_process import GENERATE, error_of
from scripted_frontend import Mocked, MockFactory

from rollspan.protocol.messages import FinishReason

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def answered(
    mock: Mocked, pool: ThreadPoolExecutor, body: Any, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Posts a request that must reach the engine, which answers it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = pool.submit(mock.frontend.http.post, GENERATE, content=content, headers=headers or JSON)
    request = mock.engine.next_request()
    mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP)
    response = answer.result()
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "token_ids", "token_ids is required"),
        ({"token_ids": [1]}, "sampling_params", "sampling_params is required"),
        (
            {"token_ids": [], "sampling_params": {}},
            "token_ids",
            "token_ids must be a non-empty list of integers from 0 to 31, got []",
        ),
        (
            {"token_ids": "1", "sampling_params": {}},
            "token_ids",
            'token_ids must be a non-empty list of integers from 0 to 31, got "1"',
        ),
        *(
            (
                {"token_ids": [1, bad], "sampling_params": {}},
                "token_ids",
                f"token_ids must be a non-empty list of integers from 0 to 31, got {json.dumps(bad)} at index 1",
            )
            for bad in (32, -1, 1.0, 1.5, True, None, "1", [1])
        ),
        (
            {"token_ids": [1], "sampling_params": []},
            "sampling_params",
            "sampling_params must be an object, got []",
        ),
        (
            {"token_ids": [1], "sampling_params": {"temperature": 3}},
            "sampling_params.temperature",
            "sampling_params.temperature must be a number from 0 to 2, got 3",
        ),
        (
            {"token_ids": [1], "sampling_params": {"min_tokens": 5, "max_tokens": 4}},
            "sampling_params.min_tokens",
            "sampling_params.min_tokens must be an integer from 0 to max_tokens, got 5",
        ),
        (
            {"token_ids": [1], "sampling_params": {}, "request_id": "a\nb"},
            "request_id",
            'request_id must be a string of 1 to 256 characters without control characters, got "a\\nb"',
        ),
        (
            {"token_ids": [1], "sampling_params": {}, "stream": "yes"},
            "stream",
            'stream must be true or false, got "yes"',
        ),
        (
            {"token_ids": [1], "sampling_params": {}, "cache_salt": ""},
            "cache_salt",
            'cache_salt must be a string of 1 to 1024 characters, got ""',
        ),
        (
            {"token_ids": [1], "sampling_params": {}, "priority": 2**31},
            "priority",
            "priority must be an integer from -2147483648 to 2147483647, got 2147483648",
        ),
    ],
)
def test_a_wrong_field_is_named_with_what_it_may_be(mock: Mocked, body: Any, param: str, message: str) -> None:
    response = mock.frontend.post(GENERATE, body)
    assert error_of(response, 400, "invalid_request", param) == message


@pytest.mark.parametrize(
    "field",
    [
        {"n": 0},
        {"n": 1025},
        {"n": 1.0},
        {"temperature": -0.1},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": 1.01},
        {"top_k": -2},
        {"top_k": 1.5},
        {"seed": -2},
        {"seed": 2**63},
        {"seed": "1"},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"min_tokens": -1},
        {"stop_token_ids": [32]},
        {"stop_token_ids": 1},
        {"stop_token_ids": [0] * 1025},
        {"ignore_eos": 1},
        {"logprobs": 21},
        {"logprobs": -2},
        {"logprobs": -1},
        {"logprobs": True},
        {"skip_special_tokens": "no"},
        {"routed_experts_prompt_start": -1},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0},
        {"min_p": 1.5},
        {"bad_words": "x"},
        {"bad_words": [""]},
        {"logit_bias": {"32": 1}},
        {"logit_bias": {"1": 101}},
        {"prompt_logprobs": 21},
        {"allowed_token_ids": []},
        {"structured_outputs": {}},
        {"skip_reading_prefix_cache": 1},
        {"routed_experts": "yes"},
    ],
)
def test_a_parameter_out_of_its_range_is_refused(mock: Mocked, field: dict[str, Any]) -> None:
    (name,) = field
    error_of(mock.frontend.generate([1], sampling_params=field), 400, "invalid_request", f"sampling_params.{name}")


@pytest.mark.parametrize(
    ("place", "name", "value", "neutral"),
    [
        ("sampling_params", "stop", ["x"], None),
        ("sampling_params", "stream_interval", 2, None),
        (None, "output_mode", "text", "tokens"),
        (None, "response_format", "flat", "objects"),
        (None, "kv_transfer_params", {"a": 1}, None),
        (None, "features", [], None),
    ],
)
def test_a_field_without_an_implementation_is_refused_unless_neutral(
    mock: Mocked, pool: ThreadPoolExecutor, place: str | None, name: str, value: Any, neutral: Any
) -> None:
    def body(setting: Any) -> dict[str, Any]:
        fields = {"token_ids": [1], "sampling_params": {name: setting} if place else {}}
        return fields if place else {**fields, name: setting}

    path = f"{place}.{name}" if place else name
    message = error_of(mock.frontend.post(GENERATE, body(value)), 400, "unsupported_field", path)
    shown = json.dumps(value, separators=(",", ":"))
    assert message == f"{path} is not supported yet: leave it out or send {json.dumps(neutral)}, got {shown}"
    for harmless in (neutral, None):
        assert "x-ignored-fields" not in answered(mock, pool, body(harmless)).headers


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"token_ids": [1], "sampling_params": {}} x',
        b"{'a': 1}",
        b'{"token_ids": [NaN]}',
        b'{"token_ids": [1], "sampling_params": {"temperature": Infinity}}',
        b'{"token_ids": [1], "sampling_params": {"temperature": 1e999}}',
        b'{"token_ids": [1], "sampling_params": {"temperature": -1e999}}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        pytest.param(b"[" * 100_000, id="deep-lists"),
        pytest.param(b'{"a":' * 200, id="deep-objects"),
        b'{"a": 01}',
        b'\xef\xbb\xbf{"token_ids": [1], "sampling_params": {}}',
    ],
)
def test_a_body_that_is_no_json_is_refused(mock: Mocked, content: bytes) -> None:
    response = mock.frontend.http.post(GENERATE, content=content, headers=JSON)
    assert error_of(response, 400, "invalid_json").startswith("request body is not valid JSON: ")


@pytest.mark.parametrize("content", [b"[]", b"1", b'"x"', b"null"])
def test_a_body_that_is_no_object_is_refused(mock: Mocked, content: bytes) -> None:
    response = mock.frontend.http.post(GENERATE, content=content, headers=JSON)
    assert error_of(response, 400, "invalid_request") == "request body must be a JSON object"


def test_only_json_is_taken_where_a_type_is_named(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    good = b'{"token_ids": [1], "sampling_params": {}}'
    for wrong in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx"):
        response = mock.frontend.http.post(GENERATE, content=good, headers={"Content-Type": wrong})
        error_of(response, 415, "unsupported_media_type")
    for right in ("application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"):
        answered(mock, pool, good, {"Content-Type": right})
    answered(mock, pool, good, {"Accept": "application/json"})


def test_a_prompt_needs_room_for_one_token(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    assert answered(mock, pool, {"token_ids": [1] * 63, "sampling_params": {"max_tokens": 50}}).status_code == 200
    message = error_of(mock.frontend.generate([1] * 64), 400, "prompt_too_long", "token_ids")
    assert message == (
        "token_ids must hold at most 63 tokens (max_model_len 64 leaves room for one output token), got 64"
    )


def test_an_unknown_model_is_404(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    message = error_of(mock.frontend.generate([1], model="other"), 404, "model_not_found", "model")
    assert message == 'model "other" does not exist; this server serves "mock"'
    answered(mock, pool, {"token_ids": [1], "sampling_params": {}, "model": "mock"})
    answered(mock, pool, {"token_ids": [1], "sampling_params": {}, "model": None})


def test_unknown_fields_are_accepted_and_named(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    body = {
        "token_ids": [1],
        "sampling_params": {"use_beam_search": False, "output_kind": 2},
        "stream_options": {"other": 1},
        "extra_body": {"a": 1},
        "ä b,": 1,
    }
    names = answered(mock, pool, body).headers["x-ignored-fields"].split(",")
    expected = ["%C3%A4%20b%2C", "extra_body", "sampling_params.output_kind", "sampling_params.use_beam_search"]
    assert sorted(names) == sorted([*expected, "stream_options.other"])
    many = {"token_ids": [1], "sampling_params": {}, **{f"field_{number:04}": 1 for number in range(500)}}
    header = answered(mock, pool, many).headers["x-ignored-fields"]
    assert len(header) <= 1024
    assert all(name in many for name in header.split(","))


def test_the_header_id_is_checked_like_the_bodys(mock: Mocked) -> None:
    response = mock.frontend.generate([1], {"X-Request-Id": "x" * 257})
    message = error_of(response, 400, "invalid_request", "X-Request-Id")
    assert message.startswith("X-Request-Id must be a string of 1 to 256 characters without control characters, got ")


def test_a_refused_request_still_echoes_its_header_id(mock: Mocked) -> None:
    response = mock.frontend.generate([99], {"X-Request-Id": "mine"})
    error_of(response, 400, "invalid_request", "token_ids")
    assert response.headers["x-request-id"] == "mine"


def test_ids_beyond_ascii_come_back_as_they_are(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    response = answered(mock, pool, {"token_ids": [1], "sampling_params": {}, "request_id": "schön 1"})
    assert response.json()["request_id"] == "schön 1"


def test_parameters_reach_the_engine_resolved(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "seed": -1,
        "max_tokens": 10**6,
        "min_tokens": 2,
        "stop_token_ids": [3],
        "logprobs": None,
        "skip_special_tokens": False,
        "routed_experts_prompt_start": 0,
    }
    answer = pool.submit(
        mock.frontend.generate, [1] * 60, {"X-Session-ID": "s"}, sampling_params=params, cache_salt="salt", priority=-3
    )
    request = mock.engine.next_request()
    sent = request.sampling_params
    assert (sent.temperature, sent.top_p, sent.seed, sent.max_tokens, sent.min_tokens) == (0.5, 0.9, None, 4, 2)
    assert sent.top_k <= 0
    assert sent.stop_token_ids == (3,)
    assert set(sent.all_stop_token_ids) == {2, 3}
    assert (request.cache_salt, request.priority, request.session_id) == ("salt", -3, "s")
    mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP)
    assert answer.result().status_code == 200
    answer = pool.submit(mock.frontend.generate, [1], sampling_params={"ignore_eos": True})
    request = mock.engine.next_request()
    assert request.sampling_params.eos_token_id is None
    assert request.sampling_params.ignore_eos
    mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP)
    assert answer.result().status_code == 200


def test_further_eos_ids_are_stop_tokens(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    mock = mocks.start(model={"eos_token_ids": [2, 7, 8]})
    for ignore, expected in ((False, {7, 8}), (True, set())):
        answer = pool.submit(mock.frontend.generate, [1], sampling_params={"ignore_eos": ignore})
        request = mock.engine.next_request()
        assert set(request.sampling_params.stop_token_ids) == expected
        mock.engine.tokens(request.request_id, [1], finish=FinishReason.STOP)
        assert answer.result().status_code == 200


def test_the_whole_vocabulary_is_allowed_where_it_is_small(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    mock = mocks.start(limits={"max_logprobs": 32})
    answer = pool.submit(mock.frontend.generate, [1], sampling_params={"logprobs": -1})
    request = mock.engine.next_request()
    assert request.sampling_params.logprobs == -1
    mock.engine.tokens(request.request_id, [], finish=FinishReason.ABORT)
    assert answer.result().status_code == 200


VECTORS = json.loads(
    (Path(__file__).parents[1] / "conformance" / "generate_validation.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("served", VECTORS["served"])
@pytest.mark.parametrize("strict", [False, True])
def test_the_shared_vectors_hold_over_http(
    mocks: MockFactory, pool: ThreadPoolExecutor, served: str, strict: bool
) -> None:
    facts = VECTORS["served"][served]
    model = {"name": facts["model"], "eos_token_ids": facts["eos_token_ids"]}
    mock = mocks.start(*(["--strict-requests"] if strict else []), limits=facts["limits"], model=model)
    for case in VECTORS["cases"]:
        if (case.get("served", "plain"), case.get("strict", False)) != (served, strict):
            continue
        header = case.get("header")
        if header is not None and not header.isprintable():
            continue  # no HTTP client sends that
        content = bytes.fromhex(case["body_hex"]) if "body_hex" in case else case["body"].encode()
        headers = {**JSON, **({} if header is None else {"X-Request-Id": header.encode()})}
        answer = pool.submit(mock.frontend.http.post, GENERATE, content=content, headers=headers)
        if "error" in case:
            expected = case["error"]
            response = answer.result()
            error = response.json()["error"]
            assert (error["reason"], error["param"]) == (expected["reason"], expected["param"]), case["title"]
            assert expected["message"] in (None, error["message"]), case["title"]
            assert response.status_code == error["code"]
            continue
        request = mock.engine.next_request()
        for _ in range(1, case["request"]["sampling"].get("n", 1)):
            mock.engine.next_request()
        assert request.prompt_token_ids == case["request"]["token_ids"], case["title"]
        mock.frontend.post("/abort_requests")
        assert answer.result().status_code == 200, case["title"]
