"""Row-invariant operations: a row's bits do not depend on how many rows there are, nor on the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from rollspan.kernels.invariant import InvariantMode, cancelling, overloads

ROWS = (1, 7, 33, 100, 333)
THREADS = (1, 3)

ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "silu module": torch.nn.SiLU(),
    "gelu": functional.gelu,
    "gelu tanh": torch.nn.GELU(approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "sigmoid method": lambda x: x.sigmoid(),
    "softplus": functional.softplus,
    "elu": functional.elu,
    "mish": functional.mish,
    "logsigmoid": functional.logsigmoid,
    "exp2": torch.exp2,
    "rsqrt": lambda x: x.abs().rsqrt(),
}


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_rows(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    with torch.no_grad(), InvariantMode():
        torch.set_num_threads(1)
        whole = function(rows)
        for threads in THREADS:
            torch.set_num_threads(threads)
            for count in ROWS:
                for start in (0, 1):
                    part = function(rows[start : start + count])
                    assert torch.equal(part, whole[start : start + count]), (threads, start, count)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 513])
def test_elementwise_functions(name: str, dtype: torch.dtype, width: int) -> None:
    check_rows(ELEMENTWISE[name], numbers(400, width).to(dtype))


@pytest.mark.parametrize("width", [64, 896])
def test_whole_vectors_have_the_bits_of_torch(width: int) -> None:
    torch.set_num_threads(1)
    rows = numbers(33, width)
    plain = [functional.silu(rows), functional.gelu(rows), torch.sigmoid(rows)]
    with InvariantMode():
        invariant = [functional.silu(rows), functional.gelu(rows), torch.sigmoid(rows)]
    assert all(torch.equal(*pair) for pair in zip(plain, invariant, strict=True))


@pytest.mark.parametrize("shape", [(64, 16), (128, 896), (257, 513)])
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_products(shape: tuple[int, int], bias: bool) -> None:
    columns, inner = shape
    rows, weight = cancelling(400, columns, inner, torch.bfloat16)
    offset = numbers(columns).bfloat16() if bias else None
    check_rows(lambda x: functional.linear(x, weight, offset), rows)
    if offset is not None:
        turned = weight.t().contiguous()
        check_rows(lambda x: torch.addmm(offset, x, turned), rows)


def test_products_are_those_of_torch_but_for_rounding() -> None:
    rows, weight, bias = (numbers(*shape, seed=i).bfloat16() for i, shape in enumerate([(2, 5, 48), (24, 48), (24,)]))
    with InvariantMode():
        found = functional.linear(rows, weight, bias)
    torch.testing.assert_close(found, functional.linear(rows, weight, bias), atol=0.5, rtol=2e-2)


def test_gradients_go_through() -> None:
    rows = numbers(5, 40).bfloat16().requires_grad_()
    weight = numbers(24, 40, seed=1).bfloat16().requires_grad_()
    with InvariantMode():
        functional.silu(functional.linear(rows, weight)).float().sum().backward()
    found = (rows.grad, weight.grad)
    rows.grad = weight.grad = None
    functional.silu(functional.linear(rows, weight)).float().sum().backward()
    for mine, theirs in zip(found, (rows.grad, weight.grad), strict=True):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, atol=0.5, rtol=5e-2)


def test_inplace_activations_still_write_to_their_argument() -> None:
    rows = numbers(3, 7)
    expected = functional.silu(rows)
    with InvariantMode():
        result = functional.silu(rows, inplace=True)
    assert result is rows
    torch.testing.assert_close(rows, expected)


def test_operations_of_a_traced_graph_have_the_same_bits_as_the_mode() -> None:
    rows = numbers(3, 7).bfloat16()
    weight = numbers(5, 7).bfloat16()
    replaced = overloads(torch.bfloat16)
    with InvariantMode():
        expected = functional.silu(rows), functional.linear(rows, weight)
    aten = torch.ops.aten
    found = replaced[aten.silu.default](rows), replaced[aten.linear.default](rows, weight, None)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert aten.linear.default not in overloads(torch.float32)
