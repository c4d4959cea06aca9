"""Both frontends, asked the same odd things, give the same answers and send the engine the same requests."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from frontend_process import GENERATE
from scripted_frontend import FRONTENDS, Mocked, MockFactory

from rollspan.protocol.messages import EngineCoreRequest
from rollspan.sampling_params import RequestOutputKind
from rollspan.sampling_rules import NEUTRAL, RULES, TEXT_RULES

pytestmark = pytest.mark.skipif(len(FRONTENDS) < 2, reason="one frontend agrees with itself")

CASES = 400
FIELDS = [
    *("token_ids", "request_id", "model", "stream", "stream_options", "output_mode", "return_token_ids", "priority"),
    *("cache_salt", "response_format", "return_kv_versions", "min_weight_commit", "weight_wait_s", "max_weight_lag"),
    *("allow_stale_prefix", "features", "sampling_params", "zz"),
]
OPTIONS = ["include_usage", "continuous_usage_stats", "include_weight_versions", "other"]
PARAMS = [*RULES, *TEXT_RULES, *NEUTRAL, "output_kind", "a b"]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 5, 31, 32, 62, 63, 64, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1),
    *(0.0, 1.0, -0.0, 0.5, 1.5, 2.0, 1e-5, 1e-7, 1e16, 1e17, 123456789.125, 1e300, 5e-324),
    *("", "x", "mock", "tokens", "objects", "é\u2028", "a\nb", "\x7f", "y" * 300, '"\\', "\U0001f600" * 40),
    *([], [1], [1, 2, 3], [1, "2"], [31, 32], [None], [1.0], [[1]], list(range(31)), ["ab" * 50]),
    *({}, {"b": 1, "a": [True, None]}, {"include_usage": True}, {"k" * 80: 1}),
    *({"5": 1, "31": -100.0}, {"32": 1}, {"5": 101}, {"json": {"b": 1, "a": ["\u2028"]}}, {"regex": "a", "zz": 1}),
    *({"json_object": True}, {"choice": ["a", "b"]}, {"regex": "a", "grammar": "b"}, ["a", "b c"], [""]),
]


@pytest.fixture(scope="module")
def both(socket_directory: Path) -> Iterator[list[Mocked]]:
    factories = [MockFactory(kind, socket_directory) for kind in FRONTENDS]
    try:
        yield [factory.start() for factory in factories]
    finally:
        for factory in factories:
            factory.close()


def odd_body(random_numbers: random.Random) -> bytes:
    """A request that may be wrong in up to three places, in one of the spellings that JSON allows."""
    params: dict[str, Any] = {}
    body: dict[str, Any] = {"token_ids": [1, 2, 3], "sampling_params": params}
    for _ in range(random_numbers.randint(0, 3)):
        value = random_numbers.choice(VALUES)
        place = random_numbers.random()
        if place < 0.3:
            body[random_numbers.choice(FIELDS)] = value
        elif place < 0.4:
            body["stream_options"] = {random_numbers.choice(OPTIONS): value}
        else:
            params[random_numbers.choice(PARAMS)] = value
    if random_numbers.random() < 0.1:
        body.pop(random_numbers.choice(list(body)))
    separators = random_numbers.choice([(",", ":"), (" ,\n", " :\t")])
    return json.dumps(body, ensure_ascii=random_numbers.random() < 0.5, separators=separators).encode()


def described(request: EngineCoreRequest) -> dict[str, Any]:
    """What the engine is asked, without what differs by nature."""
    return {
        "prompt": request.prompt_token_ids,
        "params": dataclasses.replace(request.sampling_params, output_kind=RequestOutputKind.DELTA),
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "provenance": request.provenance,
        "index": request.request_id.partition("_")[0] if "_" in request.request_id else None,
    }


def asked(mock: Mocked, pool: ThreadPoolExecutor, body: bytes) -> Any:
    """Status, error and ignored fields of the answer; for a good request, what the engine was asked."""
    headers = {"Content-Type": "application/json"}
    answer = pool.submit(mock.frontend.http.post, GENERATE, content=body, headers=headers)
    requests = []
    if accepted(body):
        first = mock.engine.next_request()
        requests = [first] + [mock.engine.next_request() for _ in range(children(body) - 1)]
        mock.frontend.post("/abort_requests")
    response = answer.result()
    ignored = response.headers.get("x-ignored-fields")
    if response.status_code != 200:
        return response.status_code, response.json(), ignored
    return response.status_code, [described(request) for request in requests], ignored


def children(body: bytes) -> int:
    return json.loads(body)["sampling_params"].get("n") or 1


def accepted(body: bytes) -> bool:
    """Whether the request is good, by the parser that the shared vectors hold."""
    from mock_engine import HELLO

    from rollspan.errors import RollspanError
    from rollspan.frontend.schemas import parse_generate

    try:
        parse_generate(body, None, HELLO, strict=False)
    except RollspanError:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_odd_requests_are_answered_alike(both: list[Mocked], seed: int) -> None:
    random_numbers = random.Random(seed)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(CASES // 4):
            body = odd_body(random_numbers)
            answers = [asked(mock, pool, body) for mock in both]
            assert answers[0] == answers[1], body


def test_odd_control_bodies_are_answered_alike(both: list[Mocked]) -> None:
    paths = {
        "/pause": ["mode", "clear_cache"],
        "/abort_requests": ["request_ids"],
        "/inference/v1/abort_requests": ["request_ids"],
        "/init_weight_transfer_engine": ["init_info"],
        "/start_weight_update": ["mode"],
        "/update_weights": ["update_info", "weight_dir"],
        "/finish_weight_update": ["weight_version", "weight_digest", "partial"],
        "/update_weight_version": ["new_version"],
        "/weight_checker": ["action", "baseline"],
        "/sleep": ["level", "mode"],
        "/wake_up": ["tags"],
    }
    with ThreadPoolExecutor(1) as pool:
        for path, names in paths.items():
            for name in names:
                for value in VALUES:
                    answers = [control_answer(mock, pool, path, {name: value}) for mock in both]
                    assert answers[0] == answers[1], (path, name, value)


def control_answer(mock: Mocked, pool: ThreadPoolExecutor, path: str, body: Any) -> Any:
    """Status and body; calls that reach the engine are refused there, with what they were called with."""
    answer = pool.submit(mock.frontend.post, path, body)
    while not answer.done():
        call = mock.engine.pending_call()
        if call is not None:
            mock.engine.refuse(call, json.dumps([call.method, call.args]), "invalid_request")
    return answer.result().status_code, answer.result().json(), answer.result().headers.get("x-ignored-fields")
