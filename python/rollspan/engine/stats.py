"""The scheduler_stats map of EngineCoreOutputs: vLLM's keys, all of them, and ours."""

from __future__ import annotations

from typing import Any

from rollspan.engine.scheduler import PauseState, Scheduler


def scheduler_stats(scheduler: Scheduler) -> dict[str, Any]:
    """State of the scheduler now. ``kv_cache_usage`` is a share from 0 to 1; ``paused`` is our own key."""
    return {
        "num_running_reqs": len(scheduler.running),
        "num_waiting_reqs": scheduler.num_waiting,
        "num_skipped_waiting_reqs": 0,
        "num_kv_fetch_reqs_by_stage": {},
        "step_counter": 0,
        "current_wave": 0,
        "kv_cache_usage": scheduler.pool.usage,
        "iteration_details": None,
        "prefix_cache_stats": {
            "reset": False,
            "requests": 0,
            "queries": 0,
            "hits": 0,
            "preempted_requests": 0,
            "preempted_queries": 0,
            "preempted_hits": 0,
            "hits_by_source": {},
        },
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
    }
