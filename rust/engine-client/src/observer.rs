//! What the link tells a metrics collector.

use std::time::Duration;

use rollspan_protocol::{FinishReason, SchedulerStats};

/// One output sequence that ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// How it ended; `Abort` also when its client went away.
    pub reason: FinishReason,
    /// Time since it was submitted.
    pub elapsed: Duration,
    /// Commits that sampled its tokens, in order, and how many each.
    pub commits: Vec<(Option<u64>, usize)>,
}

/// Gets the events of the link; called on the reader's task, so every method must be quick and must not block.
pub trait Observer: Send + Sync + 'static {
    /// The first new tokens of an output sequence: the length of its prompt, and the time since it was submitted.
    fn first_tokens(&self, count: usize, prompt_tokens: usize, waited: Duration);
    /// More new tokens of an output sequence, and the time since those before.
    fn more_tokens(&self, count: usize, waited: Duration);
    /// An output sequence ended.
    fn finished(&self, finished: Finished);
    /// The engine named a commit of its weights; later ones have higher numbers.
    fn weight_commit(&self, commit: u64);
    /// The engine reported its scheduler's state.
    fn scheduler_stats(&self, stats: &SchedulerStats);
    /// A message was refused, with the stable reason of the decode error.
    fn decode_error(&self, reason: &'static str);
    /// A message had this many elements that this version does not know.
    fn skipped_fields(&self, count: u64);
}

/// Observes nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn first_tokens(&self, _: usize, _: usize, _: Duration) {}
    fn more_tokens(&self, _: usize, _: Duration) {}
    fn finished(&self, _: Finished) {}
    fn weight_commit(&self, _: u64) {}
    fn scheduler_stats(&self, _: &SchedulerStats) {}
    fn decode_error(&self, _: &'static str) {}
    fn skipped_fields(&self, _: u64) {}
}
