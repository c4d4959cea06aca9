"""Recording: what a function calls, with sizes and dtypes as they are when it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from rollspan.kernels.program import Program
from rollspan.kernels.recording import Recording

_generator = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(8, 8, generator=_generator)
FACTOR = torch.tensor([2.0, 3.0])


def layers(x: Tensor) -> Tensor:
    """Operations that repeat with the same sizes, with other ones, with other numbers and with views."""
    indices = torch.arange(x.shape[0])
    for scale in (1, 2, 2):
        x = functional.silu(functional.linear(x, WEIGHT)) * scale + x
        x = x[indices.flip(0)]
        first, second = x.split(4, dim=-1)
        x = torch.cat((second, first), -1)
        inverse = torch.empty_like(indices)
        inverse[indices] = torch.arange(len(indices))
        x = x[inverse].t().contiguous().t().to(torch.float32)
    values, order = x.topk(3, dim=-1)
    return torch.zeros(x.shape).scatter(1, order, values).double()


def test_values_look_as_they_do_when_the_graph_runs() -> None:
    class Compared(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and n.op != "output":
                value = n.meta["val"]
                looks = result.shape, result.stride(), result.dtype
                assert (value.shape, value.stride(), value.dtype) == looks, n.format_node()
            return result

    x = torch.randn(5, 8, generator=_generator)
    recording = Recording(layers, [x])
    found = Compared(torch.nn.ParameterDict(recording.attributes), graph=recording.graph).run(x)  # type: ignore[arg-type]
    assert torch.equal(found, layers(x))


def test_a_tensor_of_the_functions_own_is_one_attribute_however_often_it_is_used() -> None:
    recording = Recording(layers, [torch.empty(5, 8)])
    assert [tensor is WEIGHT for tensor in recording.attributes.values()] == [True]


def test_a_number_read_from_a_weight_is_read_anew_in_each_call() -> None:
    factor = FACTOR.clone()

    def scaled(x: Tensor) -> Tensor:
        return x * (factor[1].item() + 1.0)

    recording = Recording(scaled, [torch.empty(3)])
    program = Program(recording.graph, recording.attributes)
    for _ in range(2):
        assert torch.equal(program.forward(torch.ones(3)), factor[1].expand(3) + 1.0)
        factor += 1.0


def test_a_number_of_a_tensor_made_of_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="reads a number from a tensor"):
        Recording(lambda x: x * torch.tensor(2.0).item(), [torch.empty(3)])


def test_a_branch_on_contents_is_refused() -> None:
    with pytest.raises(RuntimeError):
        Recording(lambda x: x if x.sum() > 0 else -x, [torch.empty(3)])


def test_autocast_is_refused() -> None:
    def narrower(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return functional.linear(x, WEIGHT)

    with pytest.raises(ValueError, match="under autocast"):
        Recording(narrower, [torch.empty(5, 8)])
