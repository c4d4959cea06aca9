//! Maps of counters that travel with outputs.

use std::sync::Arc;

use serde::Serialize;

use crate::fields::map_struct;

/// State of the scheduler after a step. Keys that are absent are 0; unknown ones are ignored.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct SchedulerStats {
    /// Requests in the running batch.
    pub num_running_reqs: u64,
    /// Requests that wait for a place in it.
    pub num_waiting_reqs: u64,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_cache_usage: f64,
    /// Steps launched so far.
    pub step_counter: u64,
    /// What the prefix cache did since the last stats; `None` from engines that don't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_cache_stats: Option<PrefixCacheStats>,
    /// Running requests that lost their KV blocks, since the engine started (ours).
    pub num_preemptions: u64,
    /// Whether the scheduler is paused (ours); `None` from engines that don't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// `ready`, `updating`, `inconsistent`, `undeclared` or `sleeping` (ours); `None` from engines that don't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_state: Option<Arc<str>>,
    /// How weight updates ended (ours); `None` from engines that don't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_updates: Option<WeightUpdates>,
    /// What the last commit took (ours); `None` before the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_update_seconds: Option<WeightUpdateSeconds>,
}

map_struct! {
    SchedulerStats:
    defaulted num_running_reqs,
    defaulted num_waiting_reqs,
    defaulted kv_cache_usage,
    defaulted step_counter,
    defaulted prefix_cache_stats,
    defaulted num_preemptions,
    defaulted paused,
    defaulted weight_state,
    defaulted weight_updates,
    defaulted weight_update_seconds,
}

/// Weight updates since the engine started, by their end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct WeightUpdates {
    /// Those that were committed.
    pub success: u64,
    /// Those that were dropped.
    pub failure: u64,
}

map_struct! {
    WeightUpdates:
    defaulted success,
    defaulted failure,
}

/// Seconds that a weight update took, by phase. Phases that are absent took none.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct WeightUpdateSeconds {
    /// Taking the tensors in.
    pub receive: f64,
    /// Checking and hashing them.
    pub verify: f64,
    /// Making what is derived from them.
    pub prepare: f64,
    /// Putting them in force.
    pub commit: f64,
    /// How long no step could be launched for it; `None` from engines that don't say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stall: Option<f64>,
}

map_struct! {
    WeightUpdateSeconds:
    defaulted receive,
    defaulted verify,
    defaulted prepare,
    defaulted commit,
    defaulted stall,
}

/// Look-ups in the prefix cache. Keys that are absent are 0; unknown ones are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PrefixCacheStats {
    /// Requests looked up for the first time.
    pub requests: u64,
    /// Their tokens.
    pub queries: u64,
    /// Of these, found.
    pub hits: u64,
    /// Requests looked up again after a preemption.
    pub preempted_requests: u64,
}

map_struct! {
    PrefixCacheStats:
    defaulted requests,
    defaulted queries,
    defaulted hits,
    defaulted preempted_requests,
}

/// How the prompt of a request was computed. Keys that are absent are 0; unknown ones are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct PrefillStats {
    /// Tokens of the prompt.
    pub num_prompt_tokens: u64,
    /// Of these, computed by this engine.
    pub num_computed_tokens: u64,
    /// Of these, taken from a cache.
    pub num_cached_tokens: u64,
}

map_struct! {
    PrefillStats:
    defaulted num_prompt_tokens,
    defaulted num_computed_tokens,
    defaulted num_cached_tokens,
}
