"""The engine's attention for a trainer: the same kernel forwards, gradients backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from rollspan.kernels import attention as kernels
from rollspan.trainer.layout import BLOCK_SIZE, Layout, whole_sequences

#: Name of the attention for ``attn_implementation``.
NAME = "rollspan"
#: Query rows of which the backward pass holds the scores at a time.
_CHUNK = 256


@dataclass(frozen=True)
class Scoring:
    """How a layer scores: the constants of :meth:`rollspan.kernels.attention.AttentionBackend.attend`."""

    scale: float
    sliding_window: int | None
    softcap: float | None


class Attention(torch.autograd.Function):
    """Causal attention of whole sequences in flattened rows: ``[R, heads, D]`` and keys and values with kv_heads."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        lengths: tuple[int, ...],
        scoring: Scoring,
    ) -> torch.Tensor:
        """``[R, heads, Dv]`` by the engine's kernel; float64, which it does not compute, by the recomputation."""
        ctx.save_for_backward(query, key, value, sinks)
        ctx.lengths, ctx.scoring = lengths, scoring
        if query.dtype == torch.float64:
            pieces = _pieces(query, key, value, sinks, lengths, scoring)
            return torch.cat([_rows(piece.weights @ piece.values) for piece in pieces])
        batch, num_blocks = whole_sequences(lengths, query.device)
        head_dim, value_dim = key.shape[-1], value.shape[-1]
        backend = kernels.select(
            query.device, dtype=key.dtype, head_dim=head_dim, value_dim=value_dim, block_size=BLOCK_SIZE
        )
        cache = backend.allocate(
            num_blocks, BLOCK_SIZE, key.shape[1], head_dim, value_dim, dtype=key.dtype, device=query.device
        )
        return backend.attend(
            query,
            key,
            value,
            cache,
            batch,
            scale=scoring.scale,
            sliding_window=scoring.sliding_window,
            softcap=scoring.softcap,
            sinks=sinks,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients in float32 (float64 for that) from recomputed scores, 256 query rows at a time."""
        query, key, value, sinks = ctx.saved_tensors
        scoring: Scoring = ctx.scoring
        wide = torch.promote_types(query.dtype, torch.float32)
        grads = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in (query, key, value)]
        grad_sinks = None if sinks is None else torch.zeros(sinks.shape, dtype=wide, device=sinks.device)
        for piece in _pieces(query, key, value, sinks, ctx.lengths, scoring):
            upstream = _heads(grad_output[piece.rows].to(wide), key.shape[1])
            grad_weights = upstream @ piece.values.transpose(-1, -2)
            mean = (piece.weights * grad_weights).sum(dim=-1, keepdim=True)
            grad_scores = piece.weights * (grad_weights - mean)
            if grad_sinks is not None:
                grad_sinks -= (piece.sink_weights * mean).sum(dim=(-1, -2)).flatten()
            if scoring.softcap is not None:
                grad_scores *= 1 - (piece.scores / scoring.softcap) ** 2
            grad_scores *= scoring.scale
            grads[0][piece.rows] = _rows(grad_scores @ piece.keys)
            # The heads of a group share keys and values: their gradients add up.
            grads[1][piece.seen] += (grad_scores.transpose(-1, -2) @ piece.queries).sum(dim=1).transpose(0, 1)
            grads[2][piece.seen] += (piece.weights.transpose(-1, -2) @ upstream).sum(dim=1).transpose(0, 1)
        narrow = [grad.to(query.dtype) for grad in grads]
        return *narrow, None if grad_sinks is None else grad_sinks.to(sinks.dtype), None, None


@dataclass(frozen=True)
class _Piece:
    """Some query rows of one sequence and the keys that they see; all in the wide dtype, G heads to a kv head."""

    rows: slice
    seen: slice
    queries: torch.Tensor  # [kv_heads, G, Q, D]
    keys: torch.Tensor  # [kv_heads, 1, K, D]
    values: torch.Tensor  # [kv_heads, 1, K, Dv]
    scores: torch.Tensor  # [kv_heads, G, Q, K], capped, before the mask
    weights: torch.Tensor  # [kv_heads, G, Q, K]
    sink_weights: torch.Tensor  # [kv_heads, G, Q, 0 or 1]


def _pieces(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    lengths: tuple[int, ...],
    scoring: Scoring,
) -> Iterator[_Piece]:
    """Recomputes the attention weights in plain torch, piece by piece in order of the rows."""
    wide = torch.promote_types(query.dtype, torch.float32)
    kv_heads = key.shape[1]
    start = 0
    for length in lengths:
        for first in range(0, length, _CHUNK):
            last = min(first + _CHUNK, length)
            oldest = 0 if scoring.sliding_window is None else max(0, first - scoring.sliding_window + 1)
            rows, seen = slice(start + first, start + last), slice(start + oldest, start + last)
            queries = _heads(query[rows].to(wide), kv_heads)
            keys, values = (states[seen].to(wide).transpose(0, 1)[:, None] for states in (key, value))
            scores = (queries @ keys.transpose(-1, -2)) * scoring.scale
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            position = torch.arange(oldest, last, device=query.device)
            own = torch.arange(first, last, device=query.device)[:, None]
            visible = position <= own
            if scoring.sliding_window is not None:
                visible &= position > own - scoring.sliding_window
            masked = scores.masked_fill(~visible, -torch.inf)
            if sinks is not None:
                sink = sinks.to(wide).view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
                masked = torch.cat((masked, sink), dim=-1)
            weights, sink_weights = masked.softmax(dim=-1).split(
                (last - oldest, masked.shape[-1] - (last - oldest)), -1
            )
            yield _Piece(rows, seen, queries, keys, values, scores, weights, sink_weights)
        start += length


def _heads(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[Q, heads, D]`` to ``[kv_heads, G, Q, D]``."""
    return rows.view(rows.shape[0], kv_heads, -1, rows.shape[-1]).permute(1, 2, 0, 3)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """``[kv_heads, G, Q, D]`` to ``[Q, heads, D]``."""
    return heads.permute(2, 0, 1, 3).flatten(1, 2)


def attention(
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
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls for ``attn_implementation="rollspan"``.

    Args:
        query: ``[B, heads, Q, D]``; key ``[B, kv_heads, T, D]``; value ``[B, kv_heads, T, Dv]``. With a cache Q may be
            smaller than T: the queries are those of the last positions.
        attention_mask: ``[B, T]``, or None where every position is a token.
        sliding_window: a query at position p sees keys at positions above p - sliding_window.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: attention sinks, ``[heads]``.
        position_ids: where there is no mask, they tell packed sequences apart; ``cu_seq_lens_q`` likewise.

    Returns:
        ``[B, Q, heads, Dv]``, zero at padding, and None for the weights.

    Raises:
        ValueError: dropout, attention that is not causal, a position bias, a mask of another kind.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for wrong, what in (
        (dropout, "dropout of the attention: set attention_dropout to 0"),
        (not causal, "attention that is not causal"),
        (position_bias is not None, "a position bias"),
    ):
        if wrong:
            raise ValueError(f"attn_implementation={NAME!r} does not support {what}")
    batch, queries = query.shape[0], query.shape[2]
    tokens = key.shape[2]
    if queries < tokens:  # the earlier positions' outputs are not asked for
        query = nn.functional.pad(query, (0, 0, tokens - queries, 0))
        position_ids = cu_seq_lens_q = None
    layout = Layout.of((batch, tokens), attention_mask, position_ids, cu_seq_lens_q)
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else float(scaling), sliding_window, softcap)
    output: torch.Tensor = Attention.apply(
        *(layout.gather(states) for states in (query, key, value)), s_aux, layout.lengths, scoring
    )
    return layout.scatter(output, (batch, tokens))[:, tokens - queries :], None


def padding_mask(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    config: PretrainedConfig | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """The mask that transformers hands to :func:`attention`: the model's own ``[B, T]``, None if it hides nothing.

    Raises:
        ValueError: a kind of layer or a cache that :func:`attention` does not compute.
    """
    text = None if config is None else config.get_text_config()
    foreign = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if foreign:
        raise ValueError(f"attn_implementation={NAME!r} does not support layers of type {', '.join(sorted(foreign))}")
    if q_offset + q_length != kv_offset + kv_length:
        raise ValueError(f"attn_implementation={NAME!r} does not support a cache of fixed size")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask[:, -kv_length:]


def register(name: str = NAME) -> str:
    """Makes the attention known to transformers, for ``attn_implementation=name``; may be called again.

    Returns:
        ``name``.
    """
    function: Callable[..., Any] = attention
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, padding_mask)
    return name
