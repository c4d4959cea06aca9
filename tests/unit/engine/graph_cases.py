"""Models whose forward is captured, with attention within the row alone: no cache, one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.models import VOCABULARY

_NAME = "graph_cases"


class Context:
    """Attention of one sequence that is all there is; stands in for the engine's StepContext."""

    tracing = False

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        scale: float,
        sliding_window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """As ``torch.ops.rollspan.attend``."""
        group = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = torch.matmul(query.float(), keys.float().transpose(2, 3)) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        position = torch.arange(query.shape[2])
        hidden = position[None] > position[:, None]
        if sliding_window:
            hidden |= position[None] <= position[:, None] - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : query.shape[2]]
        return torch.matmul(weights, values.float()).to(query.dtype).transpose(1, 2).contiguous()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    rollspan_step: Context,
    **_: Any,
) -> tuple[Tensor, None]:
    attend: Callable[..., Tensor] = torch.ops.rollspan.attend if rollspan_step.tracing else rollspan_step.attend
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return attend(query, key, value, layer, scale, sliding_window or 0, softcap or 0.0, s_aux), None


AttentionInterface.register(_NAME, _attention)  # type: ignore[arg-type]


def build(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model, its norms' weights and biases not the ones and zeros that would hide a mistake."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=_NAME, dtype=dtype).eval()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.3))
    return model  # type: ignore[no-any-return]


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions, and the rows that are sampled: the last and some in no order."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, VOCABULARY, (1, rows), generator=generator)
    sampled = torch.randperm(rows, generator=generator)[: max(1, rows // 3)]
    return ids, torch.arange(rows)[None], torch.cat((sampled, torch.tensor([rows - 1])))[: max(1, rows - 1)]


def eager(model: PreTrainedModel, context: Context, rows: int) -> Tensor:
    """What the model's own forward gives."""
    ids, positions, sampled = inputs(rows)
    with torch.inference_mode():
        output = model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=sampled, rollspan_step=context
        )
    return output.logits[0]  # type: ignore[no-any-return]


def deviation(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
