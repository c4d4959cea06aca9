"""Rewriting of a traced graph: first what keeps every bit, then patterns replaced by fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
#: Fusions by name; each returns how often it applied.
FUSIONS: dict[str, Callable[..., int]] = {}


def value(node: fx.Node) -> Any:
    """The fake tensor or symbolic number that the trace saw."""
    return node.meta.get("val")


def is_op(node: Any, *overloads: Any) -> bool:
    """True for a node that calls one of the overloads."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in overloads


def is_mutable(node: fx.Node) -> bool:
    """True for an operation that writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def simplify(graph: fx.Graph) -> None:
    """Drops what computes nothing and computes the same thing once; every bit stays."""
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        source = _unchanged(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    if not any(is_mutable(node) for node in graph.nodes):  # else equal operations may see different values
        _merge_equal(graph)
    graph.eliminate_dead_code()


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The argument that the node hands on as it is, None for a node that does something."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    before, after = value(source), value(node)
    if is_op(node, aten.alias.default, aten.detach.default, aten.lift_fresh.default):
        return source
    if is_op(node, aten.dropout.default):
        return None if node.args[2] else source
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    same_type = before.dtype == after.dtype and before.device == after.device
    if is_op(node, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default):
        copies = node.kwargs.get("copy") or any(argument is True for argument in node.args)
        return source if same_type and before.layout == after.layout and not copies else None
    if is_op(node, aten.mul.Tensor, aten.div.Tensor) and same_type and node.args[1] == 1.0:
        return source if isinstance(node.args[1], float) else None
    return None


def _merge_equal(graph: fx.Graph) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        key = repr((node.target, node.args, sorted(node.kwargs.items())))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
