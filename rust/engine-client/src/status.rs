//! What an engine last said about itself.

use std::sync::Arc;

use rollspan_protocol::{EngineHello, SchedulerStats};

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
    /// `ready`, `updating`, `inconsistent`, `undeclared` or `sleeping`.
    pub weight_state: Arc<str>,
}

impl EngineStatus {
    pub(crate) fn at_start(hello: &EngineHello) -> Self {
        Self {
            running: 0,
            waiting: 0,
            kv_cache_usage: 0.0,
            paused: hello.paused,
            weight_version: hello.weight_version.as_str().into(),
            weight_commit: hello.weight_commit,
            weight_state: hello.weight_state.as_str().into(),
        }
    }

    /// Takes in what a message says, as far as it does.
    pub(crate) fn update(
        &mut self,
        stats: Option<&SchedulerStats>,
        weight_version: Option<&Arc<str>>,
        weight_commit: Option<u64>,
    ) {
        if let Some(stats) = stats {
            self.running = stats.num_running_reqs;
            self.waiting = stats.num_waiting_reqs;
            self.kv_cache_usage = stats.kv_cache_usage;
            self.paused = stats.paused.unwrap_or(self.paused);
            if let Some(state) = &stats.weight_state {
                self.weight_state = Arc::clone(state);
            }
        }
        // The outputs of a step come behind the commit that it was launched before.
        if weight_commit.is_some_and(|commit| commit < self.weight_commit) {
            return;
        }
        if let Some(label) = weight_version {
            self.weight_version = Arc::clone(label);
        }
        self.weight_commit = weight_commit.unwrap_or(self.weight_commit);
    }

    /// The engine is gone, and nothing runs any more.
    pub(crate) fn stop(&mut self) {
        self.running = 0;
        self.waiting = 0;
        self.kv_cache_usage = 0.0;
    }
}
