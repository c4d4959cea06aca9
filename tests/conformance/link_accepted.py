"""Messages of the engine link that both decoders accept, each with its meaning."""

from __future__ import annotations

from typing import Any

from link_messages import CLIENT_HELLO, ENGINE_HELLO, HELLO_LIMITS, HELLO_MODEL, array, envelope, output, request


def accepted() -> list[tuple[str, str, Any, dict[str, Any]]]:
    """(kind, title, structure, meaning)."""
    one = {"request_id": "r1", "new_token_ids": [42]}
    rows = [
        array("<i4", [2, 2], [42, 7, 8, 9]),
        array("<f4", [2, 2], [-0.5, -1.0, -0.25, -2.0]),
        array("<i4", [2], [3, 1]),
        None,
    ]
    rows_meaning = {
        "token_ids": [[42, 7], [8, 9]],
        "logprobs": [[-0.5, -1.0], [-0.25, -2.0]],
        "sampled_ranks": [3, 1],
    }
    wide = [array("<i8", [1, 1], [2**31]), array("<f4", [1, 1], [-0.5]), array("<i8", [1], [1])]
    stats = {"num_running_reqs": 2, "num_waiting_reqs": 5, "kv_cache_usage": 0.25, "a_later_counter": {"x": [1]}}
    cache = {"reset": True, "requests": 3, "queries": 40, "hits": 16, "preempted_requests": 1, "hits_by_source": {}}
    prefill = {"num_prompt_tokens": 3, "num_computed_tokens": 2, "num_cached_tokens": 1, "a_later_counter": 9}
    tensors = [
        array("int32", [2, 2], [2, 7, 3, 9]),
        array("float32", [2, 2], [-0.5, -1.0, -0.25, -2.0]),
        array("int32", [2], [3, 1]),
        None,
        None,
    ]
    tensors_meaning = {**rows_meaning, "token_ids": [[2, 7], [3, 9]]}
    refusal = {
        "code": "validation_error",
        "message": "m",
        "retryable": False,
        "param": "p",
        "reason": "unsupported_field",
    }
    error = {"code": "nan_logits", "message": "NaN", "retryable": False, "a_later_key": 1}
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
    return [
        (
            "outputs",
            "label and commit",
            envelope((output(),), weight_version="v7", weight_commit=3),
            {"timestamp": 1.5, "weight_version": "v7", "weight_commit": 3, "outputs": [one]},
        ),
        (
            "outputs",
            "largest commit and engine index",
            envelope((output(),), engine_index=7, weight_commit=2**64 - 1),
            {"engine_index": 7, "timestamp": 1.5, "weight_commit": 2**64 - 1, "outputs": [one]},
        ),
        (
            "outputs",
            "admission",
            envelope((output(admission=["v6", 2]),), weight_version="v7", weight_commit=3),
            {
                "timestamp": 1.5,
                "weight_version": "v7",
                "weight_commit": 3,
                "outputs": [{**one, "admission": ["v6", 2]}],
            },
        ),
        (
            "outputs",
            "admission under a label in another script",
            envelope((output(admission=["größe-世界", 0]),)),
            {"timestamp": 1.5, "outputs": [{**one, "admission": ["größe-世界", 0]}]},
        ),
        (
            "outputs",
            "empty label is a label",
            envelope((output(),), weight_version=""),
            {"timestamp": 1.5, "weight_version": "", "outputs": [one]},
        ),
        (
            "outputs",
            "vLLM's lengths, 19 and 9",
            envelope((output()[:19],), weight_version="v7")[:9],
            {"timestamp": 1.5, "weight_version": "v7", "outputs": [one]},
        ),
        (
            "outputs",
            "vLLM before labels, 16 and 8",
            envelope((output()[:16],))[:8],
            {"timestamp": 1.5, "outputs": [one]},
        ),
        ("outputs", "shortest output and envelope", [0, [["r1", [42]]]], {"outputs": [one]}),
        (
            "outputs",
            "output cut before num_nans_in_logits",
            envelope((output()[:13],)),
            {"timestamp": 1.5, "outputs": [one]},
        ),
        (
            "outputs",
            "newer envelope and outputs",
            [*envelope((([*output(), "new", {"k": [None]}]), output("r2"))), ["new"], 7, None],
            {"timestamp": 1.5, "outputs": [one, {**one, "request_id": "r2"}], "skipped_fields": 5},
        ),
        (
            "outputs",
            "newer admission",
            envelope((output(admission=["v6", 2, "new"]),)),
            {"timestamp": 1.5, "outputs": [{**one, "admission": ["v6", 2]}], "skipped_fields": 1},
        ),
        (
            "outputs",
            "several tokens, largest id",
            envelope((output(tokens=[0, 127, 128, 65536, 2**32 - 1]),)),
            {"timestamp": 1.5, "outputs": [{"request_id": "r1", "new_token_ids": [0, 127, 128, 65536, 2**32 - 1]}]},
        ),
        (
            "outputs",
            "terminal without tokens",
            envelope((output(tokens=[], finish_reason=2),), finished_requests=["r1"]),
            {"timestamp": 1.5, "outputs": [{"request_id": "r1", "finish_reason": 2}], "finished_requests": ["r1"]},
        ),
        (
            "outputs",
            "stop token",
            envelope((output(finish_reason=0, stop_reason=42),)),
            {"timestamp": 1.5, "outputs": [{**one, "finish_reason": 0, "stop_reason": 42}]},
        ),
        (
            "outputs",
            "stop string",
            envelope((output(finish_reason=0, stop_reason="stale_weights"),)),
            {"timestamp": 1.5, "outputs": [{**one, "finish_reason": 0, "stop_reason": "stale_weights"}]},
        ),
        (
            "outputs",
            "repetition",
            envelope((output(finish_reason=4),)),
            {"timestamp": 1.5, "outputs": [{**one, "finish_reason": 4}]},
        ),
        (
            "outputs",
            "failed request",
            envelope((output(tokens=[], finish_reason=3, error=error),)),
            {
                "timestamp": 1.5,
                "outputs": [
                    {
                        "request_id": "r1",
                        "finish_reason": 3,
                        "error": {"code": "nan_logits", "message": "NaN", "retryable": False},
                    }
                ],
            },
        ),
        (
            "outputs",
            "log-probs of two tokens",
            envelope((output(tokens=[42, 8], new_logprobs=rows),)),
            {
                "timestamp": 1.5,
                "outputs": [{"request_id": "r1", "new_token_ids": [42, 8], "new_logprobs": rows_meaning}],
            },
        ),
        (
            "outputs",
            "log-probs without the cumulative counts",
            envelope((output(tokens=[42, 8], new_logprobs=rows[:3]),)),
            {
                "timestamp": 1.5,
                "outputs": [{"request_id": "r1", "new_token_ids": [42, 8], "new_logprobs": rows_meaning}],
            },
        ),
        (
            "outputs",
            "log-probs with 64-bit ids",
            envelope((output(new_logprobs=[array("<i8", [1, 1], [42]), wide[1], wide[2], None]),)),
            {
                "timestamp": 1.5,
                "outputs": [{**one, "new_logprobs": {"token_ids": [[42]], "logprobs": [[-0.5]], "sampled_ranks": [1]}}],
            },
        ),
        (
            "outputs",
            "prompt log-probs",
            envelope((output(new_prompt_logprobs_tensors=tensors),)),
            {"timestamp": 1.5, "outputs": [{**one, "new_prompt_logprobs": tensors_meaning}]},
        ),
        (
            "outputs",
            "prompt log-probs as arrays, without the counts",
            envelope((output(new_prompt_logprobs_tensors=rows[:3]),)),
            {"timestamp": 1.5, "outputs": [{**one, "new_prompt_logprobs": rows_meaning}]},
        ),
        (
            "outputs",
            "prompt log-probs of a prompt of one token",
            envelope(
                (
                    output(
                        new_prompt_logprobs_tensors=[
                            array("int64", [0, 1], []),
                            array("float32", [0, 1], []),
                            array("int64", [0], []),
                            None,
                            None,
                        ]
                    ),
                )
            ),
            {
                "timestamp": 1.5,
                "outputs": [{**one, "new_prompt_logprobs": {"token_ids": [], "logprobs": [], "sampled_ranks": []}}],
            },
        ),
        *(
            (
                "outputs",
                f"routed experts as {dtype}",
                envelope((output(routed_experts=array(dtype, [2, 1, 2], [0, 1, 2, 3])),)),
                {"timestamp": 1.5, "outputs": [{**one, "routed_experts": [dtype, [2, 1, 2], [0, 1, 2, 3]]}]},
            )
            for dtype in ("|u1", "<i2", "<i4")
        ),
        (
            "outputs",
            "routed experts of no token",
            envelope((output(routed_experts=array("|u1", [0, 4, 2], [])),)),
            {"timestamp": 1.5, "outputs": [{**one, "routed_experts": ["|u1", [0, 4, 2], []]}]},
        ),
        (
            "outputs",
            "refused request with param and reason",
            envelope((output(tokens=[], finish_reason=3, error=refusal),)),
            {"timestamp": 1.5, "outputs": [{"request_id": "r1", "finish_reason": 3, "error": refusal}]},
        ),
        (
            "outputs",
            "error with param and reason nil",
            envelope((output(tokens=[], finish_reason=3, error={**error, "param": None, "reason": None}),)),
            {
                "timestamp": 1.5,
                "outputs": [
                    {
                        "request_id": "r1",
                        "finish_reason": 3,
                        "error": {"code": "nan_logits", "message": "NaN", "retryable": False},
                    }
                ],
            },
        ),
        (
            "outputs",
            "prefill",
            envelope((output(prefill_stats=prefill),)),
            {
                "timestamp": 1.5,
                "outputs": [
                    {**one, "prefill_stats": {"num_prompt_tokens": 3, "num_computed_tokens": 2, "num_cached_tokens": 1}}
                ],
            },
        ),
        (
            "outputs",
            "elements that are only passed on",
            envelope(
                (
                    output(
                        events=[{"type": 1, "timestamp": 1.0}],
                        kv_transfer_params={"a": [1, {"b": None}]},
                        trace_headers={"t": "x"},
                        spec_decode_metrics={"n": 1},
                    ),
                )
            ),
            {"timestamp": 1.5, "outputs": [one]},
        ),
        (
            "outputs",
            "stats alone",
            envelope(scheduler_stats=stats, weight_version="v7", weight_commit=3),
            {
                "timestamp": 1.5,
                "weight_version": "v7",
                "weight_commit": 3,
                "scheduler_stats": {"num_running_reqs": 2, "num_waiting_reqs": 5, "kv_cache_usage": 0.25},
            },
        ),
        (
            "outputs",
            "stats of the prefix cache",
            envelope(scheduler_stats={**stats, "prefix_cache_stats": cache}),
            {
                "timestamp": 1.5,
                "scheduler_stats": {
                    "num_running_reqs": 2,
                    "num_waiting_reqs": 5,
                    "kv_cache_usage": 0.25,
                    "prefix_cache_stats": {"requests": 3, "queries": 40, "hits": 16, "preempted_requests": 1},
                },
            },
        ),
        (
            "outputs",
            "finished requests alone",
            envelope(finished_requests=["a", "b"]),
            {"timestamp": 1.5, "finished_requests": ["a", "b"]},
        ),
        (
            "outputs",
            "no finished requests is a batch",
            envelope(finished_requests=[]),
            {"timestamp": 1.5, "finished_requests": []},
        ),
        (
            "outputs",
            "utility result",
            envelope(utility_output=[2**64 - 1, None, [None, {"weight_version": "v7", "weight_commit": 3}], None]),
            {
                "timestamp": 1.5,
                "utility_output": {"call_id": 2**64 - 1, "result": {"weight_version": "v7", "weight_commit": 3}},
            },
        ),
        (
            "outputs",
            "utility nil",
            envelope(utility_output=[7, None, [None, None], None]),
            {"timestamp": 1.5, "utility_output": {"call_id": 7}},
        ),
        (
            "outputs",
            "utility list",
            envelope(utility_output=[7, None, [None, ["generate", True, -1, 0.5]]]),
            {"timestamp": 1.5, "utility_output": {"call_id": 7, "result": ["generate", True, -1, 0.5]}},
        ),
        (
            "outputs",
            "utility failure with a reason",
            envelope(utility_output=[7, "no update is under way", None, "no_update_active"]),
            {
                "timestamp": 1.5,
                "utility_output": {"call_id": 7, "failure": "no update is under way", "reason": "no_update_active"},
            },
        ),
        (
            "outputs",
            "newer utility reply",
            envelope(utility_output=[7, "boom", None, None, "new"]),
            {"timestamp": 1.5, "utility_output": {"call_id": 7, "failure": "boom"}, "skipped_fields": 1},
        ),
        ("outputs", "wave complete", envelope(wave_complete=3), {"timestamp": 1.5, "wave_complete": 3}),
        ("outputs", "start wave", envelope(start_wave=0), {"timestamp": 1.5, "start_wave": 0}),
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
