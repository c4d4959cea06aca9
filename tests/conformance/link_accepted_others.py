"""Requests, calls, hellos and last words of the engine link that both decoders accept, each with its meaning."""

from __future__ import annotations

from typing import Any

from link_messages import CLIENT_HELLO, ENGINE_HELLO, HELLO_LIMITS, HELLO_MODEL, request


def accepted_others() -> list[tuple[str, str, Any, dict[str, Any]]]:
    """(kind, title, structure, meaning)."""
    params = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 2**63 - 1,
        "max_tokens": 5,
        "min_tokens": 1,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logprobs": -1,
        "min_p": 0.25,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
        "prompt_logprobs": 3,
        "logit_bias": {7: -100.0, 2**32 - 1: 0.5},
        "allowed_token_ids": [3, 1],
        "bad_words": ["größe", " x"],
        "_bad_words_token_ids": [[7, 8], [9]],
        "structured_outputs": {"json": '{"type":"object"}', "disable_any_whitespace": True},
        "skip_reading_prefix_cache": False,
        "routed_experts": True,
        "routed_experts_prompt_start": 5,
        "output_kind": 1,
        "_eos_token_id": 1,
        "_all_stop_token_ids": [1, 7],
        "a_later_parameter": "x",
    }
    params_meaning = {
        **{name: value for name, value in params.items() if not name.startswith(("_", "a_later"))},
        "eos_token_id": 1,
        "all_stop_token_ids": [1, 7],
        "bad_words_token_ids": [[7, 8], [9]],
        "logit_bias": {"7": -100.0, "4294967295": 0.5},
    }
    plain = {
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "repetition_penalty": 1.0,
        "bad_words": [],
        "logit_bias": None,
        "allowed_token_ids": None,
        "_bad_words_token_ids": None,
        "structured_outputs": None,
        "skip_reading_prefix_cache": None,
        "prompt_logprobs": None,
        "routed_experts_prompt_start": 0,
        "watermarking": True,
    }
    structures = [
        {"json_object": True},
        {"regex": "a+", "whitespace_pattern": "\\s*"},
        {"choice": ["a", "b"], "_backend": "xgrammar"},
        {"grammar": "root ::= 'a'"},
        {"structural_tag": "{}", "disable_additional_properties": False},
    ]
    bounds = {
        "min_weight_commit": 2**63 - 1,
        "weight_wait_s": 2.5,
        "max_weight_lag": 0,
        "return_kv_versions": True,
        "allow_stale_prefix": True,
    }
    provenances: list[tuple[str, Any, dict[str, Any]]] = [
        ("bounds and KV versions", {**bounds, "a_later_key": [1]}, {"provenance": bounds}),
        ("one bound", {"max_weight_lag": 3}, {"provenance": {"max_weight_lag": 3}}),
        ("a wait in whole seconds", {"weight_wait_s": 2}, {"provenance": {"weight_wait_s": 2.0}}),
        ("provenance that asks for nothing", {"max_weight_lag": None, "return_kv_versions": False}, {}),
        ("an empty provenance", {}, {}),
    ]
    return [
        ("request", "all defaults", request(), {"request_id": "r1", "prompt_token_ids": [1, 2], "arrival_time": 1.0}),
        ("request", "shortest", request()[:9], {"request_id": "r1", "prompt_token_ids": [1, 2], "arrival_time": 1.0}),
        (
            "request",
            "newer",
            [*request(), "new"],
            {"request_id": "r1", "prompt_token_ids": [1, 2], "arrival_time": 1.0},
        ),
        (
            "request",
            "all that rollspan sends",
            request(
                sampling_params=params,
                cache_salt="salt",
                client_index=2,
                priority=-5,
                external_req_id="e1",
                session_id="s1",
            ),
            {
                "request_id": "r1",
                "prompt_token_ids": [1, 2],
                "arrival_time": 1.0,
                "sampling_params": params_meaning,
                "cache_salt": "salt",
                "client_index": 2,
                "priority": -5,
                "external_req_id": "e1",
                "session_id": "s1",
            },
        ),
        (
            "request",
            "what foreign frontends send unasked",
            request(sampling_params=plain),
            {"request_id": "r1", "prompt_token_ids": [1, 2], "arrival_time": 1.0},
        ),
        *(
            (
                "request",
                title,
                request(provenance=provenance),
                {"request_id": "r1", "prompt_token_ids": [1, 2], "arrival_time": 1.0, **meaning},
            )
            for title, provenance, meaning in provenances
        ),
        (
            "request",
            "vLLM's length, 22",
            request()[:22],
            {"request_id": "r1", "prompt_token_ids": [1, 2], "arrival_time": 1.0},
        ),
        *(
            (
                "request",
                f"structured outputs: {next(iter(structure))}",
                request(sampling_params={"structured_outputs": structure}),
                {
                    "request_id": "r1",
                    "prompt_token_ids": [1, 2],
                    "arrival_time": 1.0,
                    "sampling_params": {
                        "structured_outputs": {key: item for key, item in structure.items() if key != "_backend"}
                    },
                },
            )
            for structure in structures
        ),
        ("abort", "two", ["r1", "0_r2"], {"request_ids": ["r1", "0_r2"]}),
        ("abort", "none", [], {"request_ids": []}),
        (
            "utility_call",
            "arguments",
            [1, 2**64 - 1, "pause_generation", ["keep", False]],
            {"client_index": 1, "call_id": 2**64 - 1, "method": "pause_generation", "args": ["keep", False]},
        ),
        (
            "utility_call",
            "a map as argument",
            [0, 7, "update_weights", [{"path": "/w", "n": [1, None]}]],
            {"client_index": 0, "call_id": 7, "method": "update_weights", "args": [{"path": "/w", "n": [1, None]}]},
        ),
        (
            "client_hello",
            "plain",
            CLIENT_HELLO,
            {"version": [1, 0], "name": "rollspan-http", "max_frame_bytes": 268435456},
        ),
        (
            "client_hello",
            "newer",
            {**CLIENT_HELLO, "version": [1, 7], "a_later_key": [1]},
            {"version": [1, 7], "name": "rollspan-http", "max_frame_bytes": 268435456},
        ),
        (
            "engine_hello",
            "plain",
            ENGINE_HELLO,
            {name: value for name, value in ENGINE_HELLO.items() if name != "magic"},
        ),
        *(
            (
                "engine_hello",
                f"weights {state}",
                {**ENGINE_HELLO, "weight_state": state},
                {**{name: value for name, value in ENGINE_HELLO.items() if name != "magic"}, **meaning},
            )
            for state, meaning in (
                ("ready", {}),
                ("updating", {"weight_state": "updating"}),
                ("inconsistent", {"weight_state": "inconsistent"}),
                ("undeclared", {"weight_state": "undeclared"}),
                ("sleeping", {"weight_state": "sleeping"}),
            )
        ),
        (
            "engine_hello",
            "newer, paused, updated",
            {
                **ENGINE_HELLO,
                "version": [1, 3],
                "weight_version": "v7",
                "weight_commit": 2**40,
                "paused": True,
                "a_later_key": {},
                "limits": {**HELLO_LIMITS, "a_later_limit": 1},
                "model": {**HELLO_MODEL, "a_later_fact": None},
            },
            {
                **{name: value for name, value in ENGINE_HELLO.items() if name != "magic"},
                "version": [1, 3],
                "weight_version": "v7",
                "weight_commit": 2**40,
                "paused": True,
            },
        ),
        (
            "dead",
            "plain",
            {"reason": "engine_error", "message": "out of memory"},
            {"reason": "engine_error", "message": "out of memory"},
        ),
    ]
