"""Sparse updates: what they make of a parameter, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.transfers import every_dtype, raises, same
from rollspan.weights.transfer.delta import apply_deltas


def pair(name: str, indices: Any, values: Any, dtype: torch.dtype = torch.int32) -> list[tuple[str, torch.Tensor]]:
    return [(f"{name}.indices", torch.tensor(indices, dtype=dtype)), (f"{name}.values", torch.tensor(values))]


CURRENT = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}


def test_values_replace_elements_counted_row_by_row_and_the_parameter_stays() -> None:
    before = {name: tensor.clone() for name, tensor in CURRENT.items()}
    received = dict(apply_deltas(pair("a", [4, 0], [40.0, -1.0]) + pair("b", [3], [1.0], torch.int64), CURRENT))
    expected = {
        "a": torch.tensor([[-1.0, 1, 2], [3, 40, 5]]),
        "b": torch.tensor([0.0, 0, 0, 1], dtype=torch.bfloat16),
    }
    assert same(received, expected)
    assert same(CURRENT, before)


@pytest.mark.parametrize("name", [name for name, tensor in every_dtype().items() if tensor.numel()])
def test_every_dtype_is_replaced_to_the_bit(name: str) -> None:
    old = every_dtype()[name]
    new = old.flip(0).contiguous()
    changed = torch.arange(old.numel(), dtype=torch.int32)[::2].contiguous()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[old.dtype.itemsize]
    values = new.reshape(-1).view(bits)[changed.long()].view(old.dtype)
    (received,) = apply_deltas([(f"{name}.values", values), (f"{name}.indices", changed)], {name: old})
    flat = received[1].reshape(-1).view(bits)
    assert torch.equal(flat[::2], new.reshape(-1).view(bits)[::2])
    assert torch.equal(flat[1::2], old.reshape(-1).view(bits)[1::2])
    assert received[1].shape == old.shape


@given(data=st.data())
def test_a_difference_of_two_tensors_makes_one_of_the_other(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    elements = st.integers(0, 3)
    count = torch.Size(shape).numel()
    old, new = (
        torch.tensor(data.draw(st.lists(elements, min_size=count, max_size=count))).reshape(shape) for _ in range(2)
    )
    changed = (old != new).reshape(-1).nonzero().reshape(-1)
    order = data.draw(st.permutations(range(len(changed))))
    changed = changed[torch.tensor(order, dtype=torch.int64)]
    stream = [("x.indices", changed), ("x.values", new.reshape(-1)[changed])]
    received = dict(apply_deltas(data.draw(st.permutations(stream)), {"x": old}))
    assert torch.equal(received.get("x", old), new)


def test_a_parameter_that_is_not_contiguous_is_counted_row_by_row_too() -> None:
    current = torch.arange(6.0).reshape(2, 3).t()
    ((_, received),) = apply_deltas(pair("a", [1], [30.0]), {"a": current})
    assert received.tolist() == [[0.0, 30.0], [1.0, 4.0], [2.0, 5.0]]
    assert received.is_contiguous()


def test_floating_point_values_convert_to_the_parameters_dtype() -> None:
    ((_, received),) = apply_deltas(pair("b", [0], [1.001]), CURRENT)
    assert received.dtype == torch.bfloat16
    assert received[0] == torch.tensor(1.001).to(torch.bfloat16)


def test_a_pair_without_elements_changes_nothing() -> None:
    assert list(apply_deltas(pair("a", [], []), CURRENT)) == []


A = "a.indices"


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (pair("a", [0, 0], [1.0, 2.0]), "a.indices holds an index more than once"),
        (pair("a", [5, 0, 5], [1.0, 2.0, 3.0]), "a.indices holds an index more than once"),
        (pair("a", [6], [1.0]), "a.indices holds 6, the parameter has 6 elements"),
        (pair("a", [-1], [1.0]), "a.indices holds -1, the parameter has 6 elements"),
        (pair("a", [[0]], [[1.0]]), "must be flat and int32 or int64, got torch.int32 and the shape [1, 1]"),
        (pair("a", [0], [1.0], torch.float32), "must be flat and int32 or int64, got torch.float32"),
        (pair("a", [0], [1.0], torch.uint8), "must be flat and int32 or int64, got torch.uint8"),
        (pair("a", [0], [1.0, 2.0]), "a.values has shape [2], its indices [1]"),
        (pair("a", [0], [1]), "a.values has dtype torch.int64, the model needs torch.float32"),
        (pair("c", [0], [1.0]), "'c.indices' changes none of the model's parameters"),
        ([("a", torch.ones(1))], "'a' of a delta ends in neither .indices nor .values"),
        (pair("a", [0], [1.0])[:1], "'a.indices' came without its other half (1 such in all)"),
        (pair("a", [0], [1.0])[1:], "'a.values' came without its other half"),
    ],
    ids=range(13),
)
def test_a_delta_that_is_wrong_is_refused(stream: list[tuple[str, torch.Tensor]], message: str) -> None:
    with raises("weights_invalid", "update_info", message):
        list(apply_deltas(stream, CURRENT))
