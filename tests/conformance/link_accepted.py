"""Outputs of the engine link that both decoders accept, each with its meaning; and all other messages' after them."""

from __future__ import annotations

from typing import Any

from link_accepted_others import accepted_others
from link_messages import array, envelope, output


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
            "KV of two commits, and who scored the prompt",
            envelope(
                (
                    output(
                        kv_spans=[["v6", 2, 0, 5], ["größe-世界", 2**64 - 1, 5, 2**32 - 1]],
                        prompt_spans=[["v6", 2, 1, 3]],
                    ),
                )
            ),
            {
                "timestamp": 1.5,
                "outputs": [
                    {
                        **one,
                        "kv_spans": [["v6", 2, 0, 5], ["größe-世界", 2**64 - 1, 5, 2**32 - 1]],
                        "prompt_spans": [["v6", 2, 1, 3]],
                    }
                ],
            },
        ),
        (
            "outputs",
            "KV spans without those of the prompt, as 21 elements",
            envelope((output(admission=["v6", 2], kv_spans=[["v6", 2, 0, 1]])[:21],)),
            {
                "timestamp": 1.5,
                "outputs": [{**one, "admission": ["v6", 2], "kv_spans": [["v6", 2, 0, 1]]}],
            },
        ),
        (
            "outputs",
            "spans of a prompt whose tokens nothing scored",
            envelope((output(prompt_spans=[]),)),
            {"timestamp": 1.5, "outputs": [{**one, "prompt_spans": []}]},
        ),
        (
            "outputs",
            "newer KV spans",
            envelope(
                (output(kv_spans=[["v6", 2, 0, 1, "new"], ["v7", 3, 1, 2]], prompt_spans=[["v7", 3, 1, 2, 7, None]]),)
            ),
            {
                "timestamp": 1.5,
                "outputs": [{**one, "kv_spans": [["v6", 2, 0, 1], ["v7", 3, 1, 2]], "prompt_spans": [["v7", 3, 1, 2]]}],
                "skipped_fields": 3,
            },
        ),
        (
            "outputs",
            "rollspan before KV spans, 20",
            envelope((output(admission=["v6", 2])[:20],)),
            {"timestamp": 1.5, "outputs": [{**one, "admission": ["v6", 2]}]},
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
        *accepted_others(),
    ]
