//! Prometheus metrics of one frontend. Names, labels and buckets are vLLM's, under `rollspan:`.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus::core::Collector;
use prometheus::{
    Encoder, GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::engine::Engine;

mod link;

pub(crate) use link::LinkMetrics;

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

/// Index of the engine, on all metrics.
const ENGINE: &str = "engine";

/// The families of all metrics; each engine has its own series in them.
pub(crate) struct Metrics {
    registry: Registry,
    /// Held while the gauges are set and read, so that each text is of one moment.
    rendering: Mutex<()>,
    running: IntGaugeVec,
    waiting: IntGaugeVec,
    kv_cache_usage: GaugeVec,
    paused: IntGaugeVec,
    weight_commit: IntGaugeVec,
    weight_version: IntGaugeVec,
    prompt_tokens: IntCounterVec,
    generation_tokens: IntCounterVec,
    finished: IntCounterVec,
    weight_updates: IntCounterVec,
    update_phases: HistogramVec,
    update_stall: HistogramVec,
    tokens_by_lag: IntCounterVec,
    spanning_update: IntCounterVec,
    decode_errors: IntCounterVec,
    skipped_fields: IntCounterVec,
    preemptions: IntCounterVec,
    cache_queries: IntCounterVec,
    cache_hits: IntCounterVec,
    first_token: HistogramVec,
    inter_token: HistogramVec,
    request: HistogramVec,
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

    fn register<C: Collector + Clone + 'static>(&self, metric: C) -> prometheus::Result<C> {
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn gauge(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntGaugeVec> {
        self.register(IntGaugeVec::new(self.options(name, help), &[&[ENGINE], labels].concat())?)
    }

    fn counter(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        self.register(IntCounterVec::new(self.options(name, help), &[&[ENGINE], labels].concat())?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> prometheus::Result<HistogramVec> {
        let options = HistogramOpts { common_opts: self.options(name, help), buckets: buckets.to_vec() };
        self.register(HistogramVec::new(options, &[&[ENGINE], labels].concat())?)
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
        let usage = make.options("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.");
        Ok(Self {
            running: make.gauge("num_requests_running", "Sequences in the running batch.", &[])?,
            waiting: make.gauge("num_requests_waiting", "Sequences waiting to be scheduled.", &[])?,
            kv_cache_usage: make.register(GaugeVec::new(usage, &[ENGINE])?)?,
            paused: make.gauge("paused", "1 while the scheduler is paused.", &[])?,
            weight_commit: make.gauge("weight_commit", "Commit number of the weights in force.", &[])?,
            weight_version: make.gauge(
                "weight_version_info",
                "1 for the label of the weights in force.",
                &["version"],
            )?,
            prompt_tokens: make.counter("prompt_tokens_total", "Prompt tokens computed.", &[])?,
            generation_tokens: make.counter("generation_tokens_total", "Tokens generated.", &[])?,
            finished: make.counter("request_success_total", "Finished output sequences.", &["finished_reason"])?,
            weight_updates: make.counter("weight_updates_total", "Weight updates, by result.", &["result"])?,
            update_phases: make.histogram(
                "weight_update_duration_seconds",
                "What a weight update took, by phase.",
                UPDATE_BUCKETS,
                &["phase"],
            )?,
            update_stall: make.histogram(
                "weight_update_stall_seconds",
                "How long no step could start because of a weight update.",
                UPDATE_BUCKETS,
                &[],
            )?,
            tokens_by_lag: make.counter(
                "generation_tokens_by_lag_total",
                "Tokens by how many commits were newer when their output ended.",
                &["lag"],
            )?,
            spanning_update: make.counter(
                "requests_spanning_update_total",
                "Output sequences whose tokens come from more than one commit.",
                &[],
            )?,
            decode_errors: make.counter("wire_decode_errors_total", "Messages that cannot be decoded.", &["reason"])?,
            skipped_fields: make.counter(
                "wire_skipped_fields_total",
                "Trailing elements that the decoder does not know.",
                &[],
            )?,
            preemptions: make.counter("num_preemptions_total", "Running requests that lost their KV blocks.", &[])?,
            cache_queries: make.counter(
                "prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache.",
                &[],
            )?,
            cache_hits: make.counter("prefix_cache_hits_total", "Prompt tokens found there.", &[])?,
            first_token: make.histogram(
                "time_to_first_token_seconds",
                "From arrival to the first token.",
                FIRST_TOKEN_BUCKETS,
                &[],
            )?,
            inter_token: make.histogram(
                "inter_token_latency_seconds",
                "Between two pieces of one output.",
                INTER_TOKEN_BUCKETS,
                &[],
            )?,
            request: make.histogram(
                "e2e_request_latency_seconds",
                "From arrival to the last token.",
                REQUEST_BUCKETS,
                &[],
            )?,
            registry,
            rendering: Mutex::new(()),
        })
    }

    /// The text format, with the gauges of these engines.
    ///
    /// # Errors
    /// A metric that cannot be written, which means a bug here.
    pub fn render(&self, engines: &[Arc<Engine>]) -> prometheus::Result<Vec<u8>> {
        let _rendering = self.rendering.lock().unwrap_or_else(PoisonError::into_inner);
        self.weight_version.reset();
        for engine in engines {
            let (status, index) = (engine.client.status(), engine.index().to_string());
            let labels: &[&str] = &[&index];
            self.running.with_label_values(labels).set(status.running.cast_signed());
            self.waiting.with_label_values(labels).set(status.waiting.cast_signed());
            self.kv_cache_usage.with_label_values(labels).set(status.kv_cache_usage);
            self.paused.with_label_values(labels).set(status.paused.into());
            self.weight_commit.with_label_values(labels).set(status.weight_commit.cast_signed());
            self.weight_version.with_label_values(&[&index, &*status.weight_version]).set(1);
        }
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }
}
