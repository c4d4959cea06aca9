"""ModelRunner: one forward pass of the HF model over what the scheduler picked; owner of the KV cache."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rollspan.config import EngineConfig
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.kernels.invariant import InvariantMode, overloads
from rollspan.runner import graph
from rollspan.runner.attention import PagedCache, StepContext
from rollspan.runner.cuda_graphs import CudaGraphs, padded_sizes
from rollspan.runner.input_batch import PendingTokens, StepLogits
from rollspan.runner.input_builder import InputBatchBuilder
from rollspan.runner.routing import RoutedExperts
from rollspan.runner.self_check import SelfCheck

logger = logging.getLogger("rollspan.engine")

#: Input ids and positions ``[1, T]`` and rows ``[S]`` in, logits ``[S, vocabulary]`` out.
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_NOTHING = contextlib.nullcontext()


def _nothing() -> None:
    """Exchanges nothing: nothing is derived from the weights."""


class ModelRunner:
    """Runs steps through the model's own forward, captured where that is possible, over a paged KV cache.

    Args:
        num_blocks: KV blocks to begin with, the padding block not counted.
        max_model_len: most tokens of a sequence.
        routing: records which experts compute each token; its hooks need the model's own forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        device: torch.device,
        *,
        num_blocks: int,
        max_model_len: int,
        routing: RoutedExperts | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._config = config
        self._builder = InputBatchBuilder(config.block_size, device)
        self._routing = routing
        self._context = StepContext(PagedCache(0, config.block_size))
        self._captured: graph.CapturedForward | None = None
        self._graphs: CudaGraphs | None = None
        if device.type == "cuda" and config.cuda_graphs and routing is None:
            sizes = padded_sizes(config.max_num_seqs)
            self._graphs = CudaGraphs(self._eager, self._context, sizes=sizes, max_model_len=max_model_len)
        self.allocate(num_blocks)
        self._forward: Forward = self._eager
        self._attention: list[str] = []  # backends that the layers chose when they first ran
        self._mode = InvariantMode() if config.batch_invariant else _NOTHING
        self._inference = torch.inference_mode()  # making it takes longer than entering it

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block and what is kept beside it; known once a step has run."""
        return self._context.cache.bytes_per_block + (self._routing.bytes_per_block if self._routing else 0)

    def allocate(self, num_blocks: int) -> None:
        """Replaces the KV cache by an empty one of ``num_blocks`` blocks, the padding block not counted."""
        self._attention = self._context.cache.backends
        self._num_blocks = num_blocks
        scratch = 0 if self._graphs is None else 1  # for what the padding rows of graphs write
        self._context.cache = PagedCache(num_blocks + 1 + scratch, self._config.block_size)
        if self._routing is not None:
            self._routing.allocate(num_blocks)

    def choose_forward(self, check: SelfCheck) -> str | None:
        """Captures the forward where that gives the right numbers, else calls the model itself.

        Returns:
            None, or why neither will do, as the end of a sentence about the model.
        """
        if self._device.type == "cpu" and self._routing is None:
            exact = self._config.batch_invariant
            options = graph.CaptureOptions(exact=exact, replacements=overloads(self._model.dtype) if exact else {})
            self._captured = graph.capture(self._model, self._context, options)
        faster = self._graphs or self._captured
        if faster is not None:
            self._forward = faster
            outcome = check.compare(self.run)
            if outcome.ok:
                return None
            logger.warning("the captured forward of %s %s: not used", type(self._model).__name__, outcome.fault)
            self._graphs, self._captured, self._forward = None, None, self._eager
        return check.compare(self.run).fault

    def run(self, scheduled: Sequence[ScheduledRequest], pending: PendingTokens | None = None) -> StepLogits:
        """One forward pass; tokens that are still being sampled are taken from ``pending``."""
        batch = self._builder.build(scheduled, pending)
        self._context.batch = batch.attention
        recording = _NOTHING if self._routing is None else self._routing.recording(batch.attention.slot_mapping)
        with self._inference, recording:
            logits = self._forward(batch.input_ids, batch.positions, batch.sample_rows)
        if batch.scored and self._graphs is not None:
            logits = logits.clone()  # scores are read when the next step may have overwritten the results of the graph
        return StepLogits(logits, batch.sampled, batch.scored)

    def _eager(self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with self._mode:
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

    def prepare(self, new: Mapping[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
        """Derives from the data that parameters are to have, beside the steps; what it returns swaps that in."""
        return _nothing if self._captured is None else self._captured.prepare(new)

    def release(self, *, weights: bool) -> None:
        """Gives back the memory of the KV cache, and of what is derived from the weights if these go as well.

        The next step finds an empty cache, which takes its memory then.
        """
        names = self._attention
        self.allocate(self._num_blocks)
        self._attention = self._attention or names
        if self._graphs is not None:
            self._graphs.drop()
        if weights and self._captured is not None:
            self._captured.drop()

    def facts(self) -> dict[str, Any]:
        """What ``server_info`` tells of this runner."""
        runner = "eager" if self._captured is None else "captured"
        if self._graphs is not None and not self._graphs.failed:
            runner = "cuda graphs"
        derived = 0 if self._captured is None else self._captured.derived_bytes
        return {"runner": runner, "attention": ", ".join(self._attention), "derived_weight_bytes": derived}
