"""What is done to every traced graph: less of it, in fewer forms, with the same bits."""

from __future__ import annotations

import operator
import sys
from typing import Any, TypeAlias

import torch
from torch import fx

aten = torch.ops.aten
#: An ``fx.Node``, whose own annotations make every argument a union of all that an argument may be.
Node: TypeAlias = Any


def value(node: Node) -> Any:
    """The fake tensor or symbolic number that the trace saw."""
    return node.meta.get("val")


def is_op(node: Any, *overloads: Any) -> bool:
    """True for a node that calls one of the overloads."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in overloads


def simplify(graph: fx.Graph) -> None:
    """Drops what computes nothing, computes the same thing once, and cuts columns in one way; every bit stays."""
    graph.eliminate_dead_code()
    _gather_weights(graph)
    for node in list(graph.nodes):
        source = _unchanged(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif (columns := _columns(node)) is not None:
            _replace_by_narrow(graph, node, *columns)
    _merge_equal(graph)
    graph.eliminate_dead_code()


def _gather_weights(graph: fx.Graph) -> None:
    """Moves the weights to the front, each once, so that every operation may use any."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    seen: dict[Any, Node] = {}
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        earlier = seen.setdefault(node.target, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
        elif node is not first:
            first.prepend(node)


def mutated(graph: fx.Graph) -> set[Node]:
    """The nodes whose memory is written to after they were computed, by themselves or through a view."""
    owner: dict[Node, Node] = {}  # of a view the tensor whose memory it shows
    written: set[Node] = set()
    for node in graph.nodes:
        owner[node] = node
        if node.target in (operator.getitem, torch.narrow):
            owner[node] = owner[node.args[0]]
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, declared in zip(node.args, node.target._schema.arguments, strict=False):
            if declared.alias_info is not None and isinstance(argument, fx.Node):
                owner[node] = owner[argument]
                if declared.alias_info.is_write:
                    written.add(owner[argument])
    return {node for node in graph.nodes if owner[node] in written}


def _unchanged(node: Node) -> Node | None:
    """The argument that the node hands on as it is, None for a node that does something."""
    if is_op(node, aten.cat.default):
        pieces = [piece for piece in node.args[0] if piece.meta.get("ragged") or value(piece).shape[-1:] != (0,)]
        return pieces[0] if len(pieces) == 1 and value(pieces[0]).dtype == value(node).dtype else None
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    before, after = value(source), value(node)
    if is_op(node, aten.alias.default, aten.detach.default, aten.lift_fresh.default):
        return source
    if is_op(node, aten.dropout.default):
        return None if node.args[2] else source
    if is_op(node, aten.slice.Tensor) and len(node.args) == 4 and node.args[2] == 0:
        last = node.args[1] in (-1, before.dim() - 1) and not (source.meta.get("ragged") or node.meta.get("ragged"))
        return source if node.args[3] == sys.maxsize or (last and before.shape[-1] == after.shape[-1]) else None
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    same_type = before.dtype == after.dtype and before.device == after.device and before.layout == after.layout
    if is_op(node, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten.type_as.default):
        copies = node.kwargs.get("copy") or any(argument is True for argument in node.args)
        return source if same_type and not copies else None
    if is_op(node, aten.mul.Tensor, aten.div.Tensor) and same_type and isinstance(node.args[1], float):
        return source if node.args[1] == 1.0 else None
    return None


def _columns(node: Node) -> tuple[Node, int, int] | None:
    """Tensor, first column and number of columns, for a piece of the last dimension of known size."""
    whole: Node = node.args[0] if node.args else None
    if node.target is operator.getitem and is_op(whole, aten.chunk.default, aten.split.Tensor):
        source, dimension = whole.args[0], whole.args[2] if len(whole.args) > 2 else 0
        pieces = value(whole)
        start, length = sum(piece.shape[-1] for piece in pieces[: node.args[1]]), pieces[node.args[1]].shape[-1]
    elif is_op(node, aten.slice.Tensor) and len(node.args) == 4:
        source, dimension, start = node.args[:3]
        length = value(node).shape[-1]
    else:
        return None
    if dimension not in (-1, value(source).dim() - 1) or type(start) is not int:
        return None
    if source.meta.get("ragged") or node.meta.get("ragged"):
        return None
    return (source, start, length) if start >= 0 else None


def _replace_by_narrow(graph: fx.Graph, node: Node, source: Node, start: int, length: int) -> None:
    with graph.inserting_before(node):
        piece = graph.call_function(torch.narrow, (source, -1, start, length))
    piece.meta["val"] = value(node)
    node.replace_all_uses_with(piece)
    graph.erase_node(node)


def _merge_equal(graph: fx.Graph) -> None:
    changing = mutated(graph)
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node in changing or changing.intersection(node.all_input_nodes):
            continue
        if isinstance(node.target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:
                continue
        elif node.target is not torch.narrow:
            continue
        first = seen.setdefault(repr((node.target, node.args, sorted(node.kwargs.items()))), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
