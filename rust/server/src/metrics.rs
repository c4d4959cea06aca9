//! Prometheus metrics of one engine link. Names, labels and buckets are vLLM's, under `rollspan:`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};
use rollspan_engine_client::{EngineStatus, Finished, Observer};
use rollspan_protocol::{FinishReason, SchedulerStats};

/// Content type of [`Metrics::render`].
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Seconds.
const FIRST_TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const INTER_TOKEN_BUCKETS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const REQUEST_BUCKETS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];

const UPDATE_BUCKETS: &[f64] =
    &[0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0];

const UPDATE_PHASES: [&str; 4] = ["receive", "verify", "prepare", "commit"];

/// How many commits behind tokens are, the last one or more.
const LAGS: [&str; 4] = ["0", "1", "2", "3+"];

const FINISH_REASONS: [FinishReason; 5] =
    [FinishReason::Stop, FinishReason::Length, FinishReason::Abort, FinishReason::Error, FinishReason::Repetition];

/// Counters, gauges and histograms.
pub(crate) struct Metrics {
    registry: Registry,
    /// Held while the gauges are set and read, so that each text is of one moment.
    rendering: Mutex<()>,
    running: IntGauge,
    waiting: IntGauge,
    kv_cache_usage: Gauge,
    paused: IntGauge,
    weight_commit: IntGauge,
    weight_version: IntGaugeVec,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    /// In the order of [`FINISH_REASONS`], which is that of their numbers.
    finished: [IntCounter; 5],
    weight_updates: [IntCounter; 2],
    update_phases: [Histogram; 4],
    update_stall: Histogram,
    /// In the order of [`LAGS`].
    tokens_by_lag: [IntCounter; LAGS.len()],
    /// Highest commit that the engine has named.
    commit: AtomicU64,
    spanning_update: IntCounter,
    decode_errors: IntCounterVec,
    skipped_fields: IntCounter,
    preemptions: IntCounter,
    cache_queries: IntCounter,
    cache_hits: IntCounter,
    first_token: Histogram,
    inter_token: Histogram,
    request: Histogram,
}

/// Makes the metrics of one model and registers them.
struct Factory<'a> {
    registry: &'a Registry,
    model_name: &'a str,
}

impl Factory<'_> {
    fn options(&self, name: &str, help: &str) -> Opts {
        Opts::new(format!("rollspan:{name}"), help).const_label("model_name", self.model_name)
    }

    fn register<C: prometheus::core::Collector + Clone + 'static>(&self, metric: C) -> prometheus::Result<C> {
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.register(IntGauge::with_opts(self.options(name, help))?)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.register(IntCounter::with_opts(self.options(name, help))?)
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> prometheus::Result<IntCounterVec> {
        self.register(IntCounterVec::new(self.options(name, help), &[label])?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        let options = HistogramOpts { common_opts: self.options(name, help), buckets: buckets.to_vec() };
        self.register(Histogram::with_opts(options)?)
    }

    fn histograms(&self, name: &str, help: &str, buckets: &[f64], label: &str) -> prometheus::Result<HistogramVec> {
        let options = HistogramOpts { common_opts: self.options(name, help), buckets: buckets.to_vec() };
        self.register(HistogramVec::new(options, &[label])?)
    }
}

impl Metrics {
    /// Metrics with the label `model_name`.
    ///
    /// # Errors
    /// The registry refuses a name, which means a bug here.
    pub fn new(model_name: &str) -> prometheus::Result<Self> {
        let registry = Registry::new();
        let make = Factory { registry: &registry, model_name };
        let finished = make.counters("request_success_total", "Finished output sequences.", "finished_reason")?;
        let updates = make.counters("weight_updates_total", "Weight updates, by result.", "result")?;
        let phases = make.histograms(
            "weight_update_duration_seconds",
            "What a weight update took, by phase.",
            UPDATE_BUCKETS,
            "phase",
        )?;
        let by_lag = make.counters(
            "generation_tokens_by_lag_total",
            "Tokens by how many commits were newer when their output ended.",
            "lag",
        )?;
        let version = make.options("weight_version_info", "1 for the label of the weights in force.");
        let usage = make.options("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.");
        Ok(Self {
            running: make.gauge("num_requests_running", "Sequences in the running batch.")?,
            waiting: make.gauge("num_requests_waiting", "Sequences waiting to be scheduled.")?,
            kv_cache_usage: make.register(Gauge::with_opts(usage)?)?,
            paused: make.gauge("paused", "1 while the scheduler is paused.")?,
            weight_commit: make.gauge("weight_commit", "Commit number of the weights in force.")?,
            weight_version: make.register(IntGaugeVec::new(version, &["version"])?)?,
            prompt_tokens: make.counter("prompt_tokens_total", "Prompt tokens computed.")?,
            generation_tokens: make.counter("generation_tokens_total", "Tokens generated.")?,
            finished: FINISH_REASONS.map(|reason| finished.with_label_values(&[reason.as_str()])),
            weight_updates: ["success", "failure"].map(|result| updates.with_label_values(&[result])),
            update_phases: UPDATE_PHASES.map(|phase| phases.with_label_values(&[phase])),
            update_stall: make.histogram(
                "weight_update_stall_seconds",
                "How long no step could start because of a weight update.",
                UPDATE_BUCKETS,
            )?,
            tokens_by_lag: LAGS.map(|lag| by_lag.with_label_values(&[lag])),
            commit: AtomicU64::new(0),
            spanning_update: make.counter(
                "requests_spanning_update_total",
                "Output sequences whose tokens come from more than one commit.",
            )?,
            decode_errors: make.counters("wire_decode_errors_total", "Messages that cannot be decoded.", "reason")?,
            skipped_fields: make
                .counter("wire_skipped_fields_total", "Trailing elements that the decoder does not know.")?,
            preemptions: make.counter("num_preemptions_total", "Running requests that lost their KV blocks.")?,
            cache_queries: make
                .counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.")?,
            cache_hits: make.counter("prefix_cache_hits_total", "Prompt tokens found there.")?,
            first_token: make.histogram(
                "time_to_first_token_seconds",
                "From arrival to the first token.",
                FIRST_TOKEN_BUCKETS,
            )?,
            inter_token: make.histogram(
                "inter_token_latency_seconds",
                "Between two pieces of one output.",
                INTER_TOKEN_BUCKETS,
            )?,
            request: make.histogram(
                "e2e_request_latency_seconds",
                "From arrival to the last token.",
                REQUEST_BUCKETS,
            )?,
            registry,
            rendering: Mutex::new(()),
        })
    }

