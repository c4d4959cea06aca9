"""ModelRunner: one forward pass of the HF model over what the scheduler picked; owner of the KV cache."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rollspan.config import EngineConfig
from rollspan.engine import graph
from rollspan.engine.attention import PagedCache, StepContext
from rollspan.engine.input_batch import InputBatchBuilder, StepLogits
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.engine.self_check import SelfCheck
from rollspan.kernels.invariant import InvariantMode

logger = logging.getLogger("rollspan.engine")

#: Input ids and positions ``[1, T]`` and rows ``[S]`` in, logits ``[S, vocabulary]`` out.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ModelRunner:
    """Runs steps through the model's own forward, captured where that is possible, over a paged KV cache.

    Args:
        num_blocks: KV blocks to begin with, the padding block not counted.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig, device: torch.device, *, num_blocks: int) -> None:
        self._model = model
        self._device = device
        self._config = config
        self._builder = InputBatchBuilder(config.block_size, device)
        self._context = StepContext(PagedCache(num_blocks + 1, config.block_size))
        self._captured: graph.CapturedForward | None = None
        self._forward: Forward = self._eager
        self._mode = InvariantMode() if config.batch_invariant else contextlib.nullcontext()

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block; known once a step has run."""
        return self._context.cache.bytes_per_block

    def allocate(self, num_blocks: int) -> None:
        """Replaces the KV cache by an empty one of ``num_blocks`` blocks."""
        self._context.cache = PagedCache(num_blocks + 1, self._config.block_size)

    def choose_forward(self, check: SelfCheck) -> str | None:
        """Captures the forward where that gives the right numbers, else calls the model itself.

        Returns:
            None, or why neither will do, as the end of a sentence about the model.
        """
        if self._device.type == "cpu":
            self._captured = graph.capture(
                self._model, self._context, graph.CaptureOptions(exact=self._config.batch_invariant)
            )
        if self._captured is not None:
            self._forward = self._captured
            outcome = check.compare(self.run)
            if outcome.ok:
                return None
            logger.warning("the captured forward of %s %s: not used", type(self._model).__name__, outcome.fault)
            self._captured, self._forward = None, self._eager
        return check.compare(self.run).fault

    def run(self, scheduled: Sequence[ScheduledRequest]) -> StepLogits:
        """One forward pass."""
        batch = self._builder.build(scheduled)
        self._context.batch = batch.attention
        with torch.inference_mode(), self._mode:
            logits = self._forward(batch.input_ids, batch.positions, batch.sample_rows)
        return StepLogits(logits, batch.sampled, batch.scored)

    def _eager(self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=rows,
            rollspan_step=self._context,
        ).logits[0]
        return logits

    def after_commit(self) -> None:
        """Other weights are in force: what was derived from the old ones is made anew."""
        if self._captured is not None:
            self._captured.after_commit()

    def facts(self) -> dict[str, Any]:
        """What ``server_info`` tells of this runner."""
        backends = sorted({backend.name for backend in self._context.cache.backends.values()})
        captured = self._captured is not None
        return {"runner": "captured" if captured else "eager", "attention": ", ".join(backends)}
