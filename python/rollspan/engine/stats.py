"""The maps of figures in EngineCoreOutputs, scheduler_stats and prefill_stats: vLLM's keys, all of them, and ours."""

from __future__ import annotations

import dataclasses
from typing import Any

from rollspan.engine.request import Request
from rollspan.engine.scheduler import PauseState, PrefixCacheStats, Scheduler
from rollspan.weights.state import WeightState


def scheduler_stats(scheduler: Scheduler, weights: WeightState, held: int = 0) -> dict[str, Any]:
    """State of the scheduler now, and what its prefix cache did since the last call.

    ``held`` more requests wait outside it. ``kv_cache_usage`` is a share from 0 to 1; ``paused``, ``num_preemptions``
    (since the start) and what is about ``weights`` are our own keys.
    """
    prefix, scheduler.prefix_stats = scheduler.prefix_stats, PrefixCacheStats()
    return {
        "num_running_reqs": len(scheduler.running),
        "num_waiting_reqs": scheduler.num_waiting + held,
        "num_skipped_waiting_reqs": 0,
        "num_kv_fetch_reqs_by_stage": {},
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": scheduler.pool.usage,
        "iteration_details": None,
        "prefix_cache_stats": {"reset": False, **dataclasses.asdict(prefix), "hits_by_source": {}},
        "connector_prefix_cache_stats": None,
        "kv_cache_eviction_events": [],
        "spec_decoding_stats": None,
        "kv_connector_stats": None,
        "ec_connector_stats": None,
        "waiting_lora_adapters": {},
        "running_lora_adapters": {},
        "cudagraph_stats": None,
        "perf_stats": None,
        "paused": scheduler.pause_state is not PauseState.UNPAUSED,
        "num_preemptions": scheduler.num_preemptions,
        "weight_state": weights.state,
        "weight_updates": {"success": weights.history.successes, "failure": weights.history.failures},
        "weight_update_seconds": weights.history.last_seconds,
    }


def prefill_stats(request: Request) -> dict[str, int]:
    """Tokens of a request's prompt, by where their KV came from; sent with its first output."""
    cached = request.num_cached_tokens
    return {
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_prompt_tokens - cached,
        "num_cached_tokens": cached,
        "num_local_cached_tokens": cached,
        "num_external_cached_tokens": 0,
        "num_cache_creation_tokens": 0,
    }
