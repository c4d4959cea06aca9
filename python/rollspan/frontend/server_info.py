"""What GET /server_info says; ``rust/server`` has the twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rollspan
from rollspan.frontend.engine import Engine


def described(facts: Sequence[tuple[Engine, dict[str, Any]]], num_engines: int) -> dict[str, Any]:
    """vLLM's groups of settings as far as clients read them, and what the engines say about themselves.

    Args:
        facts: engines that are there, and their answers to ``server_info``; at least one.
        num_engines: size of the set. Of several engines the answer has a list besides the first one.
    """
    first, _ = facts[0]
    limits, model = first.hello.limits, first.hello.model
    engines = [_engine(engine, told) for engine, told in facts]
    config = engines[0].get("config")
    backend = config.get("weight_transfer_backend") if isinstance(config, dict) else None
    return {
        "vllm_config": {
            "model_config": {
                "model": first.root,
                "served_model_name": model.name,
                "architecture": model.architecture,
                "dtype": model.dtype,
                "max_model_len": limits.max_model_len,
                "max_logprobs": limits.max_logprobs,
                "vocab_size": limits.vocab_size,
            },
            "cache_config": {"block_size": limits.block_size, "num_gpu_blocks": limits.num_blocks},
            "scheduler_config": {
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
            },
            "parallel_config": {
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "data_parallel_size": num_engines,
            },
            "device_config": {"device": model.device},
            "weight_transfer_config": {"backend": backend if isinstance(backend, str) else "disk"},
        },
        "version": rollspan.__version__,
        "frontend": "python",
        "engine": engines[0],
        **({"engines": engines} if num_engines > 1 else {}),
    }


def _engine(engine: Engine, told: dict[str, Any]) -> dict[str, Any]:
    hello = engine.hello
    return {
        "version": hello.rollspan_version,
        "engine_index": hello.engine_index,
        "pid": hello.pid,
        "num_parameters": hello.model.num_parameters,
        "eos_token_ids": hello.model.eos_token_ids,
        **told,
    }
