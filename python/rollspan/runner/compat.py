"""The compat runner: models that paged attention cannot compute, one sequence at a time through their own cache."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from rollspan.engine.request import PENDING, Request, RequestStatus
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.errors import RollspanError
from rollspan.runner import attention
from rollspan.runner.input_batch import PendingTokens, StepLogits
from rollspan.runner.routing import RoutedExperts
from rollspan.runner.self_check import Outcome, SelfCheck

logger = logging.getLogger("rollspan.engine")

#: Names under which models take and return what they remember of a sequence.
_STATES = ("cache", "past_key_values", "cache_params", "state", "mems")
#: Relative difference that two ways to compute the same may have in float32.
_ROUNDING = 1e-5


class Mode(Enum):
    """How a sequence goes on after its first piece, best first."""

    CHUNKED = "in pieces of any size"
    STEPWISE = "token by token"  # some recurrent layers start anew with every piece of several tokens
    RECOMPUTE = "all of it again in every step"  # what the model remembers is not one sequence's, or is nothing


@dataclass
class _Sequence:
    """What the model remembers of a request's first ``num_tokens`` tokens; its blocks are mere names of slots."""

    block_ids: list[int]
    memory: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 0


class CompatRunner:
    """Runs steps like ModelRunner, but each sequence by itself: slow, and right for any decoder.

    What the model remembers of a sequence is kept by request and dropped in the first step that finds the request
    preempted or finished; KV blocks have no meaning, so there is no prefix cache.

    Attributes:
        reason: why the model needs this runner, as the end of a sentence about it.
        mode: how sequences go on.
        bytes_per_token: what each token adds to the memory of its sequence.
        bytes_per_sequence: what a sequence takes besides.

    Raises:
        RollspanError: ``weights_invalid``: not even this gives what the model gives by itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        block_size: int,
        device: torch.device,
        reason: str,
        routing: RoutedExperts | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._accepted = set(inspect.signature(model.forward).parameters)
        self._sequences: dict[Request, _Sequence] = {}
        self._routing = routing
        self.reason = reason
        if model.config._attn_implementation == attention.NAME:
            try:
                model.set_attn_implementation("sdpa")
            except ValueError:
                model.set_attn_implementation("eager")
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # that fast kernels are not installed is known: this is the slow way
        try:
            check = SelfCheck(model, vocab_size=vocab_size, block_size=block_size, device=device)
            if routing is not None:
                routing.allocate(check.num_blocks)
            self.mode = self._choose_mode(check)
            self.bytes_per_sequence, self.bytes_per_token = self._measure(check)
        finally:
            transformers_logging.set_verbosity(verbosity)
        logger.warning(
            "%s %s: it runs in the compat runner, one sequence at a time, %s; that is slow",
            type(model).__name__,
            reason,
            self.mode.value,
        )

    def _choose_mode(self, check: SelfCheck) -> Mode:
        outcome = self._try(Mode.STEPWISE, check)
        if outcome.ok:
            # A state that is lost between pieces may hardly show in so short a sequence, but it exceeds rounding.
            limit = 10 * outcome.difference + _ROUNDING
            chunked = self._try(Mode.CHUNKED, check)
            if not chunked.ok or chunked.difference > limit:
                self.mode = Mode.STEPWISE
        else:
            outcome = self._try(Mode.RECOMPUTE, check)
            if outcome.ok and check.looks_ahead():
                outcome = Outcome(float("inf"), "lets tokens see later ones, so that it cannot generate")
        if outcome.ok:
            outcome = check.compare_generation(self.run)
        if outcome.ok:
            return self.mode
        raise RollspanError(
            f"{type(self._model).__name__} {self.reason}; by itself, too, it {outcome.fault}",
            reason="weights_invalid",
            param="model",
        )

    def _try(self, mode: Mode, check: SelfCheck) -> Outcome:
        self.mode = mode
        return check.compare(self.run)

    def _measure(self, check: SelfCheck) -> tuple[int, int]:
        """Bytes of a sequence without tokens, and of each token."""
        sizes = []
        for length in (8, 16):
            sequence = _Sequence(list(range(1, check.num_blocks + 1)))
            with torch.inference_mode():
                self._advance(sequence, [1] * min(length, check.longest), [])
            sizes.append((sequence.num_tokens, _nbytes(sequence.memory, set())))
        (short, small), (long, large) = sizes
        each = max(large - small, 0) // max(long - short, 1)
        return max(small - short * each, 0), each

    def run(self, scheduled: Sequence[ScheduledRequest], pending: PendingTokens | None = None) -> StepLogits:
        """One step; tokens that are still being sampled are taken from ``pending``."""
        places = {request: place for place, request in enumerate(pending.requests)} if pending is not None else {}
        for request in [r for r in self._sequences if r.status in (RequestStatus.PREEMPTED, RequestStatus.FINISHED)]:
            del self._sequences[request]
        rows: list[torch.Tensor] = []
        prompt_rows: list[torch.Tensor] = []
        sampled: list[Request] = []
        scored: list[tuple[Request, int, int]] = []
        for entry in scheduled:
            request, start = entry.request, entry.request.num_computed_tokens
            stop = start + entry.num_tokens
            known = self._sequences.pop(request, None)  # what a step that raises leaves behind must not be used again
            if start == 0 or known is None:
                known = _Sequence(request.block_ids)
            if known.num_tokens != start and self.mode is not Mode.RECOMPUTE:
                raise RuntimeError(f"{known.num_tokens} tokens of {request.request_id!r} are known instead of {start}")
            known.num_tokens = start
            first, last = max(request.num_scored_tokens, start + 1), min(request.num_prompt_tokens, stop + 1)
            wanted = (
                list(range(first - 1 - start, last - 1 - start)) if request.params.prompt_logprobs is not None else []
            )
            token_ids = request.token_ids[:stop]
            if pending is not None and token_ids[-1] == PENDING:
                token_ids[-1] = int(pending.token_ids[places[request]])
            with torch.inference_mode():
                logits = self._advance(known, token_ids, wanted + [entry.num_tokens - 1] * entry.samples)
            self._sequences[request] = known
            if wanted:
                prompt_rows.append(logits[: len(wanted)])
                scored.append((request, first, last))
            if entry.samples:
                rows.append(logits[-1:])
                sampled.append(request)
        return StepLogits(torch.cat(rows + prompt_rows or [torch.empty(0, 0)]), sampled, scored)

    def after_commit(self) -> None:
        """Other weights are in force. What is remembered of sequences stays, as keys and values do."""

    def prepare(self, new: Mapping[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
        """Nothing is derived from the weights: there is nothing to exchange."""
        return self.after_commit

    def release(self, *, weights: bool) -> None:
        """Forgets every sequence; what is derived from the weights is nothing."""
        self._sequences.clear()

    def facts(self) -> dict[str, Any]:
        """What ``server_info`` tells of this runner."""
        return {"runner": "compat", "runner_reason": f"{type(self._model).__name__} {self.reason}"}

    def _advance(self, sequence: _Sequence, token_ids: list[int], rows: list[int]) -> torch.Tensor:
        """Runs the tokens that ``sequence`` does not remember yet; logits ``[len(rows), vocabulary]`` of ``rows``.

        Rows count from the first such token.
        """
        start, stop = sequence.num_tokens, len(token_ids)
        sequence.num_tokens = stop
        if self.mode is Mode.RECOMPUTE:
            return self._forward(sequence, token_ids, 0, [start + row for row in rows])
        if self.mode is Mode.CHUNKED or start == 0:
            return self._forward(sequence, token_ids, start, rows)
        pieces = [
            self._forward(sequence, token_ids[: index + 1], index, [0] if index - start in rows else [])
            for index in range(start, stop)
        ]
        return torch.cat(pieces)

    def _forward(self, sequence: _Sequence, token_ids: list[int], start: int, rows: list[int]) -> torch.Tensor:
        """One call of the model with ``token_ids[start:]``, given as ``generate`` gives it."""
        stop = len(token_ids)
        keep = torch.tensor(rows or [stop - start - 1], device=self._device)
        optional = {
            "position_ids": torch.arange(start, stop, device=self._device)[None],
            "logits_to_keep": keep,
        }
        recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._routing is not None:
            recording = self._routing.recording(self._routing.slots(sequence.block_ids, start, stop))
        with recording:
            output = self._model(
                input_ids=torch.tensor([token_ids[start:]], device=self._device),
                use_cache=self.mode is not Mode.RECOMPUTE,
                **sequence.memory,
                **{name: value for name, value in optional.items() if name in self._accepted},
            )
        if self.mode is not Mode.RECOMPUTE:
            sequence.memory.update(
                {name: output[name] for name in _STATES if name in self._accepted and name in output}
            )
        logits: torch.Tensor = output.logits[0]
        return (logits if "logits_to_keep" in self._accepted else logits.index_select(0, keep))[: len(rows)]


def _nbytes(value: Any, seen: set[int]) -> int:
    """Bytes of all tensors that can be reached from ``value``, each counted once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_nbytes(item, seen) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_nbytes(item, seen) for item in value)
    return _nbytes(vars(value), seen) if hasattr(value, "__dict__") else 0
