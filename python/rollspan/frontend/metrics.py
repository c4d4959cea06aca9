"""Prometheus metrics of the frontend, fed by what passes over the engine link.

Names, labels and buckets are vLLM's, under ``rollspan:``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from rollspan.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineHello,
    FinishReason,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Seconds.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
UPDATE_BUCKETS = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5),
    *(1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
UPDATE_PHASES = ("receive", "verify", "prepare", "commit")
UPDATE_RESULTS = ("success", "failure")
#: vLLM's: the served model, and the index of the engine.
LABELS = ("model_name", "engine")
#: How many commits behind tokens are, the last one or more.
LAGS = ("0", "1", "2", "3+")
FINISH_REASONS = tuple(str(reason) for reason in FinishReason)


@dataclass(slots=True)
class _Sequence:
    """One open output sequence; times are ``time.monotonic`` seconds, ``tokens`` are counted by their commit."""

    prompt_tokens: int
    arrival: float
    last_token: float | None = None
    tokens: dict[int | None, int] = field(default_factory=dict)


class MetricFamilies:
    """The families of all metrics; each engine has its own series in them.

    Attributes:
        shown_versions: by labels of an engine, the weight version that its series of ``version`` names.
    """

    def __init__(self, model_name: str) -> None:
        # Otherwise each counter comes with a second series of its birth time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.model_name = model_name
        self._registry = CollectorRegistry()
        self.running = self._gauge("num_requests_running", "Sequences in the running batch.")
        self.waiting = self._gauge("num_requests_waiting", "Sequences waiting to be scheduled.")
        self.cache_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self.paused = self._gauge("paused", "1 while the scheduler is paused.")
        self.commit = self._gauge("weight_commit", "Commit number of the weights in force.")
        self.shown_versions: dict[tuple[str, str], str] = {}
        self.version = self._gauge("weight_version_info", "1 for the label of the weights in force.", "version")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.success = self._counter("request_success", "Finished output sequences.", "finished_reason")
        self.updates = self._counter("weight_updates", "Weight updates, by result.", "result")
        self.update_phases = self._histogram(
            "weight_update_duration_seconds", "What a weight update took, by phase.", UPDATE_BUCKETS, "phase"
        )
        self.stall = self._histogram(
            "weight_update_stall_seconds", "How long no step could start because of a weight update.", UPDATE_BUCKETS
        )
        self.by_lag = self._counter(
            "generation_tokens_by_lag", "Tokens by how many commits were newer when their output ended.", "lag"
        )
        self.spanning = self._counter(
            "requests_spanning_update", "Output sequences whose tokens come from more than one commit."
        )
        self.decode_errors = self._counter("wire_decode_errors", "Messages that can't be decoded.", "reason")
        self.skipped = self._counter("wire_skipped_fields", "Trailing elements that the decoder does not know.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between two pieces of one output.", INTER_TOKEN_BUCKETS
        )
        self.request = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS
        )
        self.preemptions = self._counter("num_preemptions", "Running requests that lost their KV blocks.")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found there.")

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"rollspan:{name}", text, (*LABELS, *labels), registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"rollspan:{name}", text, (*LABELS, *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"rollspan:{name}", text, (*LABELS, *labels), registry=self._registry, buckets=buckets)


class Metrics:
    """Series of one engine link. An engine that was restarted goes on with those of the one before."""

    def __init__(self, families: MetricFamilies, hello: EngineHello) -> None:
        self._families = families
        self._labels = labels = (families.model_name, str(hello.engine_index))
        self._current_commit = 0
        self._sequences: dict[str, _Sequence] = {}
        self._running = families.running.labels(*labels)
        self._waiting = families.waiting.labels(*labels)
        self._cache_usage = families.cache_usage.labels(*labels)
        self._paused = families.paused.labels(*labels)
        self._commit = families.commit.labels(*labels)
        self._prompt_tokens = families.prompt_tokens.labels(*labels)
        self._generation_tokens = families.generation_tokens.labels(*labels)
        self._success = {reason: families.success.labels(*labels, reason) for reason in FINISH_REASONS}
        self._updates = {result: families.updates.labels(*labels, result) for result in UPDATE_RESULTS}
        self._updates_seen = dict.fromkeys(UPDATE_RESULTS, 0)
        self._update_phases = {phase: families.update_phases.labels(*labels, phase) for phase in UPDATE_PHASES}
        self._stall = families.stall.labels(*labels)
        self._by_lag = [families.by_lag.labels(*labels, lag) for lag in LAGS]
        self._spanning = families.spanning.labels(*labels)
        self._skipped = families.skipped.labels(*labels)
        self._first_token = families.first_token.labels(*labels)
        self._inter_token = families.inter_token.labels(*labels)
        self._request = families.request.labels(*labels)
        self._preemptions = families.preemptions.labels(*labels)
        self._preemptions_seen = 0
        self._cache_queries = families.cache_queries.labels(*labels)
        self._cache_hits = families.cache_hits.labels(*labels)
        self._paused.set(hello.paused)
        self._set_weights(hello.weight_version, hello.weight_commit)

    def request_added(self, request: EngineCoreRequest) -> None:
        """A sequence goes to the engine."""
        self._sequences[request.request_id] = _Sequence(len(request.prompt_token_ids), time.monotonic())

    def requests_aborted(self, request_ids: list[str]) -> None:
        """Sequences that end because their client is gone or somebody aborted them."""
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                self._finished(sequence, "abort", time.monotonic())

    def outputs_received(self, message: EngineCoreOutputs) -> None:
        """One message of the engine."""
        if message.skipped_fields:
            self._skipped.inc(message.skipped_fields)
        # The outputs of a step come behind the commit that it was launched before.
        if message.weight_commit is None or message.weight_commit >= self._current_commit:
            self._set_weights(message.weight_version, message.weight_commit)
        if message.scheduler_stats is not None:
            self._state_changed(message.scheduler_stats)
        now = time.monotonic()
        tokens = 0
        for output in message.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is not None:
                tokens += len(output.new_token_ids)
                self._output_received(sequence, output, message.weight_commit, now)
        if tokens:
            self._generation_tokens.inc(tokens)

    def decode_failed(self, reason: str, count: int = 1) -> None:
        """Messages of the engine could not be decoded."""
        self._families.decode_errors.labels(*self._labels, reason).inc(count)

    def link_ended(self) -> None:
        """The engine is gone, and every open sequence with it."""
        now = time.monotonic()
        for sequence in self._sequences.values():
            self._finished(sequence, "error", now)
        self._sequences.clear()
        for gauge in (self._running, self._waiting, self._cache_usage):
            gauge.set(0)

    def _output_received(self, sequence: _Sequence, output: EngineCoreOutput, commit: int | None, now: float) -> None:
        if output.new_token_ids:
            if sequence.last_token is None:
                self._prompt_tokens.inc(sequence.prompt_tokens)
                self._first_token.observe(now - sequence.arrival)
            else:
                self._inter_token.observe(now - sequence.last_token)
            sequence.last_token = now
            sequence.tokens[commit] = sequence.tokens.get(commit, 0) + len(output.new_token_ids)
        if output.finish_reason is not None:
            del self._sequences[output.request_id]
            self._finished(sequence, str(output.finish_reason), now)

    def _finished(self, sequence: _Sequence, reason: str, now: float) -> None:
        self._success[reason].inc()
        self._request.observe(now - sequence.arrival)
        if len(sequence.tokens) > 1:
            self._spanning.inc()
        for commit, count in sequence.tokens.items():
            if commit is not None:
                lag = max(self._current_commit - commit, 0)
                self._by_lag[min(lag, len(LAGS) - 1)].inc(count)

    def _state_changed(self, stats: dict[str, Any]) -> None:
        for gauge, key in (
            (self._running, "num_running_reqs"),
            (self._waiting, "num_waiting_reqs"),
            (self._cache_usage, "kv_cache_usage"),
            (self._paused, "paused"),
        ):
            value = stats.get(key)
            if isinstance(value, (int, float)):
                gauge.set(value)
        cache = stats.get("prefix_cache_stats") or {}
        for counter, key in ((self._cache_queries, "queries"), (self._cache_hits, "hits")):
            counter.inc(_count(cache.get(key)))
        preemptions = _count(stats.get("num_preemptions"))
        self._preemptions.inc(max(preemptions - self._preemptions_seen, 0))
        self._preemptions_seen = max(preemptions, self._preemptions_seen)
        self._updates_changed(stats.get("weight_updates") or {}, stats.get("weight_update_seconds") or {})

    def _updates_changed(self, updates: dict[str, Any], seconds: dict[str, Any]) -> None:
        """The engine counts updates since it started; ``seconds`` are those of its last commit."""
        grown = {}
        for result, counter in self._updates.items():
            total = _count(updates.get(result))
            grown[result] = max(total - self._updates_seen[result], 0)
            self._updates_seen[result] += grown[result]
            counter.inc(grown[result])
        if grown["success"]:
            for phase, histogram in self._update_phases.items():
                histogram.observe(_seconds(seconds.get(phase)))
            if "stall" in seconds:
                self._stall.observe(_seconds(seconds["stall"]))

    def _set_weights(self, version: str | None, commit: int | None) -> None:
        if commit is not None:
            self._current_commit = commit
            self._commit.set(commit)
        shown = self._families.shown_versions.get(self._labels)
        if version is not None and version != shown:
            if shown is not None:
                self._families.version.remove(*self._labels, shown)
            self._families.shown_versions[self._labels] = version
            self._families.version.labels(*self._labels, version).set(1)


def _count(value: Any) -> int:
    """A counter of the engine; what is none counts nothing."""
    return value if isinstance(value, int) and value > 0 else 0


def _seconds(value: Any) -> float:
    """A time of the engine; what is none took none."""
    return float(value) if isinstance(value, (int, float)) and value > 0 else 0.0
