"""From a traced graph to a flat Python function: one line per operation, each through the cheapest callable."""

from __future__ import annotations

import itertools
import linecache
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

#: aten operators whose Python builtin takes the same positional arguments: a builtin costs a third of an OpOverload.
_BUILTINS = {
    *("aten::add.Tensor", "aten::addmm", "aten::cat", "aten::chunk", "aten::clamp", "aten::cos", "aten::cumsum"),
    *("aten::div.Tensor", "aten::embedding", "aten::flatten.using_ints", "aten::index_select", "aten::layer_norm"),
    *("aten::matmul", "aten::mean.dim", "aten::mm", "aten::mul.Tensor", "aten::neg", "aten::pow.Tensor_Scalar"),
    *("aten::relu", "aten::repeat_interleave.self_int", "aten::rsqrt", "aten::select.int", "aten::sigmoid"),
    *("aten::sin", "aten::softmax.int", "aten::split.Tensor", "aten::sqrt", "aten::stack", "aten::sub.Tensor"),
    *("aten::tanh", "aten::transpose.int", "aten::unsqueeze"),
}
_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::linear": torch._C._nn.linear,
    "aten::silu": torch._C._nn.silu,
    "aten::gelu": torch._C._nn.gelu,
    "aten::reshape": torch.Tensor.reshape,
    "aten::sym_size.int": torch.Tensor.size,
    "aten::to.device": torch.Tensor.to,
    "aten::to.dtype": torch.Tensor.to,
    "aten::type_as": torch.Tensor.type_as,
    "aten::view": torch.Tensor.view,
}
_numbers = itertools.count()


def cheapest(target: Callable[..., Any]) -> Callable[..., Any]:
    """What to call for ``target``: a builtin or method of the same arguments where one is known, else itself."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    name = target.name()
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name in _BUILTINS:
        return getattr(torch, name.removeprefix("aten::").split(".")[0])  # type: ignore[no-any-return]
    return target


class Program:
    """A graph as generated Python.

    Args:
        graph: operations in order; ``get_attr`` nodes name entries of ``attributes``.
        attributes: parameters and buffers, bound as objects: swapping their ``.data`` is seen by the next call.

    Attributes:
        forward: the function; its arguments are the placeholders in order.
        namespace: its globals; entries may be replaced between calls.
        source: its text.
    """

    def __init__(self, graph: fx.Graph, attributes: Mapping[str, Any]) -> None:
        self.namespace: dict[str, Any] = {"inf": math.inf, "nan": math.nan}
        self._names: dict[int, str] = {}
        self._attributes = attributes
        self.source = self._emit(graph)
        filename = f"<rollspan graph {next(_numbers)}>"
        # Tracebacks and profilers show the generated lines.
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        exec(compile(self.source, filename, "exec"), self.namespace)
        self.forward: Callable[..., Any] = self.namespace["forward"]

    def bind(self, value: Any, hint: str) -> str:
        """The global name that holds ``value``."""
        if id(value) not in self._names:
            # The namespace keeps the value alive, so that its id stays its own.
            name = f"{hint}_{len(self._names)}"
            self._names[id(value)] = name
            self.namespace[name] = value
        return self._names[id(value)]

    def _emit(self, graph: fx.Graph) -> str:
        nodes = list(graph.nodes)
        last_use: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            for argument in node.all_input_nodes:
                last_use[argument] = node
        # A register is reused as soon as its value is dead, which frees the value without a statement of its own.
        registers: dict[fx.Node, str] = {}
        free: list[str] = []
        count = 0
        parameters: list[str] = []
        lines: list[str] = []
        for node in nodes:
            if node.op == "placeholder":
                registers[node] = f"a{len(parameters)}"
                parameters.append(registers[node])
            elif node.op == "get_attr":
                registers[node] = self.bind(self._attributes[str(node.target)], "weight")
            elif node.op == "output":
                lines.append(f"    return {self._render(node.args[0], registers)}")
            else:
                line = self._call(node, registers)
                free.extend(
                    registers[argument]
                    for argument in dict.fromkeys(node.all_input_nodes)
                    if last_use[argument] is node and argument.op != "get_attr"
                )
                if not free:
                    free.append(f"v{count}")
                    count += 1
                registers[node] = free.pop()
                lines.append(f"    {registers[node]} = {line}")
                if node not in last_use:
                    free.append(registers[node])
        return "\n".join((f"def forward({', '.join(parameters)}):", *lines)) + "\n"

    def _call(self, node: fx.Node, registers: Mapping[fx.Node, str]) -> str:
        target = node.target
        if node.op != "call_function" or not callable(target):
            raise ValueError(f"cannot generate code for {node.op} of {target}")
        function = self.bind(cheapest(target), getattr(target, "__name__", "call").split(".")[0])
        arguments = [self._render(argument, registers) for argument in node.args]
        arguments += [f"{name}={self._render(value, registers)}" for name, value in node.kwargs.items()]
        return f"{function}({', '.join(arguments)})"

    def _render(self, value: Any, registers: Mapping[fx.Node, str]) -> str:
        if isinstance(value, fx.Node):
            return registers[value]
        if isinstance(value, list):
            return f"[{', '.join(self._render(item, registers) for item in value)}]"
        if isinstance(value, tuple):
            return f"({''.join(self._render(item, registers) + ', ' for item in value)})"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        return self.bind(value, "constant")
