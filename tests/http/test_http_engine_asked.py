"""Sampling, log-probs of the prompt and the prefix cache on the real engine: what a client sees."""

from __future__ import annotations

import math
from typing import Any

import pytest
from frontend_process import GENERATE, error_of
from real_server import RealServer

from rollspan.models.task import Problem

PROMPT = Problem(12, 34).prompt_ids
LONG_PROMPT = PROMPT * 8


def asked(server: RealServer, prompt: list[int] = PROMPT, salt: str | None = None, **params: Any) -> dict[str, Any]:
    defaults = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    response = server.frontend.generate(prompt, sampling_params={**defaults, **params}, cache_salt=salt)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_log_probs_of_the_prompt_are_those_of_its_tokens_and_the_same_from_the_cache(server: RealServer) -> None:
    answers = []
    for _ in range(2):
        answer = asked(server, LONG_PROMPT, salt=f"prompt-{server.frontend.kind}", prompt_logprobs=2)
        first, *rows = answer["prompt_logprobs"]
        assert first is None
        assert [int(next(iter(row))) for row in rows] == LONG_PROMPT[1:]
        for row in rows:
            entries = list(row.values())
            assert 2 <= len(entries) <= 3
            assert all(math.isfinite(entry["logprob"]) and entry["logprob"] <= 0 for entry in entries)
            assert {1, 2} <= {entry["rank"] for entry in entries}
        answers.append(rows)
    assert answers[0] == answers[1]


def test_a_prompt_that_was_seen_is_cached_until_a_reset(server: RealServer) -> None:
    def cached() -> int:
        answer = asked(server, LONG_PROMPT, salt=f"cached-{server.frontend.kind}")
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert 0 < cached() < len(LONG_PROMPT)
    assert server.frontend.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0


def test_tokens_can_be_forced_and_forbidden(server: RealServer) -> None:
    plain = asked(server)["choices"][0]["token_ids"]
    assert asked(server, logit_bias={"7": 100})["choices"][0]["token_ids"] == [7] * 4
    assert asked(server, allowed_token_ids=[9])["choices"][0]["token_ids"] == [9] * 4
    biased = asked(server, logit_bias={str(plain[0]): -100})["choices"][0]["token_ids"]
    assert biased[0] != plain[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs"),
        ({"routed_experts": True}, "routed_experts"),
    ],
)
def test_what_only_the_engine_can_refuse_is_a_400_that_names_it(
    server: RealServer, stream: bool, params: dict[str, Any], name: str
) -> None:
    body = {"token_ids": PROMPT, "sampling_params": params, "stream": stream}
    response = server.frontend.post(GENERATE, body)
    reason = "unsupported_field" if name == "routed_experts" else "invalid_request"
    error_of(response, 400, reason, f"sampling_params.{name}")


def test_server_info_tells_what_computes(server: RealServer) -> None:
    info = server.frontend.get("/server_info?config_format=json").json()
    assert info["vllm_config"]["weight_transfer_config"] is not None
    assert info["vllm_config"]["model_config"]["dtype"] == info["engine"]["dtype"] == "float32"
    assert {"runner", "attention", "derived_weight_bytes", "numerics", "config"} <= info["engine"].keys()
