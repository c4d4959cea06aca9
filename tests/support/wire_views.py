"""Decoded messages as plain JSON values, the way the conformance vectors write their meaning: defaults left out."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollspan.protocol import codec
from rollspan.protocol.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from rollspan.sampling_params import SamplingParams

PREFILL_KEYS = ("num_prompt_tokens", "num_computed_tokens", "num_cached_tokens")
SCHEDULER_KEYS = ("num_running_reqs", "num_waiting_reqs", "kv_cache_usage")
PREFIX_CACHE_KEYS = ("requests", "queries", "hits", "preempted_requests")
SAMPLING_KEYS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "bad_words_token_ids",
    "structured_outputs",
    "skip_reading_prefix_cache",
    "routed_experts",
    "routed_experts_prompt_start",
    "output_kind",
    "eos_token_id",
    "all_stop_token_ids",
)
SAMPLING_DEFAULTS = {
    **dict.fromkeys(SAMPLING_KEYS, 0),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), 1.0),
    **{name: [] for name in ("stop_token_ids", "all_stop_token_ids", "bad_words", "bad_words_token_ids")},
    **dict.fromkeys(("seed", "logprobs", "prompt_logprobs", "eos_token_id"), None),
    **dict.fromkeys(("skip_reading_prefix_cache", "routed_experts"), None),
    "ignore_eos": False,
    "n": 1,
    "max_tokens": 16,
}


def view(kind: str, frames: list[bytes]) -> dict[str, Any]:
    """Decodes a message of that kind and gives its view.

    Raises:
        DecodeError: the message is refused.
        RollspanError: the request asks for what the engine does not take.
    """
    payload = frames[0]
    if kind == "outputs":
        return outputs_view(codec.decode_outputs(frames))
    if kind == "request":
        return request_view(codec.decode_request(payload))
    if kind == "abort":
        return {"request_ids": codec.decode_abort(payload)}
    decode = {
        "utility_call": codec.decode_utility_call,
        "client_hello": codec.decode_client_hello,
        "engine_hello": codec.decode_engine_hello,
        "dead": codec.decode_dead,
    }[kind]
    fields = dataclasses.asdict(decode(payload))
    if kind == "client_hello":
        assert fields.pop("role") == "frontend"
    if fields.get("weight_state") == "ready":
        del fields["weight_state"]
    return _plain(fields)


def outputs_view(message: EngineCoreOutputs) -> dict[str, Any]:
    """View of an OUTPUTS message."""
    fields: dict[str, Any] = {
        name: getattr(message, name)
        for name in ("engine_index", "timestamp", "wave_complete", "start_wave", "weight_version", "weight_commit")
    }
    fields["skipped_fields"] = message.skipped_fields
    fields["outputs"] = [_output_view(output) for output in message.outputs]
    fields["finished_requests"] = message.finished_requests
    if message.utility_output is not None:
        fields["utility_output"] = _without(dataclasses.asdict(message.utility_output), {})
    if message.scheduler_stats is not None:
        stats = message.scheduler_stats
        fields["scheduler_stats"] = {name: stats.get(name, 0) for name in SCHEDULER_KEYS}
        cache = {name: stats.get("prefix_cache_stats", {}).get(name, 0) for name in PREFIX_CACHE_KEYS}
        if any(cache.values()):
            fields["scheduler_stats"]["prefix_cache_stats"] = cache
    defaults = {"engine_index": 0, "timestamp": 0.0, "skipped_fields": 0, "outputs": []}
    return _without(fields, defaults)


def request_view(request: EngineCoreRequest) -> dict[str, Any]:
    """View of an ADD message."""
    fields = {
        name: getattr(request, name)
        for name in (
            "request_id",
            "prompt_token_ids",
            "arrival_time",
            "cache_salt",
            "client_index",
            "priority",
            "external_req_id",
            "session_id",
        )
    }
    sampling = sampling_view(request.sampling_params)
    fields |= {"sampling_params": sampling, "provenance": request.provenance.to_wire()}
    return _without(fields, {"client_index": 0, "priority": 0, "sampling_params": {}})


def sampling_view(params: SamplingParams) -> dict[str, Any]:
    """View of sampling parameters."""
    fields = {name: _plain(getattr(params, name)) for name in SAMPLING_KEYS}
    if params.logit_bias is not None:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    return _without(fields, SAMPLING_DEFAULTS)


def _output_view(output: EngineCoreOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": output.request_id,
        "new_token_ids": output.new_token_ids,
        "finish_reason": None if output.finish_reason is None else int(output.finish_reason),
        "stop_reason": output.stop_reason,
        "error": None if output.error is None else _without(dataclasses.asdict(output.error), {}),
        "admission": None if output.admission is None else list(output.admission),
    }
    for key in ("kv_spans", "prompt_spans"):
        fields[key] = _plain(getattr(output, key))
    if output.prefill_stats is not None:
        fields["prefill_stats"] = {name: output.prefill_stats.get(name, 0) for name in PREFILL_KEYS}
    for key in ("new_logprobs", "new_prompt_logprobs"):
        lists = getattr(output, key)
        if lists is not None:
            arrays = ("token_ids", "logprobs", "sampled_ranks")
            fields[key] = {name: getattr(lists, name).tolist() for name in arrays}
    experts = output.routed_experts
    if experts is not None:
        fields["routed_experts"] = [experts.dtype.str, list(experts.shape), experts.ravel().tolist()]
    return _without(fields, {"new_token_ids": []})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _without(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what is None or has its default."""
    return {name: value for name, value in fields.items() if value is not None and defaults.get(name) != value}
