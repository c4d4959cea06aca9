//! Metrics of one engine link.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus::{Histogram, IntCounter, IntCounterVec};
use rollspan_engine_client::{Finished, Observer};
use rollspan_protocol::{FinishReason, SchedulerStats};

use super::Metrics;

const UPDATE_PHASES: [&str; 4] = ["receive", "verify", "prepare", "commit"];

/// How many commits behind tokens are, the last one or more.
const LAGS: [&str; 4] = ["0", "1", "2", "3+"];

const FINISH_REASONS: [FinishReason; 5] =
    [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error, FinishReason::Repetition];

/// Series of one engine link. An engine that was restarted goes on with those of the one before.
pub(crate) struct LinkMetrics {
    index: String,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    /// In the order of [`FINISH_REASONS`], which is that of their numbers.
    finished: [IntCounter; FINISH_REASONS.len()],
    updates_done: EngineCount,
    updates_failed: EngineCount,
    update_phases: [Histogram; UPDATE_PHASES.len()],
    update_stall: Histogram,
    /// In the order of [`LAGS`].
    tokens_by_lag: [IntCounter; LAGS.len()],
    /// Highest commit that the engine has named.
    commit: AtomicU64,
    spanning_update: IntCounter,
    decode_errors: IntCounterVec,
    skipped_fields: IntCounter,
    preemptions: EngineCount,
    cache_queries: IntCounter,
    cache_hits: IntCounter,
    first_token: Histogram,
    inter_token: Histogram,
    request: Histogram,
}

/// What an engine itself counts from its start on.
struct EngineCount {
    counter: IntCounter,
    seen: AtomicU64,
}

impl EngineCount {
    fn new(counter: IntCounter) -> Self {
        Self { counter, seen: AtomicU64::new(0) }
    }

    /// Counts up to the engine's own count. Gives whether that was more.
    fn grow(&self, count: u64) -> bool {
        let more = count.saturating_sub(self.seen.fetch_max(count, Ordering::Relaxed));
        self.counter.inc_by(more);
        more > 0
    }
}

impl LinkMetrics {
    /// The series of the engine with this index.
    pub fn new(families: &Metrics, index: u64) -> Self {
        let index = index.to_string();
        let labels: &[&str] = &[&index];
        let counter = |family: &IntCounterVec| family.with_label_values(labels);
        let update = |result: &str| EngineCount::new(families.weight_updates.with_label_values(&[&index, result]));
        Self {
            prompt_tokens: counter(&families.prompt_tokens),
            generation_tokens: counter(&families.generation_tokens),
            finished: FINISH_REASONS.map(|reason| families.finished.with_label_values(&[&index, reason.as_str()])),
            updates_done: update("success"),
            updates_failed: update("failure"),
            update_phases: UPDATE_PHASES.map(|phase| families.update_phases.with_label_values(&[&index, phase])),
            update_stall: families.update_stall.with_label_values(labels),
            tokens_by_lag: LAGS.map(|lag| families.tokens_by_lag.with_label_values(&[&index, lag])),
            commit: AtomicU64::new(0),
            spanning_update: counter(&families.spanning_update),
            decode_errors: families.decode_errors.clone(),
            skipped_fields: counter(&families.skipped_fields),
            preemptions: EngineCount::new(counter(&families.preemptions)),
            cache_queries: counter(&families.cache_queries),
            cache_hits: counter(&families.cache_hits),
            first_token: families.first_token.with_label_values(labels),
            inter_token: families.inter_token.with_label_values(labels),
            request: families.request.with_label_values(labels),
            index,
        }
    }
}

impl Observer for LinkMetrics {
    fn first_tokens(&self, count: usize, prompt_tokens: usize, waited: Duration) {
        self.prompt_tokens.inc_by(prompt_tokens as u64);
        self.generation_tokens.inc_by(count as u64);
        self.first_token.observe(waited.as_secs_f64());
    }

    fn more_tokens(&self, count: usize, waited: Duration) {
        self.generation_tokens.inc_by(count as u64);
        self.inter_token.observe(waited.as_secs_f64());
    }

    fn finished(&self, finished: Finished) {
        self.finished[finished.reason as usize].inc();
        self.request.observe(finished.elapsed.as_secs_f64());
        if finished.commits.len() > 1 {
            self.spanning_update.inc();
        }
        let newest = self.commit.load(Ordering::Relaxed);
        for (commit, tokens) in finished.commits {
            let Some(commit) = commit else { continue };
            let lag = usize::try_from(newest.saturating_sub(commit)).unwrap_or(usize::MAX);
            self.tokens_by_lag[lag.min(LAGS.len() - 1)].inc_by(tokens as u64);
        }
    }

    fn weight_commit(&self, commit: u64) {
        self.commit.fetch_max(commit, Ordering::Relaxed);
    }

    fn scheduler_stats(&self, stats: &SchedulerStats) {
        if let Some(cache) = stats.prefix_cache_stats {
            self.cache_queries.inc_by(cache.queries);
            self.cache_hits.inc_by(cache.hits);
        }
        self.preemptions.grow(stats.num_preemptions);
        let updates = stats.weight_updates.unwrap_or_default();
        self.updates_failed.grow(updates.failure);
        if self.updates_done.grow(updates.success) {
            let seconds = stats.weight_update_seconds.unwrap_or_default();
            let phases = [seconds.receive, seconds.verify, seconds.prepare, seconds.commit];
            for (phase, seconds) in self.update_phases.iter().zip(phases) {
                phase.observe(seconds.max(0.0));
            }
            if let Some(stall) = seconds.stall {
                self.update_stall.observe(stall.max(0.0));
            }
        }
    }

    fn decode_error(&self, reason: &'static str) {
        self.decode_errors.with_label_values(&[&*self.index, reason]).inc();
    }

    fn skipped_fields(&self, count: u64) {
        self.skipped_fields.inc_by(count);
    }
}