    /// The text format, with the gauges of this status.
    ///
    /// # Errors
    /// A metric that cannot be written, which means a bug here.
    pub fn render(&self, status: &EngineStatus) -> prometheus::Result<Vec<u8>> {
        let _rendering = self.rendering.lock().unwrap_or_else(PoisonError::into_inner);
        self.running.set(status.running.cast_signed());
        self.waiting.set(status.waiting.cast_signed());
        self.kv_cache_usage.set(status.kv_cache_usage);
        self.paused.set(status.paused.into());
        self.weight_commit.set(status.weight_commit.cast_signed());
        self.weight_version.reset();
        self.weight_version.with_label_values(&[&*status.weight_version]).set(1);
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}

/// Counts up to the engine's own count. Gives whether that was more.
fn grow(counter: &IntCounter, count: u64) -> bool {
    let more = count.saturating_sub(counter.get());
    counter.inc_by(more);
    more > 0
}

/// Lets the link feed the metrics.
pub(crate) struct LinkObserver(pub Arc<Metrics>);

impl Observer for LinkObserver {
    fn first_tokens(&self, count: usize, prompt_tokens: usize, waited: Duration) {
        self.0.prompt_tokens.inc_by(prompt_tokens as u64);
        self.0.generation_tokens.inc_by(count as u64);
        self.0.first_token.observe(waited.as_secs_f64());
    }

    fn more_tokens(&self, count: usize, waited: Duration) {
        self.0.generation_tokens.inc_by(count as u64);
        self.0.inter_token.observe(waited.as_secs_f64());
    }

    fn finished(&self, finished: Finished) {
        self.0.finished[finished.reason as usize].inc();
        self.0.request.observe(finished.elapsed.as_secs_f64());
        if finished.commits.len() > 1 {
            self.0.spanning_update.inc();
        }
        let newest = self.0.commit.load(Ordering::Relaxed);
        for (commit, tokens) in finished.commits {
            let Some(commit) = commit else { continue };
            let lag = usize::try_from(newest.saturating_sub(commit)).unwrap_or(usize::MAX);
            self.0.tokens_by_lag[lag.min(LAGS.len() - 1)].inc_by(tokens as u64);
        }
    }

    fn weight_commit(&self, commit: u64) {
        self.0.commit.fetch_max(commit, Ordering::Relaxed);
    }

    fn scheduler_stats(&self, stats: &SchedulerStats) {
        if let Some(cache) = stats.prefix_cache_stats {
            self.0.cache_queries.inc_by(cache.queries);
            self.0.cache_hits.inc_by(cache.hits);
        }
        // The engine counts from its start; one link's messages come one after another.
        grow(&self.0.preemptions, stats.num_preemptions);
        let updates = stats.weight_updates.unwrap_or_default();
        let [success, failure] = &self.0.weight_updates;
        grow(failure, updates.failure);
        if grow(success, updates.success) {
            let seconds = stats.weight_update_seconds.unwrap_or_default();
            let phases = [seconds.receive, seconds.verify, seconds.prepare, seconds.commit];
            for (phase, seconds) in self.0.update_phases.iter().zip(phases) {
                phase.observe(seconds.max(0.0));
            }
            if let Some(stall) = seconds.stall {
                self.0.update_stall.observe(stall.max(0.0));
            }
        }
    }

    fn decode_error(&self, reason: &'static str) {
        self.0.decode_errors.with_label_values(&[reason]).inc();
    }

    fn skipped_fields(&self, count: u64) {
        self.0.skipped_fields.inc_by(count);
    }
}
