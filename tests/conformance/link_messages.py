"""Building blocks of the link vectors: MessagePack structures, spelled out independently of both codecs."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

HELLO_LIMITS = {
    "max_frame_bytes": 268435456,
    "max_model_len": 512,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_logprobs": 20,
    "vocab_size": 64,
    "block_size": 16,
    "num_blocks": 1024,
}
HELLO_MODEL = {
    "name": "add2-rl",
    "architecture": "LlamaForCausalLM",
    "dtype": "float32",
    "device": "cpu",
    "num_parameters": 123456,
    "eos_token_ids": [1, 2],
}
ENGINE_HELLO = {
    "magic": "rollspan",
    "version": [1, 0],
    "rollspan_version": "0.1.0",
    "engine_index": 0,
    "pid": 4711,
    "limits": HELLO_LIMITS,
    "model": HELLO_MODEL,
    "weight_version": "default",
    "weight_commit": 0,
    "paused": False,
}
CLIENT_HELLO = {
    "magic": "rollspan",
    "version": [1, 0],
    "role": "frontend",
    "name": "rollspan-http",
    "max_frame_bytes": 268435456,
}


_FORMATS = {"|u1": "B", "<i2": "h", "<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"} | {
    "int32": "i",
    "int64": "q",
    "float32": "f",
}


def array(dtype: str, shape: list[int], values: list[Any]) -> list[Any]:
    """An n-dimensional array with its data inline."""
    data = struct.pack("<" + _FORMATS[dtype] * len(values), *values)
    return [dtype, shape, msgpack.ExtType(3, data)]


def output(request_id: Any = "r1", tokens: Any = (42,), **fields: Any) -> list[Any]:
    """EngineCoreOutput with all 22 elements."""
    names = [
        "new_logprobs",
        "new_prompt_logprobs_tensors",
        "pooling_output",
        "finish_reason",
        "stop_reason",
        "events",
        "kv_transfer_params",
        "ec_transfer_params",
        "trace_headers",
        "prefill_stats",
        "routed_experts",
        "num_nans_in_logits",
        "mm_cache_miss_hashes",
        "new_sampling_mask",
        "spec_decode_metrics",
        "prompt_token_id_logprobs",
        "error",
        "admission",
        "kv_spans",
        "prompt_spans",
    ]
    values = {"num_nans_in_logits": 0, **fields}
    assert not set(fields) - set(names), fields
    return [request_id, list(tokens) if isinstance(tokens, tuple) else tokens, *(values.get(name) for name in names)]


def envelope(outputs: Any = (), **fields: Any) -> list[Any]:
    """EngineCoreOutputs with all 10 elements."""
    names = [
        "scheduler_stats",
        "timestamp",
        "utility_output",
        "finished_requests",
        "wave_complete",
        "start_wave",
        "weight_version",
        "weight_commit",
    ]
    values = {"timestamp": 1.5, **fields}
    assert not set(fields) - set(names) - {"engine_index"}, fields
    outputs = list(outputs) if isinstance(outputs, tuple) else outputs
    return [values.get("engine_index", 0), outputs, *(values.get(name) for name in names)]


def request(**fields: Any) -> list[Any]:
    """EngineCoreRequest with all 23 elements."""
    names = [
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "lora_request",
        "cache_salt",
        "data_parallel_rank",
        "prompt_embeds",
        "prompt_is_token_ids",
        "client_index",
        "current_wave",
        "priority",
        "trace_headers",
        "resumable",
        "external_req_id",
        "reasoning_ended",
        "reasoning_parser_kwargs",
        "abort_immediately",
        "session_id",
        "kv_hints",
        "provenance",
    ]
    defaults = {
        "request_id": "r1",
        "prompt_token_ids": [1, 2],
        "sampling_params": {},
        "arrival_time": 1.0,
        "client_index": 0,
        "current_wave": 0,
        "priority": 0,
        "resumable": False,
        "abort_immediately": False,
    }
    values = {**defaults, **fields}
    assert not set(fields) - set(names), fields
    return [values.get(name) for name in names]
