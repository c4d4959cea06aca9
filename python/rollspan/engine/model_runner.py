"""ModelRunner: one forward pass of the HF model over what the scheduler picked; owner of the KV cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rollspan.config import EngineConfig
from rollspan.engine import attention, loader
from rollspan.engine.input_batch import InputBatch
from rollspan.engine.request import Request
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.errors import RollspanError
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.sampling_params import SamplingParams

#: Share of the free memory that the KV cache takes by default.
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.9}
#: Largest deviation of the self-check, relative to the largest logit, by dtype.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}
_CHECK_LENGTHS = (24, 9)


class ModelRunner:
    """Runs steps on one device and owns the KV cache.

    Attributes:
        max_model_len: tokens of prompt and output together.
        num_blocks: KV blocks, the padding block not counted.
        vocab_size: columns of the logits.

    Raises:
        RollspanError: the model computes other logits through the paged attention than through its own, or the KV
            cache cannot hold one request.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.block_size = config.block_size
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self._cache = attention.PagedCache(2 * max(_CHECK_LENGTHS) + 3 * self.block_size)
        try:
            self._self_check()
        except RollspanError:
            raise
        except Exception as error:  # the model's code may raise anything
            raise self._refuse(f"cannot run with paged attention: {loader.one_line(error)}") from error
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_model_len = config.max_model_len or limit or 4096
        if limit and self.max_model_len > limit:
            raise RollspanError(
                f"max_model_len must be at most the model's {limit}, got {self.max_model_len}",
                reason="invalid_request",
                param="max_model_len",
            )
        self.num_blocks = self._size_cache(config)
        self._cache = attention.PagedCache((self.num_blocks + 1) * self.block_size)

    def _size_cache(self, config: EngineConfig) -> int:
        block_bytes = self._cache.bytes_per_slot * self.block_size
        longest = -(-self.max_model_len // self.block_size)
        memory = config.kv_cache_memory
        if memory is None:
            memory = int(_free_memory(self._device) * MEMORY_SHARE[self._device.type])
        blocks = min(memory // block_bytes - 1, longest * config.max_num_seqs)
        if blocks < longest:
            raise RollspanError(
                f"the KV cache of {memory} bytes holds {max(blocks, 0) * self.block_size} tokens, one request of "
                f"max_model_len {self.max_model_len} needs {longest * self.block_size}: give more with "
                "--kv-cache-memory or lower --max-model-len",
                reason="invalid_request",
                param="kv_cache_memory",
            )
        return blocks

    def run(self, scheduled: Sequence[ScheduledRequest]) -> tuple[torch.Tensor, list[ScheduledRequest]]:
        """One forward pass.

        Returns:
            Logits ``[S, vocabulary]`` of the S requests whose next token can be sampled, and those requests.
        """
        batch = InputBatch.build(scheduled, self.block_size, self._device)
        with torch.inference_mode():
            logits = self._model(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.sample_rows,
                rollspan_batch=batch,
                rollspan_cache=self._cache,
            ).logits[0]
        return logits, batch.sampled

    def _self_check(self) -> None:
        """Compares chunked, batched, paged logits with those of the model's own attention on two short sequences.

        Models with state outside the attention (recurrent layers, ALiBi) give other numbers here; they are refused.
        """
        vocabulary = self.vocab_size
        lengths = _CHECK_LENGTHS
        requests = [
            Request(
                EngineCoreRequest(
                    f"self-check-{i}", [(7 * i + 3 * j + 1) % vocabulary for j in range(n)], SamplingParams()
                ),
                admission=("", 0),
                arrival=i,
                seed=0,
            )
            for i, n in enumerate(lengths)
        ]
        blocks_each = -(-max(lengths) // self.block_size)
        for i, request in enumerate(requests):
            request.block_ids = list(range(1 + i * blocks_each, 1 + (i + 1) * blocks_each))
        paged: dict[str, torch.Tensor] = {}
        for step in ((15, 8), (8, 1), (1, 0)):
            scheduled = [ScheduledRequest(r, n) for r, n in zip(requests, step, strict=True) if n]
            logits, sampled = self.run(scheduled)
            paged.update({entry.request.request_id: row for entry, row in zip(sampled, logits, strict=True)})
            for entry in scheduled:
                entry.request.num_computed_tokens += entry.num_tokens
        self._model.set_attn_implementation("eager")
        try:
            for request in requests:
                ids = torch.tensor([request.token_ids], device=self._device)
                with torch.inference_mode():
                    expected = self._model(input_ids=ids, use_cache=False).logits[0, -1]
                if not bool(torch.isfinite(expected).all()):
                    raise self._refuse("computes logits that are not finite: its weights may be damaged")
                got = paged[request.request_id]
                worst = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
                if not worst <= TOLERANCE.get(self._model.dtype, 1e-3):
                    raise self._refuse(
                        "computes other logits with paged attention than with its own "
                        f"(relative difference {worst:.2g}): this kind of model is not supported"
                    )
        finally:
            self._model.set_attn_implementation(attention.NAME)

    def _refuse(self, what: str) -> RollspanError:
        return RollspanError(f"{type(self._model).__name__} {what}", reason="weights_invalid", param="model")


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
