"""The attention function that transformers' models call, and the KV cache that it reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from rollspan.kernels import attention as kernels

#: Name under which :func:`paged_attention` is registered with transformers.
NAME = "rollspan_paged"


class PagedCache:
    """Keys and values of every layer in blocks, made when a layer first runs and its shape is known.

    Block 0 stays all zeros. Stale slots are never read: a query sees exactly the slots of its own sequence up to its
    own position.

    Args:
        num_blocks: blocks, block 0 included.
        block_size: tokens per block.
        backend: name of the attention backend; None for the fastest that supports a layer.
    """

    def __init__(self, num_blocks: int, block_size: int, backend: str | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers: dict[int, tuple[kernels.AttentionBackend, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._backend = backend

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over the layers that have run."""
        return sum(t.nbytes for _, cache in self._layers.values() for t in cache) // self.num_blocks

    @property
    def backends(self) -> list[str]:
        """Names of the backends of the layers that have run."""
        return sorted({backend.name for backend, _ in self._layers.values()})

    def layer(
        self, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[kernels.AttentionBackend, tuple[torch.Tensor, torch.Tensor]]:
        """Backend and cache of a layer whose keys and values look like ``[1, num_kv_heads, T, head_dim]``."""
        found = self._layers.get(index)
        if found is None:
            heads, head_dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
            backend = kernels.select(
                key.device,
                dtype=key.dtype,
                head_dim=head_dim,
                value_dim=value_dim,
                block_size=self.block_size,
                name=self._backend,
            )
            cache = backend.allocate(
                self.num_blocks, self.block_size, heads, head_dim, value_dim, key.dtype, key.device
            )
            found = self._layers[index] = backend, cache
        return found


class StepContext:
    """What a forward pass needs to know besides its input ids; travels through the model as ``rollspan_step``.

    Attributes:
        cache: the KV cache.
        batch: the step's sequences; set before each forward pass.
        tracing: the forward pass is being recorded: attention becomes one opaque operation.
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache
        self.batch: kernels.AttentionBatch | None = None
        self.tracing = False

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        scale: float,
        sliding_window: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of one layer; 0 stands for no window and no cap.

        Args:
            query: ``[1, num_heads, T, head_dim]``; key and value likewise with ``num_kv_heads``.
            sinks: ``[num_heads]``, a further score per head that takes part in the softmax only.

        Returns:
            ``[1, T, num_heads, value_head_dim]``.
        """
        assert self.batch is not None, "no step is running"
        backend, cache = self.cache.layer(layer, key, value)
        return backend.attend_heads(
            query,
            key,
            value,
            cache,
            self.batch,
            scale=scale,
            sliding_window=sliding_window or None,
            softcap=softcap or None,
            sinks=sinks,
        )


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    rollspan_step: StepContext,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one flattened step, as transformers calls it.

    Args:
        module: the attention layer; ``layer_idx`` names it.
        query: ``[1, num_heads, T, head_dim]``.
        key: ``[1, num_kv_heads, T, head_dim]``; ``value`` likewise (its head_dim may differ).
        attention_mask: unused: causality follows from the batch.
        dropout: unused: inference.
        scaling: factor of the scores, default ``head_dim ** -0.5``.
        sliding_window: a query at position p sees keys at positions above p - sliding_window.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: attention sinks, ``[num_heads]``.

    Returns:
        ``[1, T, num_heads, value_head_dim]``, and None for the weights.
    """
    attend = torch.ops.rollspan.attend if rollspan_step.tracing else rollspan_step.attend
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return attend(query, key, value, layer, scale, sliding_window or 0, softcap or 0.0, s_aux), None


AttentionInterface.register(NAME, paged_attention)
