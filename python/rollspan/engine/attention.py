"""Paged attention behind transformers' attention interface, in plain torch operations (any device)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from rollspan.engine.input_batch import InputBatch

#: Name under which :func:`paged_attention` is registered with transformers.
NAME = "rollspan_paged"


class PagedCache:
    """Keys and values of every layer: ``[num_slots, num_kv_heads, head_dim]`` each, made when a layer first runs.

    Slot ``block * block_size + offset`` holds one token. Stale slots are never read: a query sees exactly the slots
    of its own sequence up to its own position, and the zeros of block 0 as padding.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token takes over the layers that have run."""
        return sum(t.nbytes for pair in self._layers.values() for t in pair) // self.num_slots

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores ``key`` and ``value`` (``[T, num_kv_heads, head_dim]``) at ``slots`` (int64 ``[T]``).

        Returns:
            All keys and all values of the layer.
        """
        if layer not in self._layers:
            self._layers[layer] = (_zeros(self.num_slots, key), _zeros(self.num_slots, value))
        keys, values = self._layers[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values


def _zeros(num_slots: int, like: torch.Tensor) -> torch.Tensor:
    shape = (num_slots, *like.shape[1:])
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    # numpy's zeros come from the kernel page by page, on first use; torch's would touch all of a big cache now.
    return torch.from_numpy(np.zeros(math.prod(shape) * like.itemsize, dtype=np.uint8)).view(like.dtype).view(shape)


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
    rollspan_batch: InputBatch,
    rollspan_cache: PagedCache,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one flattened step.

    Args:
        module: the attention layer; ``layer_idx`` names it.
        query: ``[1, num_heads, T, head_dim]``.
        key: ``[1, num_kv_heads, T, head_dim]``; ``value`` likewise (its head_dim may differ).
        attention_mask: unused: causality follows from the batch.
        dropout: unused: inference.
        scaling: factor of the scores, default ``head_dim ** -0.5``.
        sliding_window: a query at position p sees keys at positions above p - sliding_window.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: attention sinks, ``[num_heads]``: a further score per head that takes part in the softmax only.

    Returns:
        ``[1, T, num_heads, value_head_dim]``, and None for the weights.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    keys, values = rollspan_cache.write(
        layer, rollspan_batch.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1)
    )
    heads, kv_heads = query.shape[1], key.shape[1]
    group = heads // kv_heads
    queries = query[0].transpose(0, 1)  # [T, H, D]
    output = queries.new_empty((queries.shape[0], heads, value.shape[-1]))
    sinks = None if s_aux is None else s_aux.float().view(kv_heads, group, 1, 1)
    decodes = rollspan_batch.num_decodes
    if decodes:
        length = rollspan_batch.decode_slots.shape[1]
        position = torch.arange(length, device=query.device)
        last = rollspan_batch.decode_lengths[:, None]
        visible = position < last
        if sliding_window is not None:
            visible &= position >= last - sliding_window
        slots = rollspan_batch.decode_slots.reshape(-1)
        seen_keys, seen_values = (
            cached.index_select(0, slots).view(decodes, length, kv_heads, -1).transpose(1, 2)
            for cached in (keys, values)
        )
        # The heads of a group share their keys: they are the rows of one small matrix product.
        grouped = queries[:decodes].view(decodes, kv_heads, group, -1)
        head_sinks = None if sinks is None else sinks[..., 0]
        result = _attend(
            grouped, seen_keys, seen_values, visible[:, None, None, :], scale, softcap=softcap, sinks=head_sinks
        )
        output[:decodes] = result.reshape(decodes, heads, -1)
    for prefill in rollspan_batch.prefills:
        rows = slice(prefill.start, prefill.stop)
        position = torch.arange(prefill.slots.shape[0], device=query.device)
        visible = position <= prefill.positions[:, None]
        if sliding_window is not None:
            visible &= position > prefill.positions[:, None] - sliding_window
        seen_keys, seen_values = (
            cached.index_select(0, prefill.slots).transpose(0, 1)[:, None] for cached in (keys, values)
        )
        grouped = queries[rows].view(-1, kv_heads, group, queries.shape[-1]).permute(1, 2, 0, 3)
        result = _attend(grouped, seen_keys, seen_values, visible, scale, softcap=softcap, sinks=sinks)
        output[rows] = result.permute(2, 0, 1, 3).reshape(prefill.stop - prefill.start, heads, -1)
    return output[None], None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention in float32, the score matrix in full.

    Args:
        query: ``[..., Q, D]``; key ``[..., K, D]``; value ``[..., K, Dv]``, leading dimensions broadcast.
        visible: boolean, broadcasts to ``[..., Q, K]``; every query sees at least one key.
        sinks: scores of the attention sinks, broadcast to ``[..., Q, 1]``.

    Returns:
        ``[..., Q, Dv]`` in the query's dtype.
    """
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        weights = torch.softmax(torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights, value.float()).to(query.dtype)


AttentionInterface.register(NAME, paged_attention)
