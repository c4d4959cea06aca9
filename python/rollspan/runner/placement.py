"""Which runner computes a model, and how much of everything it is given."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from rollspan.config import EngineConfig
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.errors import RollspanError
from rollspan.kernels.attention_varlen import PAGE
from rollspan.runner.compat import CompatRunner
from rollspan.runner.input_batch import PendingTokens, StepLogits
from rollspan.runner.invariance import Numerics, examine
from rollspan.runner.loader import compat_reason
from rollspan.runner.model_runner import ModelRunner
from rollspan.runner.routing import RoutedExperts
from rollspan.runner.self_check import SelfCheck

logger = logging.getLogger("rollspan.engine")

#: Share of the free memory that the KV cache takes by default.
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.9}
#: Bytes of logits that the prompt log-probs of one request may take in one step.
SCORED_BYTES = 1 << 26


class Runner(Protocol):
    """What computes the steps of a model."""

    def run(self, scheduled: Sequence[ScheduledRequest], pending: PendingTokens | None = None) -> StepLogits:
        """One forward pass over what the scheduler picked; ``pending`` has the tokens that are still being sampled."""

    def after_commit(self) -> None:
        """Other weights are in force: what was derived from the old ones is made anew."""

    def prepare(self, new: Mapping[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
        """Derives from the data that parameters are to have, beside the steps; what it returns swaps that in."""

    def release(self, *, weights: bool) -> None:
        """Gives back the memory of keys and values, and of what is derived from the weights if these go as well.

        The next step finds an empty cache; it must not come before ``prepare`` or ``after_commit`` if weights went.
        """

    def facts(self) -> dict[str, Any]:
        """What ``server_info`` tells of the runner."""


@dataclass(frozen=True)
class Placement:
    """A runner and its measures.

    Attributes:
        num_blocks: KV blocks, the padding block not counted.
        max_model_len: tokens of prompt and output together.
        max_scored_tokens: most prompt tokens of one request to score in one step.
        vocab_size: columns of the logits.
        numerics: what is known of the numbers.
        shares_blocks: False where KV blocks are mere accounts, which cannot be shared.
        routing: which experts computed each token, where that is kept.
    """

    runner: Runner
    num_blocks: int
    max_model_len: int
    max_scored_tokens: int
    vocab_size: int
    numerics: Numerics
    shares_blocks: bool
    routing: RoutedExperts | None


def fit(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> EngineConfig:
    """The configuration with blocks as large as the attention needs that is made for the device."""
    size = -(-config.block_size // PAGE) * PAGE
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or size == config.block_size:
        return config
    logger.info(
        "KV blocks of %d tokens instead of %d: flash attention needs multiples of %d", size, config.block_size, PAGE
    )
    return dataclasses.replace(config, block_size=size)


def place(model: PreTrainedModel, config: EngineConfig, device: torch.device) -> Placement:
    """Chooses the runner for a model, checks it, and gives it memory.

    Raises:
        RollspanError: no runner computes what the model computes by itself, or the KV cache cannot hold one request.
    """
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    max_model_len = _max_model_len(model, config)
    routing = RoutedExperts(model, config.block_size) if config.enable_return_routed_experts else None
    reason = compat_reason(model)
    paged: ModelRunner | None = None
    if reason is None:
        check = SelfCheck(model, vocab_size=vocab_size, block_size=config.block_size, device=device)
        paged = ModelRunner(
            model, config, device, num_blocks=check.num_blocks, max_model_len=max_model_len, routing=routing
        )
        reason = paged.choose_forward(check)
    runner: Runner
    if paged is not None and reason is None:
        runner = paged
        num_blocks = _num_blocks(paged.bytes_per_block, config, max_model_len, device)
        numerics = examine(model, paged, config, vocab_size)
        paged.allocate(num_blocks)
    else:
        numerics = examine(model, None, config, vocab_size)
        runner = compat = CompatRunner(
            model,
            vocab_size=vocab_size,
            block_size=config.block_size,
            device=device,
            reason=reason or "",
            routing=routing,
        )
        block_bytes = config.block_size * compat.bytes_per_token + (routing.bytes_per_block if routing else 0)
        states = compat.bytes_per_sequence * config.max_num_seqs
        num_blocks = _num_blocks(max(block_bytes, 1), config, max_model_len, device, states=states)
        if routing is not None:
            routing.allocate(num_blocks)
    if routing is not None:
        routing.verify()
    return Placement(
        runner,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_scored_tokens=max(16, SCORED_BYTES // (4 * vocab_size)),
        vocab_size=vocab_size,
        numerics=numerics,
        shares_blocks=reason is None,
        routing=routing,
    )


def _num_blocks(
    block_bytes: int, config: EngineConfig, max_model_len: int, device: torch.device, *, states: int = 0
) -> int:
    """Blocks that the memory holds beside ``states``, the bytes that sequences take whatever their length."""
    longest = -(-max_model_len // config.block_size)
    memory = config.kv_cache_memory
    if memory is None:
        # Engines of a set have the host's memory in common; of GPUs each has its own.
        sharing = config.num_engines if device.type == "cpu" else 1
        memory = int(_free_memory(device) * MEMORY_SHARE[device.type] / sharing)
    spare = 1 if device.type == "cpu" else 2  # the padding block, and the one that padded graphs write to
    blocks = min((memory - states) // block_bytes - spare, longest * config.max_num_seqs)
    if blocks < longest:
        raise RollspanError(
            f"the KV cache of {memory} bytes holds {max(blocks, 0) * config.block_size} tokens, one request of "
            f"max_model_len {max_model_len} needs {longest * config.block_size}: give more with "
            f"--kv-cache-memory or lower --max-model-len{' or --max-num-seqs' if states else ''}",
            reason="invalid_request",
            param="kv_cache_memory",
        )
    return blocks


def _max_model_len(model: PreTrainedModel, config: EngineConfig) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = config.max_model_len or limit or 4096
    if limit and length > limit:
        raise RollspanError(
            f"max_model_len must be at most the model's {limit}, got {length}",
            reason="invalid_request",
            param="max_model_len",
        )
    return int(length)


def _free_memory(device: torch.device) -> int:
    """Bytes free on the device; on the CPU what the system can give without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as meminfo:
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(min(int(fields["MemAvailable"].split()[0]) * 1024, _container_memory()))
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _container_memory() -> float:
    """Bytes that the control group leaves to this process; infinite where it sets no limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return float("inf") if limit == "max" else max(int(limit) - int(used), 0)
    except (OSError, ValueError):
        return float("inf")
