"""Forwards that look like what the graph passes know, and are not: they are computed right, or not captured at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rollspan.kernels import fusions, native, passes
from rollspan.kernels.linear import PackedLinear
from rollspan.kernels.program import Program
from rollspan.kernels.trace import Trace

_generator = torch.Generator().manual_seed(0)
EMBEDDING = torch.randn(100, 8, generator=_generator)
WIDE = torch.randn(8, 100_000, generator=_generator)
QUERY, KEY = torch.randn(64, 8, generator=_generator), torch.randn(64, 8, generator=_generator)
FREQUENCIES = torch.randn(32, generator=_generator)
WEIGHT = torch.randn(8, generator=_generator).bfloat16()

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    rows, sampled = sizes
    return tuple(torch.empty(shape, dtype=torch.int64) for shape in ((1, rows), (1, rows), (sampled,)))  # type: ignore[return-value]


def columns_up_to_the_number_of_rows(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    return (EMBEDDING[ids] + WIDE[:, : ids.shape[1]].sum(-1))[0, rows]


def padding_to_a_multiple(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    hidden = EMBEDDING[ids]
    return (hidden + functional.pad(hidden, (0, 0, 0, -ids.shape[1] % 8)).mean(1, keepdim=True))[0, rows]


def a_norm_whose_factor_is_rounded(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    hidden = EMBEDDING.bfloat16()[ids]
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return ((1.0 + WEIGHT) * wide).type_as(hidden)[0, rows]


def _rotated(ids: Tensor, cos: Tensor, sin: Tensor, rows: Tensor) -> Tensor:
    hidden = EMBEDDING[ids]
    query, key = (
        functional.linear(hidden, weight).view(1, ids.shape[1], 2, 32).transpose(1, 2) for weight in (QUERY, KEY)
    )

    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 16:], x[..., :16]), -1)

    query, key = query * cos + turned(query) * sin, key * cos + turned(key) * sin
    return torch.cat((query, key), 1).sum((1, 3))[0, rows]


def a_rotation_by_transposed_angles(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    angles = (FREQUENCIES[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
    return _rotated(ids, angles.cos().unsqueeze(1), angles.sin().unsqueeze(1), rows)


def a_rotation_by_one_angle_for_all_rows(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    shape = (1, 1, ids.shape[1], 32)
    cos, sin = (angle.view(1, 1, 1, 32).expand(shape) for angle in (FREQUENCIES.cos(), FREQUENCIES.sin()))
    return _rotated(ids, cos, sin, rows)


@pytest.mark.parametrize(
    "forward",
    [
        columns_up_to_the_number_of_rows,
        a_norm_whose_factor_is_rounded,
        a_rotation_by_transposed_angles,
        a_rotation_by_one_angle_for_all_rows,
    ],
)
def test_what_resembles_a_pattern_is_computed_as_it_is_written(forward: Forward) -> None:
    trace = Trace(forward, inputs)
    passes.simplify(trace.graph)
    fusions.fuse_rotations(trace.graph)
    fusions.fuse_norms(trace.graph)
    program = Program(trace.graph, trace.attributes)
    for count in (1, 2, 5, 40):
        ids, positions = torch.arange(count)[None] % 100, torch.arange(count)[None]
        rows = torch.tensor([0, count - 1])
        with torch.inference_mode():
            torch.testing.assert_close(program.forward(ids, positions, rows), forward(ids, positions, rows))


def test_what_depends_on_the_number_of_rows_modulo_a_power_of_two_is_not_captured() -> None:
    with pytest.raises(ValueError, match="number of rows"):
        Trace(padding_to_a_multiple, inputs)


def test_a_step_without_rows_to_sample_passes_the_last_layer_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.available():
        monkeypatch.setattr(native.module(), "linear_rows", lambda: 0)  # a CPU without bfloat16 products
    layer = PackedLinear([torch.randn(64, 32).bfloat16()], [None])
    assert layer(torch.randn(1, 0, 32).bfloat16()).shape == (1, 0, 64)
