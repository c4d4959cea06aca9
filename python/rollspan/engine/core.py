"""EngineCore: requests in, EngineCoreOutputs out, step by step; every token is stamped with the weights it ran with."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time
from typing import Any

import numpy as np
import torch

import rollspan
from rollspan.config import EngineConfig
from rollspan.engine.admission import Admission
from rollspan.engine.bounds import STALE, WeightBounds, left_behind
from rollspan.engine.control import Control
from rollspan.engine.kv_cache import BlockPool
from rollspan.engine.launched import Launched
from rollspan.engine.outbox import Addressed, Outbox
from rollspan.engine.request import Request, RequestStatus
from rollspan.engine.scheduler import PauseState, ScheduledRequest, Scheduler
from rollspan.engine.stats import prefill_stats, scheduler_stats
from rollspan.errors import RollspanError, shown
from rollspan.kernels import native
from rollspan.protocol import messages as m
from rollspan.protocol.messages import Stamp
from rollspan.runner.input_batch import StepLogits
from rollspan.runner.invariance import prepare
from rollspan.runner.loader import load_model, select_device
from rollspan.runner.placement import fit, place
from rollspan.sampler.sampler import Sampler
from rollspan.sampler.text import Structure, TextRules
from rollspan.weights.manager import WeightManager
from rollspan.weights.worker import Bell, Worker

logger = logging.getLogger("rollspan.engine")

#: Seconds between two reports of the scheduler's state while requests run.
STATS_INTERVAL = 0.2


class EngineCore:
    """One model replica: scheduler, runner, sampler and weights, driven by a single thread.

    Call :meth:`add_request`, :meth:`abort_requests` and :meth:`call_utility` between steps only; what they answer
    comes with the messages of the next :meth:`step`.

    Raises:
        RollspanError: the model cannot be served with this configuration; the message says why.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        device = select_device(config.device)
        if config.num_threads is not None or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(config.num_threads or max(1, (os.cpu_count() or 2) - 1))
        native.set_num_threads(torch.get_num_threads())
        prepare(config)
        model, self._model_facts = load_model(config, device)
        config = self.config = fit(config, device, model.dtype)
        self._placement = place(model, config, device)
        self._runner = self._placement.runner
        self.scheduler = Scheduler(
            BlockPool(self._placement.num_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.token_budget(device.type),
            max_scored_tokens=self._placement.max_scored_tokens,
            prefix_caching=config.enable_prefix_caching and self._placement.shares_blocks,
        )
        self._sampler = Sampler(raw_logprobs=config.logprobs_mode == "raw", exact_logprobs=config.batch_invariant)
        self.bell = Bell()
        self.weights = WeightManager(model, config, Worker(self.bell), self._runner, self)
        self._arrivals = 0
        self.outbox = Outbox(config.engine_index)
        self._last_stats = 0.0
        self._text = TextRules(config.model_directory(), self._placement.vocab_size, self._model_facts.eos_token_ids)
        self._bounds = WeightBounds()
        self._admission = Admission(self._placement, config, self._text)
        wanted = config.async_scheduling if config.async_scheduling is not None else device.type == "cuda"
        # Which experts computed a token is read from blocks that a later step may already have taken.
        self._asynchronous = wanted and self._placement.routing is None
        self._in_flight: Launched | None = None
        self._control = Control(self)

    def hello(self) -> m.EngineHello:
        """What a frontend is told when it connects."""
        return m.EngineHello(
            limits=m.Limits(
                max_model_len=self._placement.max_model_len,
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.scheduler.max_num_batched_tokens,
                max_logprobs=self.config.max_logprobs,
                vocab_size=self._placement.vocab_size,
                block_size=self.config.block_size,
                num_blocks=self._placement.num_blocks,
            ),
            model=self._model_facts,
            weight_version=self.weights.label,
            weight_commit=self.weights.commit,
            rollspan_version=rollspan.__version__,
            pid=os.getpid(),
            engine_index=self.config.engine_index,
            paused=self.scheduler.pause_state is not PauseState.UNPAUSED,
            weight_state=self.weights.state,
        )

    # Requests

    def has_work(self) -> bool:
        """True when :meth:`step` has something to run or to deliver."""
        if self.outbox or self._in_flight is not None:
            return True
        return self._control.has_work() or (self.weights.runnable and self.scheduler.has_work())

    @property
    def holds_requests(self) -> bool:
        """True while requests wait for a commit: they are in none of its steps, and yet not forgotten."""
        return len(self._bounds) > 0

    def next_deadline(self) -> float | None:
        """When :meth:`step` has something to do though nothing arrives, in seconds of the monotonic clock."""
        return min(filter(None, (self._bounds.next_deadline(), self.weights.deadline)), default=None)

    def wait(self, timeout: float | None = None) -> None:
        """Waits until :meth:`step` may have something to do, at most so many seconds; for whoever owns this thread."""
        if self.has_work():
            return
        deadline = self.next_deadline()
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        self.bell.wait(timeout)

    def facts(self) -> dict[str, Any]:
        """What ``server_info`` tells: the runner, the model and the configuration."""
        return {
            **self._runner.facts(),
            "weight_staging_bytes": self.weights.staging_bytes,
            "dtype": self._model_facts.dtype,
            "device": self._model_facts.device,
            "architecture": self._model_facts.architecture,
            "numerics": self._placement.numerics.to_dict(),
            "config": dataclasses.asdict(self.config),
        }

    def add_request(self, message: m.EngineCoreRequest) -> None:
        """Admits a request under the weights now in force, or answers with a terminal error output."""
        try:
            self.weights.check_ready()
            if self.scheduler.pause_state is PauseState.PAUSED_NEW:
                raise RollspanError("generation is paused: try again after it is resumed", reason="engine_paused")
            if message.request_id in self.scheduler.requests or message.request_id in self._bounds:
                text = f"request id {shown(message.request_id)} is in use"
                raise RollspanError(text, reason="duplicate_request_id", param="request_id")
            structure = self._admission.resolve(message)
            if message.provenance.min_weight_commit > self.weights.commit:
                self._bounds.hold(message, structure, self.weights.commit, updating=self.weights.updating)
                return
        except RollspanError as error:
            self.refuse_request(message.client_index, message.request_id, error)
            return
        except Exception as error:
            logger.exception("request %s cannot be admitted", shown(message.request_id))
            text = f"the request cannot be admitted: {type(error).__name__}: {error}"
            self.refuse_request(message.client_index, message.request_id, RollspanError(text, reason="invalid_request"))
            return
        self._enter(message, structure)

    def _enter(self, message: m.EngineCoreRequest, structure: Structure | None) -> None:
        """Puts a checked request into the scheduler, under the weights now in force."""
        self._arrivals += 1
        request = Request(
            message,
            admission=self.weights.stamp,
            arrival=self._arrivals,
            seed=self._seed(message.sampling_params.seed),
        )
        request.structure = structure
        self.scheduler.add(request)

    def _seed(self, wanted: int | None) -> int:
        if wanted is not None:
            return wanted
        if self.config.seed is not None:
            return (self.config.seed * 0x5851F42D4C957F2D + self._arrivals) % 2**63
        return secrets.randbits(63)

    def refuse_request(self, client_index: int, request_id: str, error: RollspanError) -> None:
        """Answers a request that cannot be admitted with a terminal error output."""
        self.outbox.refuse(client_index, request_id, error)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests without an answer; unknown ids are ignored."""
        for request_id in request_ids:
            self._bounds.drop(request_id)
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                self.scheduler.finish(request)

    def add_client(self, client_index: int) -> None:
        """A frontend has connected: it gets reports of changes of state from now on."""
        self.outbox.clients.add(client_index)

    def remove_client(self, client_index: int) -> None:
        """A frontend is gone: ends its requests and drops what waits for it."""
        mine = [r.request_id for r in self.scheduler.requests.values() if r.client_index == client_index]
        self.abort_requests(mine)
        self._bounds.take_all(client_index)
        self.outbox.drop_client(client_index)

    def abort_all(self) -> None:
        """Ends every request, each with a terminal output of what it has."""
        for request in list(self.scheduler.requests.values()):
            self._abort(request)
        for message in self._bounds.take_all():
            self.outbox.end(message.client_index, message.request_id)

    def _abort(self, request: Request, stop_reason: str | None = None) -> None:
        self.scheduler.finish(request)
        self.outbox.end(request.client_index, request.request_id, admission=request.admission, stop_reason=stop_reason)

    def release_memory(self, *, weights: bool) -> None:
        """Forgets all keys and values and gives their memory back, and that of what is derived from the weights."""
        self.scheduler.preempt_all()
        self._runner.release(weights=weights)

    def weights_change(self) -> None:
        """A commit is about to take place: what was launched before is collected."""
        self.drain()

    def weights_settled(self) -> None:
        """An update has ended, in one way or the other."""
        self.report()

    def weights_changed(self) -> None:
        """A commit has taken place: what was computed with the old weights is theirs.

        Requests that waited for it enter the scheduler, outputs that it has left too far behind end.
        """
        self.drain()
        commit = self.weights.commit
        self.scheduler.commit_weights(commit)
        for request in left_behind(self.scheduler.requests.values(), commit):
            self._abort(request, STALE)
        for held in self._bounds.take_admissible(commit):
            self._enter(held.message, held.structure)

    def call_utility(self, client_index: int, call: m.UtilityCall) -> None:
        """Runs a method of PROTOCOL.md's table; the next step delivers its answer (pause "wait": a later one)."""
        self._control.call(client_index, call)

    def refuse_call(self, client_index: int, call: m.UtilityCall, error: RollspanError) -> None:
        """Answers a call that cannot be run."""
        self._control.refuse(client_index, call, error)

    # The step

    def step(self) -> list[Addressed]:
        """Runs one step and returns the messages that it and everything since the last one produced."""
        self._control.before_step()
        launched = self._launch() if self.weights.runnable else None
        if self._asynchronous:
            launched, self._in_flight = self._in_flight, launched
        if launched is not None:
            self._collect(launched)
        self._after_step()
        return self.outbox.take()

    def drain(self) -> None:
        """Collects the step that is in flight, so that what follows sees every token."""
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            self._collect(launched)

    def _launch(self) -> Launched | None:
        """Runs the next step as far as its tokens are sampled; with the stamp of the weights in force right now."""
        if self._in_flight is not None and any(request.reads_output for request in self.scheduler.running):
            self.drain()
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return None
        try:
            logits = self._runner.run(scheduled, None if self._in_flight is None else self._in_flight.tokens)
            rows = logits.logits[: len(logits.sampled)]
            samples = self._sampler.sample(rows, logits.sampled, self._text.mask(logits.sampled))
        except Exception as error:  # noqa: BLE001 (model code may raise anything; only this step pays)
            self.drain()
            self._fail_step(scheduled, error)
            return None
        stamp = self.weights.stamp
        kv_spans = self.scheduler.track(scheduled, stamp)
        for entry in scheduled:
            entry.request.num_computed_tokens += entry.num_tokens
            entry.stop = entry.request.num_computed_tokens
        places = [request.reserve() for request in logits.sampled]
        return Launched(scheduled, logits, samples, places, stamp, kv_spans)

    def _collect(self, step: Launched) -> None:
        """Files what a step has computed and tells the frontends; who has ended since it was launched is left out."""
        for entry in step.scheduled:
            request = entry.request
            filled = entry.stop - request.num_registered_tokens >= self.config.block_size
            if filled and request.status is RequestStatus.RUNNING:  # it may have lost its blocks since
                self.scheduler.register(request, entry.stop)
        self._score_prompts(step.logits, step.stamp)
        batches: dict[int, list[m.EngineCoreOutput]] = {}
        samples = step.samples
        for row, (request, index, token, valid, logprobs) in enumerate(
            zip(step.logits.sampled, step.places, samples.token_ids, samples.valid, samples.logprobs, strict=True)
        ):
            if request.status is RequestStatus.FINISHED:
                continue
            fault = None if valid else step.fault(row)
            if fault is None:
                request.settle(index, token)
                output = m.EngineCoreOutput(request.request_id, [token], logprobs)
                output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
                fault = _structure_fault(request)
            if fault is not None:
                output = m.EngineCoreOutput(request.request_id, [], finish_reason=m.FinishReason.ERROR, error=fault)
            if not request.announced:
                request.announced = True
                request.first_commit = step.stamp[1]
                output.admission = request.admission
                output.prefill_stats = prefill_stats(request)
                output.new_prompt_logprobs = request.take_prompt_logprobs()
                if output.new_prompt_logprobs is not None:
                    output.prompt_spans = request.prompt_spans
            if step.kv_spans and output.error is None:
                output.kv_spans = step.kv_spans.get(request)
            if output.finish_reason is not None:
                output.admission = request.admission
                if request.params.routed_experts is not False and self._placement.routing is not None:
                    # The token sampled last has not been run.
                    output.routed_experts = self._placement.routing.gather(
                        request.block_ids, request.params.routed_experts_prompt_start, index
                    )
                self.scheduler.finish(request)
            batches.setdefault(request.client_index, []).append(output)
        for client_index, outputs in batches.items():
            self.outbox.put(client_index, step.stamp, outputs=outputs)

    def _score_prompts(self, logits: StepLogits, stamp: Stamp) -> None:
        """Files the log-probs of the prompt tokens that a step's rows predict."""
        row = len(logits.sampled)
        for request, start, stop in logits.scored:
            count = request.params.prompt_logprobs
            if count is not None:
                rows, row = logits.logits[row : row + stop - start], row + stop - start
                try:
                    scores = self._sampler.prompt_logprobs(rows, request.token_ids[start:stop], count)
                except Exception as error:
                    logger.exception("a prompt cannot be scored")
                    self._fail(request, "engine_error", f"the prompt cannot be scored: {type(error).__name__}: {error}")
                    continue
                request.add_prompt_logprobs(scores, start, stop, stamp)
                if np.isnan(scores.logprobs).any():
                    self._fail(request, "nan_logits", "the model's logits are not finite in the prompt")

    def _fail_step(self, scheduled: list[ScheduledRequest], error: Exception) -> None:
        """Ends the requests of a step that raised; the others' state was not touched by it."""
        logger.exception("a step of %d requests failed", len(scheduled))
        for entry in scheduled:
            request = entry.request
            self._fail(request, "engine_error", f"the step failed: {type(error).__name__}: {error}")

    def _fail(self, request: Request, code: str, message: str) -> None:
        """Ends a request with an error, unless it has ended; what it has said stays said."""
        if request.status is RequestStatus.FINISHED:
            return
        self.scheduler.finish(request)
        error = m.EngineError(code, message)
        self.outbox.end(request.client_index, request.request_id, error, admission=request.admission)

    def _after_step(self) -> None:
        self._control.after_step()
        for message, error in self._bounds.take_refused(self.weights.commit, updating=self.weights.updating):
            self.refuse_request(message.client_index, message.request_id, error)
        now = time.monotonic()
        if self.scheduler.requests or self._bounds:
            if now - self._last_stats >= STATS_INTERVAL:
                self.report()
        elif self._last_stats:
            self.scheduler.check()
            self.report()
            self._last_stats = 0.0

    def report(self) -> None:
        """Tells every frontend the state: load, pause, label and commit."""
        self._last_stats = time.monotonic()
        stats = scheduler_stats(self.scheduler, self.weights, len(self._bounds))
        self.outbox.put_all(self.weights.stamp, scheduler_stats=stats)


def _structure_fault(request: Request) -> m.EngineError | None:
    """Why an output cannot follow its grammar any further, if so: it must not pass for complete."""
    if request.structure is None or request.structure.fault is None:
        return None
    return m.EngineError("engine_error", f"structured_outputs cannot be followed: {request.structure.fault}")
