"""What GET /server_info says; ``rust/server`` has the twin."""

from __future__ import annotations

from typing import Any

import rollspan
from rollspan.frontend.state import Engine


def described(engine: Engine, facts: dict[str, Any]) -> dict[str, Any]:
    """vLLM's groups of settings as far as clients read them, and what the engine says about itself.

    Args:
        engine: the engine as it said hello.
        facts: the engine's answer to ``server_info``.
    """
    limits, model = engine.hello.limits, engine.hello.model
    return {
        "vllm_config": {
            "model_config": {
                "model": engine.root,
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
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
            "device_config": {"device": model.device},
            "weight_transfer_config": {"backend": "disk"},
        },
        "version": rollspan.__version__,
        "frontend": "python",
        "engine": {
            "version": engine.hello.rollspan_version,
            "engine_index": engine.hello.engine_index,
            "pid": engine.hello.pid,
            "num_parameters": model.num_parameters,
            "eos_token_ids": model.eos_token_ids,
            **facts,
        },
    }
