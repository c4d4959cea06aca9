"""The fused kernels against their torch forms, for every type, row length and layout."""

from __future__ import annotations

import pytest
import torch

from rollspan.kernels import fused, linear
from rollspan.kernels.fused import Activation, Scaling

pytestmark = pytest.mark.skipif(not fused.supported(torch.float32), reason="without the extension module")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: One unit in the last place, twice: a float32 sum in another order may round the other way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
packed = pytest.mark.skipif(not linear.packs(torch.bfloat16), reason="this CPU multiplies no packed bfloat16")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 16, 100, 128, 517])
@pytest.mark.parametrize("scaling", list(Scaling))
def test_norms(dtype: torch.dtype, columns: int, scaling: Scaling) -> None:
    x, y = random(1, 5, columns, dtype=dtype), random(1, 5, columns, dtype=dtype, seed=1)
    weight = random(columns, dtype=dtype, seed=2)
    expected = fused.rms_norm_torch(x, weight, 1e-6, scaling)
    norm = fused.rms_norm(dtype, 1e-6, scaling)
    assert_close(norm(x, weight), expected)
    apart = random(5, columns * 2, dtype=dtype)[:, :columns]
    assert torch.equal(norm(apart, weight), norm(apart.contiguous(), weight))
    total, normed = fused.add_rms_norm(dtype, 1e-6, scaling)(x, y, weight)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, norm(total, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_norm_are_independent(dtype: torch.dtype) -> None:
    x, weight = random(1, 70, 96, dtype=dtype), random(96, dtype=dtype, seed=1)
    norm = fused.rms_norm(dtype, 1e-6, Scaling.ROUNDED)
    whole = norm(x, weight)
    assert all(torch.equal(norm(x[:, i : i + 1], weight), whole[:, i : i + 1]) for i in range(70))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 20, 32, 64, 80, 128])
@pytest.mark.parametrize("norms", [False, True])
def test_rotations_take_heads_out_of_one_tensor(dtype: torch.dtype, head_dim: int, norms: bool) -> None:
    columns = random(1, 6, 6 * head_dim, dtype=dtype)
    value = columns[..., 5 * head_dim :].clone()
    cos, sin = (random(1, 1, 6, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    weights = [random(head_dim, dtype=dtype, seed=seed) if norms else None for seed in (3, 4)]

    def heads(first: int, last: int) -> torch.Tensor:
        return columns[..., first * head_dim : last * head_dim].view(1, 6, last - first, head_dim).transpose(1, 2)

    expected = []
    for part, weight in zip((heads(0, 3), heads(3, 5)), weights, strict=True):
        plain = part if weight is None else fused.rms_norm_torch(part, weight, 1e-6, Scaling.ROUNDED)
        expected.append(fused.rotary_torch(plain, cos, sin))
    found = fused.rotary(dtype, 1e-6, Scaling.ROUNDED)(heads(0, 3), heads(3, 5), cos, sin, *weights)
    for one, other in zip(found, expected, strict=True):
        if norms:
            assert_close(one, other)
        else:
            assert torch.equal(one, other)
    assert torch.equal(columns[..., 5 * head_dim :], value)


def test_a_rotation_of_heads_that_lie_apart_is_computed_in_torch() -> None:
    query = random(1, 3, 6, 16, dtype=torch.float32).transpose(2, 3).contiguous().transpose(2, 3)
    cos, sin = (random(1, 1, 6, 16, dtype=torch.float32, seed=seed) for seed in (1, 2))
    expected = fused.rotary_torch(query, cos, sin)
    found, _ = fused.rotary(torch.float32, 0.0, Scaling.NONE)(query, query.clone(), cos, sin, None, None)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 16, 100, 517])
@pytest.mark.parametrize("activation", list(Activation))
def test_gates(dtype: torch.dtype, columns: int, activation: Activation) -> None:
    both = random(1, 5, 2 * columns, dtype=dtype) * 4
    gate, up = both[..., :columns], both[..., columns:]
    expected = fused.gated_torch(gate, up, activation)
    apart = fused.gated(dtype, activation)(gate, up)
    assert_close(apart, expected)
    assert torch.equal(fused.gated_halves(dtype, activation)(both), apart)


@pytest.mark.parametrize("activation", list(Activation))
def test_gates_saturate_as_in_torch(activation: Activation) -> None:
    gate = torch.tensor([[-1e4, -100.0, -89.0, -30.0, 0.0, 30.0, 89.0, 1e4, float("inf")]])
    found = fused.gated(torch.float32, activation)(gate, torch.ones_like(gate))
    assert_close(found, fused.gated_torch(gate, torch.ones_like(gate), activation))


def test_no_nan_is_lost() -> None:
    x = random(1, 3, 48, dtype=torch.bfloat16)
    x[0, 1, 40] = float("nan")
    ones = torch.ones(48, dtype=torch.bfloat16)
    normed = fused.rms_norm(torch.bfloat16, 1e-6, Scaling.ROUNDED)(x, ones)
    assert normed.isnan().any(-1).tolist() == [[False, True, False]]
    assert bool(fused.gated(torch.bfloat16, Activation.SILU)(x, x)[0, 1, 40].isnan())


@packed
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 33])
@pytest.mark.parametrize("transposed", [False, True])
def test_packed_linears_give_each_output_once(rows: int, transposed: bool) -> None:
    shapes = [(40, 64), (7, 64)]
    weights = [random(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate(shapes)]
    bias = random(7, dtype=torch.bfloat16, seed=9)
    x = random(1, rows, 64, dtype=torch.bfloat16, seed=5)
    expected = torch.cat([x.float() @ weights[0].float().t(), x.float() @ weights[1].float().t() + bias.float()], -1)
    held = [weight.t().contiguous() for weight in weights] if transposed else weights
    layer = linear.PackedLinear(held, [None, bias], transposed=transposed)
    found = layer(x)
    assert found.shape == (1, rows, 47)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-6)
    assert layer.nbytes == 47 * 64 * 2


@packed
def test_a_packed_linear_takes_rows_that_lie_apart_and_weights_that_do() -> None:
    wide = random(48, 96, dtype=torch.bfloat16)
    layer = linear.PackedLinear([wide[:, :64]], [None])
    x = random(1, 1, 128, dtype=torch.bfloat16)[..., ::2]
    expected = x.float() @ wide[:, :64].float().t()
    torch.testing.assert_close(layer(x).float(), expected, rtol=2**-7, atol=2**-6)
