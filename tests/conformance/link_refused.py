"""Messages of the engine link that both decoders refuse, each with the reason (None: any)."""

from __future__ import annotations

from typing import Any

import msgpack
from link_messages import CLIENT_HELLO, ENGINE_HELLO, HELLO_LIMITS, array, envelope, output, request


def nested(depth: int) -> Any:
    """Arrays in arrays, ``depth`` of them."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def refused() -> list[tuple[str, str, Any, str | None]]:
    """(kind, title, structure or raw bytes, reason)."""
    pickle = msgpack.ExtType(1, b"x")
    whole = msgpack.packb(envelope((output(),)))
    rows = [array("<i4", [1, 2], [42, 7]), array("<f4", [1, 2], [-0.5, -1.0]), array("<i4", [1], [1]), None]

    def with_rows(index: int, value: Any) -> Any:
        return envelope((output(new_logprobs=[*rows[:index], value, *rows[index + 1 :]]),))

    hello_less = {name: value for name, value in ENGINE_HELLO.items() if name != "weight_version"}
    return [
        ("outputs", "nothing", b"", "malformed"),
        ("outputs", "cut in the middle", whole[:-3], "malformed"),
        ("outputs", "array longer than its bytes", b"\xdd\xff\xff\xff\xff", "malformed"),
        ("outputs", "string longer than its bytes", b"\x9a\x00\x91\x92\xdb\xff\xff\xff\xff", "malformed"),
        ("outputs", "reserved byte", b"\x9a\x00\xc1", "malformed"),
        ("outputs", "a byte too many", whole + b"\xc0", "trailing_bytes"),
        ("outputs", "a byte too many, and no family", msgpack.packb(envelope()) + b"\xc0", "trailing_bytes"),
        ("outputs", "two messages", whole + whole, "trailing_bytes"),
        ("outputs", "a map", {"engine_index": 0}, "wrong_type"),
        ("outputs", "an output as a map", envelope(({"request_id": "r1", "new_token_ids": [1]},)), "wrong_type"),
        ("outputs", "outputs nil", envelope(None, finished_requests=["r1"]), "wrong_type"),
        ("outputs", "outputs as bytes", envelope(b"", finished_requests=["r1"]), "wrong_type"),
        ("outputs", "timestamp nil", envelope((output(),), timestamp=None), "wrong_type"),
        ("outputs", "label an integer", envelope((output(),), weight_version=7), "wrong_type"),
        ("outputs", "label as bytes", envelope((output(),), weight_version=b"v7"), "wrong_type"),
        (
            "outputs",
            "label not UTF-8",
            msgpack.packb(envelope((output(),), weight_version="v"))[:-3] + b"\xa1\xff\xc0",
            "malformed",
        ),
        ("outputs", "commit negative", envelope((output(),), weight_commit=-1), "out_of_range"),
        ("outputs", "commit a float", envelope((output(),), weight_commit=3.0), "wrong_type"),
        ("outputs", "commit a boolean", envelope((output(),), weight_commit=True), "wrong_type"),
        ("outputs", "no family", envelope(), "family"),
        ("outputs", "two families", envelope((output(),), wave_complete=1), "family"),
        ("outputs", "two waves", envelope(wave_complete=1, start_wave=1), "family"),
        (
            "outputs",
            "stats and a utility reply",
            envelope(scheduler_stats={}, utility_output=[7, None, None]),
            "family",
        ),
        ("outputs", "output too short", envelope((["r1"],)), "too_short"),
        ("outputs", "request id nil", envelope((output(None),)), "wrong_type"),
        ("outputs", "request id as bytes", envelope((output(b"r1"),)), "wrong_type"),
        ("outputs", "tokens nil", envelope((output(tokens=None),)), "wrong_type"),
        ("outputs", "tokens as bytes", envelope((output(tokens=b"\x01\x02"),)), "wrong_type"),
        ("outputs", "token negative", envelope((output(tokens=[-1]),)), "out_of_range"),
        ("outputs", "token over 32 bits", envelope((output(tokens=[2**32]),)), "out_of_range"),
        ("outputs", "token a float", envelope((output(tokens=[1.0]),)), "wrong_type"),
        ("outputs", "token a boolean", envelope((output(tokens=[True]),)), "wrong_type"),
        ("outputs", "token nil", envelope((output(tokens=[None]),)), "wrong_type"),
        ("outputs", "finish reason unknown", envelope((output(finish_reason=9),)), "out_of_range"),
        ("outputs", "finish reason negative", envelope((output(finish_reason=-1),)), "out_of_range"),
        ("outputs", "finish reason a string", envelope((output(finish_reason="stop"),)), "wrong_type"),
        ("outputs", "stop reason a float", envelope((output(stop_reason=1.5),)), "wrong_type"),
        ("outputs", "NaN count nil", envelope((output(num_nans_in_logits=None),)), "wrong_type"),
        ("outputs", "events a map", envelope((output(events={}),)), "wrong_type"),
        ("outputs", "transfer parameters an array", envelope((output(kv_transfer_params=[]),)), "wrong_type"),
        ("outputs", "prefill stats an array", envelope((output(prefill_stats=[]),)), "wrong_type"),
        ("outputs", "error a string", envelope((output(error="boom"),)), "wrong_type"),
        ("outputs", "error without a code", envelope((output(error={"message": "m", "retryable": False}),)), None),
        ("outputs", "admission too short", envelope((output(admission=["v7"]),)), "too_short"),
        ("outputs", "admission a map", envelope((output(admission={"weight_version": "v7"}),)), "wrong_type"),
        ("outputs", "admission label nil", envelope((output(admission=[None, 1]),)), "wrong_type"),
        *(
            ("outputs", f"{name} {title}", envelope((output(**{name: value}),)), reason)
            for name in ("kv_spans", "prompt_spans")
            for title, value, reason in (
                ("a map", {"v7": [0, 1]}, "wrong_type"),
                ("as bytes", b"", "wrong_type"),
                ("with a span as a map", [{"start": 0}], "wrong_type"),
                ("with a span too short", [["v7", 1, 0]], "too_short"),
                ("with a label nil", [[None, 1, 0, 1]], "wrong_type"),
                ("with a commit that is negative", [["v7", -1, 0, 1]], "out_of_range"),
                ("with a start that is negative", [["v7", 1, -1, 1]], "out_of_range"),
                ("with an end over 32 bits", [["v7", 1, 0, 2**32]], "out_of_range"),
                ("with an end that is a float", [["v7", 1, 0, 1.0]], "wrong_type"),
                ("nested 100 deep behind a span", [["v7", 1, 0, 1, nested(100)]], "too_deep"),
            )
        ),
        ("outputs", "log-probs as plain lists", envelope((output(new_logprobs=[[[42]], [[-0.5]], [1], None]),)), None),
        ("outputs", "log-probs too few arrays", envelope((output(new_logprobs=rows[:2]),)), "too_short"),
        ("outputs", "log-probs of another dtype", with_rows(0, array("<f4", [1, 2], [1.0, 2.0])), "bad_array"),
        (
            "outputs",
            "log-probs of an unknown dtype",
            with_rows(0, ["<c8", [1, 2], msgpack.ExtType(3, b"12345678" * 2)]),
            "bad_array",
        ),
        ("outputs", "log-probs of another shape", with_rows(1, array("<f4", [2, 1], [-0.5, -1.0])), "bad_array"),
        ("outputs", "log-probs in one dimension", with_rows(0, array("<i4", [2], [42, 7])), "bad_array"),
        (
            "outputs",
            "log-probs with too little data",
            with_rows(0, ["<i4", [1, 2], msgpack.ExtType(3, b"1234")]),
            "bad_array",
        ),
        (
            "outputs",
            "log-probs of a shape that overflows",
            with_rows(0, ["<i4", [2**32 - 1] * 2, msgpack.ExtType(3, b"1234")]),
            "bad_array",
        ),
        ("outputs", "log-probs in a buffer that did not come", with_rows(0, ["<i4", [1, 2], 1]), "bad_array"),
        (
            "outputs",
            "log-probs for more tokens than came",
            envelope((output(tokens=[], new_logprobs=rows),)),
            "bad_array",
        ),
        (
            "outputs",
            "pickled array data",
            with_rows(0, ["<i4", [1, 2], msgpack.ExtType(1, b"12345678")]),
            "bad_extension",
        ),
        (
            "outputs",
            "pickle in an element that is passed on",
            envelope((output(spec_decode_metrics=pickle),)),
            "bad_extension",
        ),
        ("outputs", "routed experts as pickle", envelope((output(routed_experts=pickle),)), "bad_extension"),
        ("outputs", "routed experts a map", envelope((output(routed_experts={}),)), "wrong_type"),
        *(
            ("outputs", f"routed experts {title}", envelope((output(routed_experts=experts),)), "bad_array")
            for title, experts in (
                ("in two dimensions", array("|u1", [2, 2], [0, 1, 2, 3])),
                ("in four dimensions", array("|u1", [1, 1, 2, 2], [0, 1, 2, 3])),
                ("in no dimension", array("|u1", [], [0])),
                ("as floats", array("<f4", [1, 1, 1], [0.0])),
                ("as 64-bit integers", array("<i8", [1, 1, 1], [0])),
                ("with too much data", ["|u1", [1, 1, 1], msgpack.ExtType(3, b"12")]),
                ("of a shape that overflows", ["|u1", [2**32 - 1] * 3, msgpack.ExtType(3, b"12")]),
                ("in a buffer that did not come", ["|u1", [1, 1, 1], 1]),
            )
        ),
        *(
            ("outputs", f"prompt log-probs {title}", envelope((output(new_prompt_logprobs_tensors=value),)), reason)
            for title, value, reason in (
                ("a string", "x", "wrong_type"),
                ("too few arrays", rows[:2], "too_short"),
                ("of another shape", [rows[0], array("<f4", [2, 1], [-0.5, -1.0]), rows[2]], "bad_array"),
                ("with an id that is negative", [array("<i4", [1, 2], [-1, 7]), rows[1], rows[2]], "out_of_range"),
                ("nested 100 deep behind the arrays", [*rows[:3], None, nested(100)], "too_deep"),
            )
        ),
        (
            "outputs",
            "error with a param that is no string",
            envelope((output(error={"code": "c", "message": "m", "param": 1}),)),
            "wrong_type",
        ),
        ("outputs", "prefix cache stats an array", envelope(scheduler_stats={"prefix_cache_stats": []}), "wrong_type"),
        ("outputs", "pickle behind the known elements", [*envelope((output(),)), pickle], "bad_extension"),
        (
            "outputs",
            "timestamp type behind the known elements",
            [*envelope((output(),)), msgpack.Timestamp(1, 0)],
            "bad_extension",
        ),
        (
            "outputs",
            "utility result with type information",
            envelope(utility_output=[7, None, [["builtins", "str"], "x"], None]),
            "bad_extension",
        ),
        (
            "outputs",
            "utility result as pickle",
            envelope(utility_output=[7, None, [None, pickle], None]),
            "bad_extension",
        ),
        ("outputs", "utility call id negative", envelope(utility_output=[-1, None, None, None]), "out_of_range"),
        ("outputs", "utility failure an integer", envelope(utility_output=[7, 1, None, None]), "wrong_type"),
        ("outputs", "utility reply too short", envelope(utility_output=[]), "too_short"),
        (
            "outputs",
            "nested 100 deep in an element that is passed on",
            envelope((output(pooling_output=nested(100)),)),
            "too_deep",
        ),
        ("outputs", "nested 100 deep behind the known elements", [*envelope((output(),)), nested(100)], "too_deep"),
        (
            "outputs",
            "nested 100 deep in a utility result",
            envelope(utility_output=[7, None, [None, nested(100)], None]),
            "too_deep",
        ),
        ("outputs", "nested 5000 deep", b"\x91" * 5000 + b"\xc0", None),
        ("request", "too short", request()[:8], "too_short"),
        ("request", "a map", {"request_id": "r1"}, "wrong_type"),
        ("request", "request id an integer", request(request_id=1), "wrong_type"),
        ("request", "a prompt id that is negative", request(prompt_token_ids=[-1]), "out_of_range"),
        ("request", "a prompt id over 32 bits", request(prompt_token_ids=[2**32]), "out_of_range"),
        ("request", "the prompt as bytes", request(prompt_token_ids=b"\x01"), "wrong_type"),
        ("request", "sampling params an array", request(sampling_params=[]), "wrong_type"),
        ("request", "arrival time nil", request(arrival_time=None), "wrong_type"),
        ("request", "priority nil", request(priority=None), "wrong_type"),
        ("request", "cache salt as bytes", request(cache_salt=b"s"), "wrong_type"),
        ("request", "temperature out of range for 32 bits", request(sampling_params={"temperature": 1e300}), None),
        ("request", "temperature a string", request(sampling_params={"temperature": "1"}), None),
        *(
            ("request", f"{name} {title}", request(sampling_params={name: value}), None)
            for name, title, value in (
                ("min_p", "a string", "0"),
                ("presence_penalty", "out of range for 32 bits", 1e300),
                ("repetition_penalty", "nil", None),
                ("logit_bias", "an array", [[1, 2.0]]),
                ("logit_bias", "with a key that is negative", {-1: 2.0}),
                ("logit_bias", "with a boolean", {1: True}),
                ("allowed_token_ids", "with an id over 32 bits", [2**32]),
                ("bad_words", "a string", "x"),
                ("bad_words", "with bytes", [b"x"]),
                ("_bad_words_token_ids", "with an id that is negative", [[-1]]),
                ("_bad_words_token_ids", "flat", [1]),
                ("structured_outputs", "an array", []),
                ("structured_outputs", "with a regex that is none", {"regex": 1}),
                ("skip_reading_prefix_cache", "an integer", 1),
                ("routed_experts", "an integer", 1),
                ("routed_experts_prompt_start", "negative", -1),
                ("prompt_logprobs", "a float", 1.5),
            )
        ),
        ("request", "provenance an array", request(provenance=[]), "wrong_type"),
        ("request", "provenance a string", request(provenance="new"), "wrong_type"),
        *(
            ("request", f"provenance: {name} {title}", request(provenance={name: value}), None)
            for name, title, value in (
                ("min_weight_commit", "negative", -1),
                ("min_weight_commit", "nil", None),
                ("min_weight_commit", "a float", 1.0),
                ("min_weight_commit", "a boolean", True),
                ("weight_wait_s", "negative", -0.5),
                ("weight_wait_s", "infinite", float("inf")),
                ("weight_wait_s", "not a number", float("nan")),
                ("weight_wait_s", "a string", "1"),
                ("max_weight_lag", "negative", -1),
                ("max_weight_lag", "a string", "1"),
                ("return_kv_versions", "an integer", 1),
                ("allow_stale_prefix", "nil", None),
            )
        ),
        ("request", "output kind unknown", request(sampling_params={"output_kind": 3}), None),
        ("abort", "a string", "r1", "wrong_type"),
        ("abort", "an integer among the ids", ["r1", 1], "wrong_type"),
        ("abort", "bytes among the ids", [b"r1"], "wrong_type"),
        ("utility_call", "too short", [0, 7, "resume_scheduler"], "too_short"),
        ("utility_call", "arguments a map", [0, 7, "resume_scheduler", {}], "wrong_type"),
        ("utility_call", "call id over 64 bits as a float", [0, 2.0**64, "resume_scheduler", []], "wrong_type"),
        ("client_hello", "another protocol", {**CLIENT_HELLO, "magic": "HTTP"}, "version"),
        ("client_hello", "another major version", {**CLIENT_HELLO, "version": [2, 0]}, "version"),
        ("client_hello", "an array", ["rollspan", [1, 0]], "wrong_type"),
        ("engine_hello", "another protocol", {**ENGINE_HELLO, "magic": "rollspun"}, "version"),
        ("engine_hello", "another major version", {**ENGINE_HELLO, "version": [0, 9]}, "version"),
        ("engine_hello", "no label", hello_less, None),
        ("engine_hello", "label an integer", {**ENGINE_HELLO, "weight_version": 7}, "wrong_type"),
        ("engine_hello", "weight state nil", {**ENGINE_HELLO, "weight_state": None}, "wrong_type"),
        ("engine_hello", "weight state a number", {**ENGINE_HELLO, "weight_state": 1}, "wrong_type"),
        ("engine_hello", "no limits", {**ENGINE_HELLO, "limits": {}}, None),
        (
            "engine_hello",
            "a limit negative",
            {**ENGINE_HELLO, "limits": {**HELLO_LIMITS, "vocab_size": -1}},
            "out_of_range",
        ),
        ("engine_hello", "model an array", {**ENGINE_HELLO, "model": []}, "wrong_type"),
        ("dead", "no message", {"reason": "engine_error"}, None),
    ]
