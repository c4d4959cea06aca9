"""EngineCore: requests in, EngineCoreOutputs out, step by step; every token is stamped with the weights it ran with."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch

import rollspan
from rollspan.config import EngineConfig
from rollspan.engine.kv_cache import BlockPool
from rollspan.engine.loader import load_model, select_device
from rollspan.engine.model_runner import ModelRunner
from rollspan.engine.request import Request, Stamp
from rollspan.engine.sampler import Sampler, Samples
from rollspan.engine.scheduler import PauseState, ScheduledRequest, Scheduler
from rollspan.engine.stats import scheduler_stats
from rollspan.engine.weights import WeightManager
from rollspan.errors import RollspanError, shown, wrong_value
from rollspan.protocol import messages as m

logger = logging.getLogger("rollspan.engine")

#: (client index, message): where a message goes.
Addressed = tuple[int, m.EngineCoreOutputs]

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
        model, self._facts = load_model(config, device)
        self._runner = ModelRunner(model, config, device)
        self._scheduler = Scheduler(
            BlockPool(self._runner.num_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._sampler = Sampler(raw_logprobs=config.logprobs_mode == "raw")
        self._weights = WeightManager(model, label=config.weight_version, root=config.weights_root)
        self._arrivals = 0
        self._outbox: list[Addressed] = []
        self._clients = {0}
        self._draining: tuple[int, m.UtilityCall, bool] | None = None
        self._last_stats = 0.0
        self._methods: dict[str, Callable[..., Any]] = {
            "resume_scheduler": self._resume,
            "is_scheduler_paused": lambda: self._scheduler.pause_state is not PauseState.UNPAUSED,
            "get_weight_version": lambda: self._weights.label,
            "get_weight_commit": lambda: self._weights.commit,
            "set_weight_version": self._weights.set_label,
            "start_weight_update": self._weights.start,
            "update_weights": self._weights.update,
            "finish_weight_update": self._finish_weight_update,
        }

    def hello(self) -> m.EngineHello:
        """What a frontend is told when it connects."""
        return m.EngineHello(
            limits=m.Limits(
                max_model_len=self._runner.max_model_len,
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=self.config.max_num_batched_tokens,
                max_logprobs=self.config.max_logprobs,
                vocab_size=self._runner.vocab_size,
                block_size=self._runner.block_size,
                num_blocks=self._runner.num_blocks,
            ),
            model=self._facts,
            weight_version=self._weights.label,
            weight_commit=self._weights.commit,
            rollspan_version=rollspan.__version__,
            pid=os.getpid(),
            engine_index=self.config.engine_index,
            paused=self._scheduler.pause_state is not PauseState.UNPAUSED,
        )

    # Requests

    def has_work(self) -> bool:
        """True when :meth:`step` has something to run or to deliver."""
        drained = self._draining is not None and self._scheduler.drained
        return drained or bool(self._outbox) or self._scheduler.has_work()

    def add_request(self, message: m.EngineCoreRequest) -> None:
        """Admits a request under the weights now in force, or answers with a terminal error output."""
        try:
            self._validate(message)
        except RollspanError as error:
            self.refuse_request(message.client_index, message.request_id, error)
            return
        self._arrivals += 1
        request = Request(
            message,
            admission=self._weights.stamp,
            arrival=self._arrivals,
            seed=self._seed(message.sampling_params.seed),
        )
        self._scheduler.add(request)

    def _seed(self, wanted: int | None) -> int:
        if wanted is not None:
            return wanted
        if self.config.seed is not None:
            return (self.config.seed * 0x5851F42D4C957F2D + self._arrivals) % 2**63
        return secrets.randbits(63)

    def _validate(self, message: m.EngineCoreRequest) -> None:
        vocabulary, longest = self._runner.vocab_size, self._runner.max_model_len
        if self._scheduler.pause_state is PauseState.PAUSED_NEW:
            raise RollspanError("generation is paused: try again after it is resumed", reason="engine_paused")
        if message.request_id in self._scheduler.requests:
            raise RollspanError(
                f"request id {shown(message.request_id)} is in use", reason="duplicate_request_id", param="request_id"
            )
        ids = message.prompt_token_ids
        if not ids or max(ids) >= vocabulary:
            raise RollspanError(
                f"prompt_token_ids must be a non-empty list of integers from 0 to {vocabulary - 1}",
                reason="invalid_request",
                param="token_ids",
            )
        if len(ids) >= longest:
            raise RollspanError(
                f"prompt_token_ids must hold at most {longest - 1} tokens, got {len(ids)}",
                reason="prompt_too_long",
                param="token_ids",
            )
        params = message.sampling_params
        if params.n != 1:
            raise wrong_value("sampling_params.n", "1: n outputs are n requests to an engine", params.n)
        params.check_model(vocab_size=vocabulary, max_logprobs=self.config.max_logprobs)
        message.sampling_params = params.clamp(longest - len(ids))

    def refuse_request(self, client_index: int, request_id: str, error: RollspanError) -> None:
        """Answers a request that cannot be admitted with a terminal error output."""
        code = error.reason if error.reason in _KNOWN_CODES else "validation_error"
        self._deliver_terminal(client_index, request_id, m.EngineError(code, error.message, code == "engine_paused"))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests without an answer; unknown ids are ignored."""
        for request_id in request_ids:
            request = self._scheduler.requests.get(request_id)
            if request is not None:
                self._scheduler.finish(request)

    def add_client(self, client_index: int) -> None:
        """A frontend has connected: it gets reports of changes of state from now on."""
        self._clients.add(client_index)

    def remove_client(self, client_index: int) -> None:
        """A frontend is gone: ends its requests and drops what waits for it."""
        self._clients.discard(client_index)
        mine = [r.request_id for r in self._scheduler.requests.values() if r.client_index == client_index]
        self.abort_requests(mine)
        self._outbox = [entry for entry in self._outbox if entry[0] != client_index]

    # The step

    def step(self) -> list[Addressed]:
        """Runs one step and returns the messages that it and everything since the last one produced."""
        scheduled = self._scheduler.schedule()
        if scheduled:
            stamp = self._weights.stamp
            try:
                logits, sampled = self._runner.run(scheduled)
                samples = self._sampler.sample(logits, [entry.request for entry in sampled])
            except Exception as error:  # noqa: BLE001 (model code may raise anything; only this step pays)
                self._fail_step(scheduled, error)
            else:
                self._commit_step(scheduled, sampled, samples, stamp)
        self._after_step()
        outbox, self._outbox = self._outbox, []
        return outbox

    def _commit_step(
        self, scheduled: list[ScheduledRequest], sampled: list[ScheduledRequest], samples: Samples, stamp: Stamp
    ) -> None:
        for entry in scheduled:
            entry.request.num_computed_tokens += entry.num_tokens
        batches: dict[int, list[m.EngineCoreOutput]] = {}
        for index, entry in enumerate(sampled):
            request = entry.request
            output = m.EngineCoreOutput(request.request_id, [])
            if samples.valid[index]:
                request.append(samples.token_ids[index])
                output.new_token_ids = [samples.token_ids[index]]
                output.new_logprobs = samples.logprobs[index]
                output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
            else:
                output.finish_reason = m.FinishReason.ERROR
                output.error = m.EngineError("nan_logits", f"the model's logits are not finite (weights {stamp[0]!r})")
            if not request.announced or output.finish_reason is not None:
                output.admission = request.admission
            if not request.announced:
                request.announced = True
                output.prefill_stats = _prefill_stats(request)
            if output.finish_reason is not None:
                self._scheduler.finish(request)
            batches.setdefault(request.client_index, []).append(output)
        for client_index, outputs in batches.items():
            self._send(client_index, stamp, outputs=outputs)

    def _fail_step(self, scheduled: list[ScheduledRequest], error: Exception) -> None:
        """Ends the requests of a step that raised; the others' state was not touched by it."""
        logger.exception("a step of %d requests failed", len(scheduled))
        for entry in scheduled:
            request = entry.request
            self._scheduler.finish(request)
            failure = m.EngineError("engine_error", f"the step failed: {type(error).__name__}: {error}")
            self._deliver_terminal(request.client_index, request.request_id, failure, request.admission)

    def _after_step(self) -> None:
        if self._draining is not None and self._scheduler.drained:
            client_index, call, clear_cache = self._draining
            self._draining = None
            self._reply(client_index, call, lambda: self._clear(clear_cache))
        now = time.monotonic()
        if self._scheduler.requests:
            if now - self._last_stats >= STATS_INTERVAL:
                self._report()
        elif self._last_stats:
            self._scheduler.check()
            self._report()
            self._last_stats = 0.0

    def _report(self) -> None:
        """Tells every frontend the state: load, pause, label and commit."""
        self._last_stats = time.monotonic()
        for client_index in self._clients:
            self._send(client_index, self._weights.stamp, scheduler_stats=scheduler_stats(self._scheduler))

    def _send(self, client_index: int, stamp: Stamp | None, **fields: Any) -> None:
        label, commit = stamp if stamp is not None else (None, None)
        message = m.EngineCoreOutputs(
            engine_index=self.config.engine_index,
            timestamp=time.monotonic(),
            weight_version=label,
            weight_commit=commit,
            **fields,
        )
        self._outbox.append((client_index, message))

    def _deliver_terminal(
        self, client_index: int, request_id: str, error: m.EngineError | None, admission: Stamp | None = None
    ) -> None:
        reason = m.FinishReason.ABORT if error is None else m.FinishReason.ERROR
        output = m.EngineCoreOutput(request_id, [], finish_reason=reason, error=error, admission=admission)
        self._send(client_index, None, outputs=[output], finished_requests=[request_id])

    # Control

    def call_utility(self, client_index: int, call: m.UtilityCall) -> None:
        """Runs a method of PROTOCOL.md's table; the next step delivers its answer (pause "wait": a later one)."""
        if call.method == "pause_generation":
            self._pause(client_index, call)
        elif call.method not in self._methods:
            unknown = RollspanError(f"unknown method {shown(call.method)}", reason="unknown_method")
            self.refuse_call(client_index, call, unknown)
        else:
            self._reply(client_index, call, lambda: self._run_method(call))
            if not call.method.startswith(("get_", "is_")):
                self._report()

    def refuse_call(self, client_index: int, call: m.UtilityCall, error: RollspanError) -> None:
        """Answers a call that cannot be run."""
        self._reply(client_index, call, lambda: _raise(error))

    def _run_method(self, call: m.UtilityCall) -> Any:
        method = self._methods[call.method]
        try:
            inspect.signature(method).bind(*call.args)
        except TypeError as error:
            text = f"{call.method} cannot be called with {len(call.args)} arguments: {error}"
            raise RollspanError(text, reason="invalid_request") from None
        return method(*call.args)

    def _reply(self, client_index: int, call: m.UtilityCall, work: Callable[[], Any]) -> None:
        try:
            reply = m.UtilityOutput(call.call_id, result=work())
        except RollspanError as error:
            reply = m.UtilityOutput(call.call_id, failure=error.message, reason=error.reason)
        except Exception as error:
            logger.exception("%s failed", call.method)
            text = f"{call.method} failed: {type(error).__name__}: {error}"
            reply = m.UtilityOutput(call.call_id, failure=text, reason="internal_error")
        self._send(client_index, None, utility_output=reply)

    def _pause(self, client_index: int, call: m.UtilityCall) -> None:
        args = [*call.args, *["abort", True][len(call.args) :]]
        mode, clear_cache = args[:2]
        if len(args) > 2 or mode not in ("abort", "wait", "keep") or not isinstance(clear_cache, bool):
            wrong = RollspanError(
                f"mode must be abort, wait or keep and clear_cache true or false, got {shown(call.args)}",
                reason="invalid_request",
                param="mode",
            )
            self.refuse_call(client_index, call, wrong)
            return
        self._supersede_drain()
        keep = mode == "keep"
        self._scheduler.pause_state = PauseState.PAUSED_ALL if keep else PauseState.PAUSED_NEW
        if mode == "abort":
            for request in list(self._scheduler.requests.values()):
                self._scheduler.finish(request)
                self._deliver_terminal(request.client_index, request.request_id, None, request.admission)
        if mode == "wait" and not self._scheduler.drained:
            self._draining = (client_index, call, clear_cache)
        else:
            self._reply(client_index, call, lambda: self._clear(clear_cache))
        self._report()

    def _clear(self, clear_cache: bool) -> None:
        if clear_cache:
            self._scheduler.preempt_all()

    def _supersede_drain(self) -> None:
        if self._draining is not None:
            client_index, call, _ = self._draining
            self._draining = None
            error = RollspanError(
                "another pause or resume came before the running requests ended", reason="pause_superseded"
            )
            self.refuse_call(client_index, call, error)

    def _resume(self) -> None:
        self._supersede_drain()
        self._scheduler.pause_state = PauseState.UNPAUSED

    def _finish_weight_update(self, label: str | None = None) -> dict[str, Any]:
        started = time.monotonic()
        label, commit = self._weights.finish(label)
        logger.info(
            "weights %r in force, commit %d, swapped in %.1f ms", label, commit, 1e3 * (time.monotonic() - started)
        )
        return {"weight_version": label, "weight_commit": commit}


_KNOWN_CODES = ("engine_paused", "duplicate_request_id", "prompt_too_long")


def _raise(error: RollspanError) -> None:
    raise error


def _prefill_stats(request: Request) -> dict[str, int]:
    return {
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_prompt_tokens,
        "num_cached_tokens": 0,
        "num_local_cached_tokens": 0,
        "num_external_cached_tokens": 0,
        "num_cache_creation_tokens": 0,
    }
