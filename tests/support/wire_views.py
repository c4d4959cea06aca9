"""Decoded messages as plain JSON values, the way the conformance vectors write their meaning: defaults left out."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollspan.protocol import codec
from rollspan.protocol.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from rollspan.sampling_params import SamplingParams

PREFILL_KEYS = ("num_prompt_tokens", "num_computed_tokens", "num_cached_tokens")
SCHEDULER_KEYS = ("num_running_reqs", "num_waiting_reqs", "kv_cache_usage")
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
    "output_kind",
    "eos_token_id",
    "all_stop_token_ids",
)
SAMPLING_DEFAULTS = {"n": 1, "temperature": 1.0, "top_p": 1.0, "max_tokens": 16}


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
    return _without({**fields, "sampling_params": sampling}, {"client_index": 0, "priority": 0, "sampling_params": {}})


def sampling_view(params: SamplingParams) -> dict[str, Any]:
    """View of sampling parameters."""
    fields = {name: _plain(getattr(params, name)) for name in SAMPLING_KEYS}
    defaults = {**dict.fromkeys(SAMPLING_KEYS, 0), **SAMPLING_DEFAULTS, "ignore_eos": False}
    defaults |= {"stop_token_ids": [], "all_stop_token_ids": []}
    for name in ("seed", "logprobs", "eos_token_id"):
        del defaults[name]
    return _without(fields, defaults)


def _output_view(output: EngineCoreOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": output.request_id,
        "new_token_ids": output.new_token_ids,
        "finish_reason": None if output.finish_reason is None else int(output.finish_reason),
        "stop_reason": output.stop_reason,
        "error": None if output.error is None else dataclasses.asdict(output.error),
        "admission": None if output.admission is None else list(output.admission),
    }
    if output.prefill_stats is not None:
        fields["prefill_stats"] = {name: output.prefill_stats.get(name, 0) for name in PREFILL_KEYS}
    if output.new_logprobs is not None:
        fields["new_logprobs"] = {
            name: getattr(output.new_logprobs, name).tolist() for name in ("token_ids", "logprobs", "sampled_ranks")
        }
    return _without(fields, {"new_token_ids": []})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _without(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what is None or has its default."""
    return {name: value for name, value in fields.items() if value is not None and defaults.get(name) != value}
