"""The torch operations whose result for a row depends on the rows beside it, in forms where it does not.

Two kinds need it on the CPU (found by comparing every row count from 1 to 1024 at 1 to 4 threads):

- Matrix products. MKL's strict mode (:mod:`rollspan.numerics`) makes those of float32 the same for every number of
  rows and threads. bfloat16 and float16 go through oneDNN, which has no such mode: here they are cut into tiles of
  exactly 32 rows, the last one filled up with zeros.
- Elementwise functions with a vector form and a scalar form that round differently. The scalar form computes what is
  left over behind the last whole vector of each thread's share: which elements these are depends on the size of the
  tensor. Here the tensor is filled up so that nothing is left over, and each element gets the vector form.

What is not named here (softmax, log_softmax, norms, tanh, exp, cos, erf, the four arithmetic operations, gathers)
gives each row the same bits as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: Rows of one matrix product in bfloat16 or float16.
TILE_ROWS = 32
_REDUCED = (torch.bfloat16, torch.float16)
#: Elements of two AVX-512 vectors of 16-bit numbers: the loop of an elementwise function does as many at once.
_STRIDE = 64
#: Least share of a thread in an elementwise function (``at::internal::GRAIN_SIZE``); GELU has a rule of its own.
_GRAIN = 32768
_GELU_SERIAL = 16384


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``rows @ weight.T + bias``, each row with the same bits whatever the others are; differentiable.

    Args:
        rows: ``[..., K]``; weight ``[N, K]``; bias ``[N]``.
    """
    if rows.dtype not in _REDUCED or rows.device.type != "cpu":
        return functional.linear(rows, weight, bias)
    return _tiles(rows, lambda tile: functional.linear(tile, weight, bias), ("linear", weight.shape, bias is None))


def addmm(bias: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, **factors: Any) -> torch.Tensor:
    """:func:`torch.addmm` for a layer that keeps its weight as ``[K, N]`` (GPT-2): see :func:`linear`."""
    if rows.dtype not in _REDUCED or rows.device.type != "cpu" or bias.dim() > 1:
        return torch.addmm(bias, rows, weight, **factors)
    return _tiles(rows, lambda tile: torch.addmm(bias, tile, weight, **factors), ("addmm", weight.shape, False))


def _tiles(rows: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], kind: tuple[Any, ...]) -> torch.Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    count = flat.shape[0]
    if count % TILE_ROWS:
        flat = functional.pad(flat, (0, 0, 0, -count % TILE_ROWS))
    threads = torch.get_num_threads()
    serial = threads > 1 and not _same_with_threads(kind, rows.shape[-1], rows.dtype, threads)
    if serial:
        torch.set_num_threads(1)
    try:
        parts = [product(tile) for tile in flat.split(TILE_ROWS)]
    finally:
        if serial:
            torch.set_num_threads(threads)
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result[:count].view(*rows.shape[:-1], result.shape[-1])


@functools.lru_cache(maxsize=1024)
def _same_with_threads(kind: tuple[Any, ...], inner: int, dtype: torch.dtype, threads: int) -> bool:
    """Whether a tile's product of this shape has the bits of one thread also with ``threads`` of them.

    With few columns oneDNN may split the sum itself among the threads.
    """
    name, shape, no_bias = kind
    columns = shape[0] if name == "linear" else shape[1]
    rows, weight = cancelling(TILE_ROWS, columns, inner, dtype)
    bias = torch.zeros(columns, dtype=dtype)
    results = []
    with torch.no_grad():
        for count in (1, threads):
            torch.set_num_threads(count)
            if name == "linear":
                results.append(functional.linear(rows, weight, None if no_bias else bias))
            else:
                results.append(torch.addmm(bias, rows, weight.t().contiguous()))
    return torch.equal(*results)


