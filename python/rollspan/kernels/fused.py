"""Elementwise operations of a forward pass in one kernel each: RMS norm, rotary embedding, gated activation.

Each function here binds what is constant in a model and returns what computes: a Rust kernel where the extension module
is there and the tensors are CPU tensors of float32, bfloat16 or float16, else the torch form beside it, which is the
definition. Results are rounded where the code of ``transformers`` rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

from rollspan.kernels import native

_TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Scaling(IntEnum):
    """How the weight of an RMS norm is applied to the normalised row, which is float32."""

    NONE = 0
    #: ``weight * round(x)``: Llama, Qwen, Mistral.
    ROUNDED = 1
    #: ``round(weight * x)``: OLMo.
    WEIGHT = 2
    #: ``round((1 + weight) * x)``: Gemma.
    ONE_PLUS = 3


class Activation(IntEnum):
    """Activations of a gate; GELU in its approximation by tanh."""

    SILU = 0
    GELU_TANH = 1


def supported(dtype: torch.dtype) -> bool:
    """Whether the Rust kernels compute CPU tensors of this type."""
    return dtype in _TYPE_CODES and native.available()


def rms_norm_torch(x: Tensor, weight: Tensor | None, epsilon: float, scaling: Scaling) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon)`` over the last dimension, scaled by ``weight``."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is None or scaling is Scaling.NONE:
        return wide.to(x.dtype)
    if scaling is Scaling.ROUNDED:
        return weight * wide.to(x.dtype)
    return (wide * (weight if scaling is Scaling.WEIGHT else 1.0 + weight.float())).to(x.dtype)


def rms_norm(dtype: torch.dtype, epsilon: float, scaling: Scaling) -> Callable[[Tensor, Tensor | None], Tensor]:
    """RMS norm of tensors of ``dtype``: ``(x [..., C], weight [C] or None) -> [..., C]``."""
    if not supported(dtype):
        return lambda x, weight: rms_norm_torch(x, weight, epsilon, scaling)
    kernel, code, kind = native.module().rms_norm, _TYPE_CODES[dtype], int(scaling)

    def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        output = torch.empty_like(x)
        columns = x.shape[-1]
        address = 0 if weight is None else weight.data_ptr()
        rows = x.numel() // columns
        kernel(code, rows, columns, x.data_ptr(), columns, 0, 0, 0, address, kind, epsilon, output.data_ptr())
        return output

    return rms_norm


def add_rms_norm(
    dtype: torch.dtype, epsilon: float, scaling: Scaling
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """``(x, y, weight) -> (x + y, norm(x + y))``, all ``[..., C]`` of one shape."""
    if not supported(dtype):

        def add_rms_norm_torch(x: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
            total = x + y
            return total, rms_norm_torch(total, weight, epsilon, scaling)

        return add_rms_norm_torch
    kernel, code, kind = native.module().rms_norm, _TYPE_CODES[dtype], int(scaling)

    def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        if not (x.is_contiguous() and y.is_contiguous()):
            x, y = x.contiguous(), y.contiguous()
        total, output = torch.empty_like(x), torch.empty_like(x)
        columns = x.shape[-1]
        kernel(
            code,
            x.numel() // columns,
            columns,
            x.data_ptr(),
            columns,
            y.data_ptr(),
            columns,
            total.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            kind,
            epsilon,
            output.data_ptr(),
        )
        return total, output

    return add_rms_norm


def rotary_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` for ``x`` ``[1, H, T, D]``, cos and sin ``[1, 1, T, D]``."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def rotary(
    dtype: torch.dtype, epsilon: float, scaling: Scaling
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]:
    """Rotary embedding of queries and keys after an optional norm of each head.

    Returns:
        ``(query [1, Hq, T, D], key [1, Hk, T, D], cos [1, 1, T, D], sin, query_weight, key_weight) -> (query, key)``
        with the norms' weights ``[D]``, None for no norm. The arguments are overwritten where that is quicker.
    """

    def rotary_torch_pair(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor | None, key_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if query_weight is not None:
            query = rms_norm_torch(query, query_weight, epsilon, scaling)
        if key_weight is not None:
            key = rms_norm_torch(key, key_weight, epsilon, scaling)
        return rotary_torch(query, cos, sin), rotary_torch(key, cos, sin)

    if not supported(dtype):
        return rotary_torch_pair
    kernel, code, kind = native.module().rotary, _TYPE_CODES[dtype], int(scaling)

    def rotary(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor | None, key_weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, head_dim = query.shape[2:]
        _, query_head, query_row, query_step = query.stride()
        _, key_head, key_row, key_step = key.stride()
        if not (query_step == key_step == 1 and query_head == key_head == head_dim and cos.shape[2] == rows):
            return rotary_torch_pair(query, key, cos, sin, query_weight, key_weight)
        cos, sin = cos.contiguous(), sin.contiguous()  # some models slice or expand them
        query_address, key_address = query.data_ptr(), key.data_ptr()
        kernel(
            code,
            rows,
            head_dim,
            cos.data_ptr(),
            head_dim,
            sin.data_ptr(),
            head_dim,
            kind,
            epsilon,
            (
                query.shape[1],
                query_address,
                query_row,
                query_address,
                query_row,
                0 if query_weight is None else query_weight.data_ptr(),
            ),
            (
                key.shape[1],
                key_address,
                key_row,
                key_address,
                key_row,
                0 if key_weight is None else key_weight.data_ptr(),
            ),
        )
        return query, key

    return rotary


def gated_torch(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """``activation(gate) * up``."""
    if activation is Activation.SILU:
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def gated(dtype: torch.dtype, activation: Activation) -> Callable[[Tensor, Tensor], Tensor]:
    """``(gate [..., C], up [..., C]) -> activation(gate) * up``."""
    if not supported(dtype):
        return lambda gate, up: gated_torch(gate, up, activation)
    kernel, code, kind = native.module().gated, _TYPE_CODES[dtype], int(activation)

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        if not (gate.is_contiguous() and up.is_contiguous()):
            gate, up = gate.contiguous(), up.contiguous()
        output = torch.empty_like(gate)
        columns = gate.shape[-1]
        rows = gate.numel() // columns
        kernel(code, kind, rows, columns, gate.data_ptr(), columns, up.data_ptr(), columns, output.data_ptr())
        return output

    return gated


def gated_halves(dtype: torch.dtype, activation: Activation) -> Callable[[Tensor], Tensor]:
    """``x [..., 2 C] -> activation(x[..., :C]) * x[..., C:]``."""
    if not supported(dtype):
        return lambda x: gated_torch(x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :], activation)
    kernel, code, kind = native.module().gated, _TYPE_CODES[dtype], int(activation)

    def gated_halves(x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        *leading, stride = x.shape
        columns = stride // 2
        output = torch.empty((*leading, columns), dtype=dtype)
        address = x.data_ptr()
        up = address + columns * dtype.itemsize
        rows = x.numel() // stride
        kernel(code, kind, rows, columns, address, stride, up, stride, output.data_ptr())
        return output

    return gated_halves
