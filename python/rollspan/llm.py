"""LLM: the synchronous API over an EngineCore in this process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any

from rollspan import models
from rollspan.admission import Admitted, Prompt, admit
from rollspan.client.inproc import InprocClient
from rollspan.config import EngineConfig
from rollspan.errors import RollspanError
from rollspan.output_processor import OutputProcessor, RequestState
from rollspan.outputs import RequestOutput
from rollspan.protocol.messages import EngineCoreOutputs, EngineHello
from rollspan.provenance import NO_PROVENANCE, Provenance
from rollspan.sampling_params import RequestOutputKind, SamplingParams
from rollspan.weight_control import WeightControl


class LLM(WeightControl):
    """Generates with a causal LM inside this process, one caller at a time.

    `generate` runs a batch to its end. For weights that change in mid-generation use AsyncLLM; or `add_request` and
    `step`, which run one forward pass at a time, so that an update lands between two known tokens. Control calls may
    run a step.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **engine_config: Any) -> None:
        """Loads a model.

        Args:
            model: directory in Hugging Face layout, name of an embedded model, or None for the default embedded one.
            engine_config: fields of `EngineConfig`.

        Raises:
            FileNotFoundError: there is no such model.
            RollspanError: a field of the configuration, or why the model cannot be served.
        """
        # Only now: whoever imports this module for its name does not pay for torch.
        from rollspan.engine.core import EngineCore

        directory = models.resolve(None if model is None else os.fspath(model))
        core = EngineCore(EngineConfig(model=str(directory), **engine_config))
        self._processor = OutputProcessor()
        self._client: InprocClient | None = InprocClient(core, self._on_outputs)
        self._streams: dict[str, RequestState] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    @property
    def hello(self) -> EngineHello:
        """The engine's limits, model facts, and what was in force when it started."""
        return self._engine.hello

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        provenance: Provenance = NO_PROVENANCE,
    ) -> list[RequestOutput]:
        """Runs prompts to their ends and returns their outputs in the same order.

        Args:
            prompts: token ids of one prompt, or a list of prompts (token ids or ``{"prompt_token_ids": [...]}``).
            sampling_params: for all prompts, or one each; ``output_kind`` plays no role here.
            priority: lower is served first.
            cache_salt: prefix-cache namespace.
            provenance: bounds on the weights, and whether outputs tell which ones computed their KV.

        Raises:
            RollspanError: bad arguments, ``stale_weights``, ``engine_paused``, or why a request failed. The others are
                aborted then.
        """
        admitted = [
            admit(prompt, params, self.hello, priority=priority, cache_salt=cache_salt, provenance=provenance)
            for prompt, params in _paired(prompts, sampling_params)
        ]
        states: list[RequestState] = []
        try:
            ended, failures = 0, self._processor.failures
            states.extend(self._open(one) for one in admitted)
            while True:
                while ended < len(states) and states[ended].finished:
                    ended += 1
                failed = self._processor.failures != failures and any(state.error is not None for state in states)
                if failed or ended == len(states):
                    break
                still_open = len(self._processor)
                while len(self._processor) == still_open:
                    self._step_or_raise()
            return [output for state in states if (output := state.take()) is not None]
        finally:
            for state in states:
                self._engine.abort(self._processor.discard(state))

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        session_id: str | None = None,
        provenance: Provenance = NO_PROVENANCE,
    ) -> str:
        """Opens a request whose outputs `step` returns, in the form that its ``output_kind`` asks for.

        Returns:
            Its external id.

        Raises:
            RollspanError: bad arguments (naming the parameter), ``duplicate_request_id``.
        """
        admitted = admit(
            prompt,
            sampling_params,
            self.hello,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            session_id=session_id,
            provenance=provenance,
        )
        self._streams[admitted.request_id] = self._open(admitted)
        return admitted.request_id

    def step(self) -> list[RequestOutput]:
        """Runs one forward pass for all running requests and returns what is new of those opened by `add_request`.

        Raises:
            RollspanError: why a request failed; it is closed then, and the next call goes on with the others.
        """
        self._engine.step()
        for request_id, state in list(self._streams.items()):
            if state.error is not None:  # before anything is taken from the others
                del self._streams[request_id]
                raise state.error
        outputs = []
        for request_id, state in list(self._streams.items()):
            if state.finished:
                del self._streams[request_id]
            output = state.take()
            if output is not None:
                outputs.append(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """True while a request opened by `add_request` has more to say."""
        return bool(self._streams)

    def abort(self, request_ids: str | Iterable[str] | None = None) -> int:
        """Ends open requests by external id, or all of them; the next `step` returns what was generated.

        Returns:
            How many of them were open. Unknown ids are ignored.
        """
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        count, internal_ids = self._processor.abort(names)
        self._engine.abort(internal_ids)
        return count

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pauses generation, as `AsyncLLM.pause_generation` does; mode "wait" runs what is running to its end."""
        self._engine.call_utility("pause_generation", mode, clear_cache)

    def resume_generation(self) -> None:
        """Ends a pause. Idempotent."""
        self._engine.call_utility("resume_scheduler")

    def is_paused(self) -> bool:
        """True between the pause call and `resume_generation`."""
        return bool(self._engine.call_utility("is_scheduler_paused"))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets all cached prefixes; running requests keep their own keys and values unless asked otherwise.

        Args:
            reset_running_requests: recompute keys and values of running requests too.
            reset_connector: vLLM's; there is no cache outside the engine, so nothing is left to do.
        """
        return bool(self._engine.call_utility("reset_prefix_cache", reset_running_requests))

    def server_info(self) -> dict[str, Any]:
        """What the engine says about itself: its runner, attention backend, dtype, numerics and configuration."""
        return dict(self._engine.call_utility("server_info"))

    def check_health(self) -> None:
        """Raises RollspanError ``shutting_down`` after `shutdown`."""
        _ = self._engine

    def shutdown(self) -> None:
        """Drops the model and all requests. May be called twice."""
        self._processor.abort()
        self._client = None

    @property
    def _engine(self) -> InprocClient:
        if self._client is None:
            raise RollspanError("this LLM is shut down", reason="shutting_down")
        return self._client

    def _call(self, method: str, *args: Any) -> Any:
        return self._engine.call_utility(method, *args)

    def _open(self, admitted: Admitted) -> RequestState:
        state = self._processor.add(admitted, _nobody_sleeps)
        for request in admitted.engine_requests:
            self._engine.add_request(request)
        return state

    def _step_or_raise(self) -> None:
        if not self._engine.has_work() and not self._engine.wait_for_weights():
            raise RollspanError("generation is paused: call resume_generation before generate", reason="engine_paused")
        self._engine.step()

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        siblings = self._processor.process(message)
        if siblings:
            self._engine.abort(siblings)


def _nobody_sleeps() -> None:
    """Readers of this API look after each step; there is nobody to wake."""


def _paired(
    prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    single = isinstance(prompts, Mapping) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    listed: list[Any] = [prompts] if single else list(prompts)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params = [sampling_params or SamplingParams()] * len(listed)
    else:
        params = list(sampling_params)
    if len(params) != len(listed):
        raise RollspanError(
            f"sampling_params must be one for all prompts or one for each of the {len(listed)}, got {len(params)}",
            reason="invalid_request",
            param="sampling_params",
        )
    return [
        (prompt, dataclasses.replace(one, output_kind=RequestOutputKind.FINAL_ONLY))
        for prompt, one in zip(listed, params, strict=True)
    ]