def cancelling(rows: int, columns: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A product whose terms cancel, so that what is left of each sum is its rounding errors: their order shows.

    Returns:
        ``[rows, inner]`` and ``[columns, inner]``.
    """
    generator = torch.Generator().manual_seed(1)
    half = inner // 2
    left, right = (torch.randn(count, half, generator=generator) for count in (rows, columns))
    odd = [torch.zeros(count, inner % 2) for count in (rows, columns)]
    return (
        torch.cat((left, -left.flip(-1), odd[0]), dim=-1).to(dtype),
        torch.cat((right, right.flip(-1), odd[1]), dim=-1).to(dtype),
    )


def elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function`` of one tensor, with the bits of its vector form for every element; differentiable."""

    tasks = _gelu_tasks if function is torch._C._nn.gelu else _tasks

    @functools.wraps(function)
    def even(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        count = input.numel()
        padded = _padded(count, torch.get_num_threads(), tasks)
        if input.device.type != "cpu" or (padded == count and input.is_contiguous()):
            return function(input, *args, **kwargs)
        flat = functional.pad(input.reshape(-1), (0, padded - count))
        return function(flat, *args, **kwargs)[:count].view(input.shape)

    return even


def _padded(count: int, threads: int, tasks: Callable[[int, int], int]) -> int:
    """The least size of at least ``count`` elements that leaves every thread whole vectors only."""
    while True:
        unit = _STRIDE * tasks(count, threads)
        if count % unit == 0:
            return count
        count += -count % unit


def _tasks(count: int, threads: int) -> int:
    return max(1, min(threads, -(-count // _GRAIN)))


def _gelu_tasks(count: int, threads: int) -> int:
    return threads if count > _GELU_SERIAL else 1


def _without_inplace(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    invariant = elementwise(function)

    @functools.wraps(function)
    def call(input: torch.Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> torch.Tensor:
        result = invariant(input, *args, **kwargs)
        return input.copy_(result) if inplace else result

    return call


def _rsqrt(input: torch.Tensor) -> torch.Tensor:
    """float32 is rounded right in both forms; it is that of every norm, and would pay for nothing."""
    return _even_rsqrt(input) if input.dtype in _REDUCED else torch.rsqrt(input)


_even_rsqrt = elementwise(torch.rsqrt)
_aten, _nn = torch.ops.aten, torch._C._nn
#: Elementwise functions: the builtin, its other names in Python, and its name in a traced graph.
_ELEMENTWISE: tuple[tuple[Any, tuple[Any, ...], Any], ...] = (
    (_nn.silu, (), _aten.silu.default),
    (_nn.gelu, (), _aten.gelu.default),
    (_nn.softplus, (), _aten.softplus.default),
    (_nn.elu, (), _aten.elu.default),
    (_nn.mish, (), _aten.mish.default),
    (functional.logsigmoid, (), _aten.log_sigmoid.default),
    (torch.sigmoid, (torch.Tensor.sigmoid,), _aten.sigmoid.default),
    (torch.exp2, (torch.Tensor.exp2,), _aten.exp2.default),
)
#: What :class:`InvariantMode` calls instead of each function.
REPLACEMENTS: Mapping[Any, Callable[..., torch.Tensor]] = {
    **{name: elementwise(builtin) for builtin, names, _ in _ELEMENTWISE for name in (builtin, *names)},
    **{function: _without_inplace(function) for function in (functional.silu, functional.elu, functional.mish)},
    torch.rsqrt: _rsqrt,
    torch.Tensor.rsqrt: _rsqrt,
    _nn.linear: linear,
    torch.addmm: addmm,
}


def overloads(dtype: torch.dtype) -> dict[Any, Callable[..., torch.Tensor]]:
    """The same for the operations of a traced graph of a model in ``dtype``."""
    found: dict[Any, Callable[..., torch.Tensor]] = {
        overload: elementwise(builtin) for builtin, _, overload in _ELEMENTWISE
    }
    products: dict[Any, Callable[..., torch.Tensor]] = {
        _aten.linear.default: linear,
        _aten.addmm.default: addmm,
        _aten.rsqrt.default: _rsqrt,
    }
    return found | products if dtype in _REDUCED else found


class InvariantMode(TorchFunctionMode):
    """While entered, the functions above are called in their invariant forms by whatever code calls them."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for each of its functions."""
        return REPLACEMENTS.get(function, function)(*args, **(kwargs or {}))
