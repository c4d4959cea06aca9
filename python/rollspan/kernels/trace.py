"""A function traced twice, with inputs of different sizes: what the traces share is code that holds for any sizes.

Tracing with symbolic sizes says the same, but loads a quarter of torch's compiler for it (a second of start-up), and
finds out about a branch only where it is taken on a size alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rollspan.kernels.passes import Node, value
from rollspan.kernels.recording import Recording

#: Two sizes of each of two dimensions: far apart, so that code which treats small and large inputs in different ways
#: shows (one row is what decoding a single sequence has); their distances have no common factor, so that what was
#: computed from a size is recognised.
SIZES = ((1, 65_538), (2, 32_773))


class Trace:
    """A graph that holds for any sizes.

    Attributes:
        graph: the operations; sizes of the inputs are computed in it where they are needed.
        attributes: what its ``get_attr`` nodes name.
    """

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Callable[[Sequence[int]], Sequence[Any]]) -> None:
        """Traces the function for both sizes.

        Args:
            function: of tensors; parameters and buffers that it uses are referred to as objects.
            inputs: tensors for the sizes of the two dimensions; the last dimension of the first tensor is the first of
                them, the last dimension of the last tensor the other.

        Raises:
            ValueError: the two traces are not of one piece of code.
        """
        small, large = (Recording(function, inputs([sizes[i] for sizes in SIZES])) for i in range(2))
        self.graph = large.graph
        self.attributes: dict[str, Any] = {}
        self._placeholders = [node for node in large.graph.nodes if node.op == "placeholder"]
        self._sizes: dict[int, Node] = {}
        self._twins: dict[Node, Node] = {}
        before, after = list(small.graph.nodes), list(large.graph.nodes)
        if len(before) != len(after):
            raise ValueError("its code runs through other operations when there are more rows")
        for one, other in zip(before, after, strict=True):
            self._twins[one] = other
            if one.op == other.op == "get_attr":
                name = str(other.target)
                self.attributes[name] = large.attributes[name]
                if small.attributes[str(one.target)] is not self.attributes[name]:
                    self._compare_constants(small.attributes[str(one.target)], self.attributes[name])
                continue
            if one.op != other.op or (one.target != other.target and one.op == "call_function"):
                raise ValueError(f"its code calls {other.target} instead of {one.target} when there are more rows")
            other.args = self._merge(one.args, other.args)
            other.kwargs = self._merge(one.kwargs, other.kwargs)
            other.meta["ragged"] = self._is_ragged(one, other)

    @staticmethod
    def _compare_constants(one: torch.Tensor, other: torch.Tensor) -> None:
        """Tensors that the function makes of numbers come out anew in each trace."""
        if one.shape != other.shape or one.dtype != other.dtype or not torch.equal(one, other):
            raise ValueError("its code has a constant that depends on the number of rows")

    @staticmethod
    def _is_ragged(one: Node, other: Node) -> bool:
        """Whether the number of columns depends on the sizes."""
        small, large = value(one), value(other)
        if not isinstance(small, torch.Tensor) or not isinstance(large, torch.Tensor):
            return False
        return list(small.shape[-1:]) != list(large.shape[-1:])

    def _merge(self, one: Any, other: Any) -> Any:
        """The argument that is ``one`` for the small sizes and ``other`` for the large ones."""
        if isinstance(other, fx.Node) and self._twins.get(one) is other:
            return other
        if isinstance(other, (tuple, list)) and type(one) is type(other) and len(one) == len(other):
            return type(other)(self._merge(a, b) for a, b in zip(one, other, strict=True))
        if isinstance(other, dict) and isinstance(one, dict) and one.keys() == other.keys():
            return {key: self._merge(one[key], other[key]) for key in other}
        if type(one) is int and type(other) is int and one != other:
            return self._size(one, other)
        if isinstance(other, fx.Node) or type(one) is not type(other) or one != other:
            raise ValueError(f"its code has {one} where it has {other} when there are more rows")
        return other

    def _size(self, one: int, other: int) -> Node:
        """A node with a multiple of a size, or a size and something."""
        for dimension, (small, large) in enumerate(SIZES):
            factor, rest = divmod(other - one, large - small)
            if rest != 0 or factor < 1:
                continue
            size = self._input_size(dimension)
            offset = one - factor * small
            if offset == 0:
                return size if factor == 1 else self._compute(operator.mul, size, factor)
            if factor == 1:
                return self._compute(operator.add, size, offset)
        raise ValueError(f"its code has {one} for some number of rows and {other} for more")

    def _input_size(self, dimension: int) -> Node:
        if dimension not in self._sizes:
            source = self._placeholders[0 if dimension == 0 else -1]
            with self.graph.inserting_after(self._placeholders[-1]):
                size = self.graph.call_function(torch.ops.aten.sym_size.int, (source, value(source).dim() - 1))
            size.meta["val"] = SIZES[dimension][1]
            self._sizes[dimension] = size
        return self._sizes[dimension]

    def _compute(self, function: Callable[[int, int], int], size: Node, number: int) -> Node:
        with self.graph.inserting_after(size):
            result = self.graph.call_function(function, (size, number))
        result.meta["val"] = function(value(size), number)
        return result
