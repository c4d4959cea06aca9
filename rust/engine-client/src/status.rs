//! What an engine last said about itself.

use std::sync::Arc;

/// State of an engine as of its last message.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineStatus {
    /// Requests that the scheduler runs.
    pub running: u64,
    /// Requests that wait in its queue.
    pub waiting: u64,
    /// Share of the KV blocks in use, 0 to 1.
    pub kv_cache_usage: f64,
    /// Whether the scheduler is paused.
    pub paused: bool,
    /// Label of the weights in force.
    pub weight_version: Arc<str>,
    /// Their commit number.
    pub weight_commit: u64,
}
