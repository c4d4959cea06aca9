"""Fusions: patterns of the modelling code of ``transformers`` in a traced graph, replaced by kernels.

Each fusion takes a graph simplified by :func:`rollspan.kernels.passes.simplify` and returns how often it applied. What
does not look exactly like the pattern stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from rollspan.kernels import fused
from rollspan.kernels.fused import Activation, Scaling
from rollspan.kernels.linear import PackedLinear, packs
from rollspan.kernels.passes import Node, is_op, mutated, value

aten = torch.ops.aten


def _only_user(node: Node) -> Node:
    """The node that uses the node, None where there are several or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(node: Node, argument: Node) -> Any:
    """The other argument of a binary operation."""
    first, second = node.args[:2]
    return second if first is argument else first


def _is_weight(node: Any, like: Node) -> bool:
    """A weight vector of the type and the last dimension of ``like``."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    weight, x = value(node), value(like)
    return bool(weight.dtype == x.dtype and weight.dim() == 1 and weight.shape[0] == x.shape[-1])


def _narrow_type(node: Any) -> Any:
    """The node before a conversion to float32, or the node itself."""
    if is_op(node, aten.to.dtype) and node.args[1] == torch.float32 and len(node.args) == 2:
        return node.args[0]
    return node


def _replace(graph: fx.Graph, root: Node, function: Callable[..., Any], arguments: Iterable[Any]) -> Node:
    """Puts ``function(*arguments)`` in the place of ``root``, with the value that the trace saw."""
    with graph.inserting_before(root):
        node = graph.call_function(function, tuple(arguments))
    node.meta["val"] = value(root)
    root.replace_all_uses_with(node)
    return node


class Norm:
    """An RMS norm in the graph.

    Attributes:
        source: what is normalised, before its conversion to float32.
        root: the last node, in the source's type.
        constants: type, epsilon and scaling.
    """

    def __init__(self, source: Node, weight: Node | None, epsilon: float, scaling: Scaling, root: Node):
        self.source, self.weight, self.root = source, weight, root
        self.constants = (value(source).dtype, epsilon, scaling)

    def inside(self) -> set[Node]:
        """The nodes from the source (without it) to the root."""
        found: set[Node] = set()
        pending = [self.root]
        while pending:
            node = pending.pop()
            if node is not self.source and node.op == "call_function" and node not in found:
                found.add(node)
                pending.extend(node.all_input_nodes)
        return found

    @classmethod
    def find(cls, rsqrt: Node) -> Norm | None:
        """The norm around a reciprocal square root, if it is one."""
        add = rsqrt.args[0]
        if not is_op(add, aten.add.Tensor) or not isinstance(add.args[1], float) or add.kwargs:
            return None
        mean = add.args[0]
        if not is_op(mean, aten.mean.dim) or list(mean.args[1:]) != [[-1], True] or mean.kwargs:
            return None
        power = mean.args[0]
        if not is_op(power, aten.pow.Tensor_Scalar) or power.args[1] != 2:
            return None
        wide = power.args[0]
        source, product = _narrow_type(wide), _only_user(rsqrt)
        if not is_op(product, aten.mul.Tensor) or _other(product, rsqrt) is not wide:
            return None
        if value(wide).dtype != torch.float32 or len(product.users) == 0:
            return None
        weight, scaling, root = cls._scale(product, source)
        return cls(source, weight, add.args[1], scaling, root) if value(root).dtype == value(source).dtype else None

    @staticmethod
    def _scale(product: Node, source: Node) -> tuple[Node | None, Scaling, Node]:
        """Weight, its kind and the last node of the norm whose normalised row is ``product``."""

        def rounded(node: Node) -> Node | None:
            if value(node).dtype == value(source).dtype:
                return node
            user = _only_user(node)
            converts = is_op(user, aten.to.dtype, aten.type_as.default)
            return user if converts and value(user).dtype == value(source).dtype else None

        user = _only_user(product)
        if is_op(user, aten.mul.Tensor):
            factor = _other(user, product)
            root = rounded(user)
            if root is not None and _is_weight(_narrow_type(factor), source):
                return _narrow_type(factor), Scaling.WEIGHT, root
            if root is not None and is_op(factor, aten.add.Tensor) and factor.args[1] == 1.0 and not factor.kwargs:
                weight = _narrow_type(factor.args[0])
                if _is_weight(weight, source) and value(factor).dtype == torch.float32:
                    return weight, Scaling.ONE_PLUS, root
        root = rounded(product)
        if root is None:
            return None, Scaling.NONE, product
        user = _only_user(root)
        if is_op(user, aten.mul.Tensor) and _is_weight(_other(user, root), source):
            return _other(user, root), Scaling.ROUNDED, user
        return None, Scaling.NONE, root


def fuse_norms(graph: fx.Graph) -> int:
    """RMS norms, with the addition before one where there is one (the residual)."""
    count = 0
    changing = mutated(graph)
    for node in list(graph.nodes):
        # Looked for one by one: the result of one may be what the next one normalises.
        norm = Norm.find(node) if is_op(node, aten.rsqrt.default) else None
        if norm is None or norm.source in changing:
            continue
        count += 1
        source = norm.source
        if _is_sum(source):
            # In the place of the addition, whose result others may read before the norm.
            with graph.inserting_before(source):
                pair = graph.call_function(
                    fused.add_rms_norm(*norm.constants), (source.args[0], source.args[1], norm.weight)
                )
                total = graph.call_function(operator.getitem, (pair, 0))
                normed = graph.call_function(operator.getitem, (pair, 1))
            total.meta["val"], normed.meta["val"] = value(source), value(norm.root)
            source.replace_all_uses_with(total)
            norm.root.replace_all_uses_with(normed)
        else:
            _replace(graph, norm.root, fused.rms_norm(*norm.constants), (source, norm.weight))
    graph.eliminate_dead_code()
    return count


def _norms(graph: fx.Graph) -> list[Norm]:
    found = (Norm.find(node) for node in graph.nodes if is_op(node, aten.rsqrt.default))
    return [norm for norm in found if norm is not None]


def _is_sum(node: Node) -> bool:
    """An addition of two tensors of the result's shape and type."""
    if not is_op(node, aten.add.Tensor) or node.kwargs:
        return False
    values = [value(argument) if isinstance(argument, fx.Node) else None for argument in node.args]
    result = value(node)
    return all(
        isinstance(each, torch.Tensor) and each.dtype == result.dtype and each.shape == result.shape for each in values
    )


def fuse_gates(graph: fx.Graph) -> int:
    """``silu(gate) * up`` and the same with GELU by tanh."""
    count = 0
    changing = mutated(graph)
    for active in list(graph.nodes):
        product = _only_user(active)
        if is_op(active, aten.silu.default):
            activation = Activation.SILU
        elif is_op(active, aten.gelu.default) and active.kwargs == {"approximate": "tanh"}:
            activation = Activation.GELU_TANH
        else:
            continue
        if not is_op(product, aten.mul.Tensor):
            continue
        gate, up = active.args[0], _other(product, active)
        if not isinstance(up, fx.Node) or up is active or value(up).shape != value(gate).shape:
            continue
        if value(up).dtype != value(gate).dtype or gate in changing or up in changing:
            continue
        count += 1
        dtype = value(gate).dtype
        whole = _halves(gate, up)
        if whole is None:
            _replace(graph, product, fused.gated(dtype, activation), (gate, up))
        else:
            _replace(graph, product, fused.gated_halves(dtype, activation), (whole,))
    graph.eliminate_dead_code()
    return count


def _halves(gate: Node, up: Node) -> Node | None:
    """The tensor whose two halves these are."""
    if gate.target is not torch.narrow or up.target is not torch.narrow or gate.args[0] is not up.args[0]:
        return None
    whole = gate.args[0]
    columns = value(whole).shape[-1]
    half = columns // 2
    pieces = (gate.args[2:], up.args[2:])
    return whole if pieces == ((0, half), (half, half)) and columns == 2 * half else None


class Rotation:
    """The rotary embedding of queries or keys in the graph.

    Attributes:
        root: the sum that is the result.
        heads: what is rotated, ``[1, H, T, D]``.
        cos: ``[1, 1, T, D]``; sin likewise.
        norm: the norm of each head before, None for none.
        plain: the heads before the norm, not transposed where the norm comes before the transposition.
    """

    def __init__(self, root: Node, heads: Node, cos: Node, sin: Node, norms: dict[Node, Norm]) -> None:
        self.root, self.heads, self.cos, self.sin = root, heads, cos, sin
        moved = heads.args[0] if _is_transposition(heads) else heads
        norm = norms.get(heads) or norms.get(moved)
        self.norm = norm if norm is not None and norm.weight is not None else None
        self.plain = heads if self.norm is None else self.norm.source

    @classmethod
    def find(cls, root: Node, norms: dict[Node, Norm]) -> Rotation | None:
        """``x * cos + cat(-x[half:], x[:half]) * sin`` in ``root``, if it is that."""
        if not is_op(root, aten.add.Tensor) or root.kwargs or not all(is_op(a, aten.mul.Tensor) for a in root.args):
            return None
        straight, turned = root.args
        for cat, sin in (turned.args, turned.args[::-1]):
            if not is_op(cat, aten.cat.default) or cat.args[1:] not in ((-1,), (3,)) or len(cat.args[0]) != 2:
                continue
            negated, low = cat.args[0]
            high = negated.args[0] if is_op(negated, aten.neg.default) else None
            if high is None or high.target is not torch.narrow or low.target is not torch.narrow:
                continue
            heads = low.args[0]
            half = value(heads).shape[-1] // 2
            if high.args != (heads, -1, half, half) or low.args != (heads, -1, 0, half):
                continue
            if heads not in straight.args:
                continue
            cos = _other(straight, heads)
            same = value(cos).dtype == value(sin).dtype == value(heads).dtype == value(root).dtype
            shape = value(cos).shape
            rows = value(root).shape[2]
            if same and shape == value(sin).shape and shape == (1, 1, rows, 2 * half):
                return cls(root, heads, cos, sin, norms)
        return None

    def overwritable(self) -> bool:
        """Whether the heads lie in memory that nobody else reads, so that the result may take their place."""
        inside = {self.root}
        pending = list(self.root.all_input_nodes)
        while pending:  # from the root to the heads
            node = pending.pop()
            if node not in (self.cos, self.sin) and node not in inside:
                inside.add(node)
                pending.extend(node.all_input_nodes if node is not self.heads else ())
        node = self.heads
        if self.norm is not None:
            inside |= self.norm.inside() | {self.heads}
            node = self.norm.source
        while _is_transposition(node) or is_op(node, aten.view.default) or node.target is torch.narrow:
            inside.add(node)
            node = node.args[0]
        if not _is_fresh(node) or any(user not in inside for each in inside - {self.root} for user in each.users):
            return False
        mine = [user for user in node.users if user in inside]
        others = [user for user in node.users if user not in inside]
        if not others:
            return len(mine) == 1
        pieces = [user for user in (*mine, *others) if user.target is torch.narrow]
        if len(pieces) != len(node.users) or len(mine) != 1:
            return False
        start, length = mine[0].args[2:]
        return all(o.args[2] + o.args[3] <= start or o.args[2] >= start + length for o in others)


def _is_transposition(node: Node) -> bool:
    return is_op(node, aten.transpose.int) and node.args[1:] == (1, 2)


def _is_fresh(node: Node) -> bool:
    """Whether the node's memory is its own: not an input, a weight or a view."""
    if isinstance(node.target, PackedLinear):
        return True
    if is_op(node, aten.to.dtype, aten.type_as.default):
        return bool(value(node).dtype != value(node.args[0]).dtype)
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return all(argument.alias_info is None for argument in node.target._schema.arguments)


def fuse_rotations(graph: fx.Graph) -> int:
    """The rotary embeddings of queries and keys, two in one call, with a norm of each head before them."""
    norms = {norm.root: norm for norm in _norms(graph)}
    changing = mutated(graph)
    pending: dict[Any, Rotation] = {}
    count = 0
    for node in list(graph.nodes):
        rotation = Rotation.find(node, norms)
        if rotation is None or rotation.plain in changing or not rotation.overwritable():
            continue
        key = (rotation.cos, rotation.sin, tuple(node.users), rotation.norm and rotation.norm.constants)
        query = pending.pop(key, None)
        if query is None:
            pending[key] = rotation
        else:
            count += 1
            _rotate_pair(graph, query, rotation)
    graph.eliminate_dead_code()
    return count


def _rotate_pair(graph: fx.Graph, query: Rotation, key: Rotation) -> None:
    dtype = value(query.root).dtype
    constants = query.norm.constants if query.norm is not None else (dtype, 0.0, Scaling.NONE)
    with graph.inserting_before(key.root):
        plain = []
        for rotation in (query, key):
            heads = rotation.plain
            if rotation.norm is not None and rotation.norm.root is not rotation.heads:
                heads = graph.call_function(aten.transpose.int, (heads, 1, 2))
                heads.meta["val"] = value(rotation.heads)
            plain.append(heads)
        weights: list[Node] = [rotation.norm and rotation.norm.weight for rotation in (query, key)]
        pair = graph.call_function(fused.rotary(*constants), (*plain, query.cos, query.sin, *weights))
        rotated = [graph.call_function(operator.getitem, (pair, index)) for index in range(2)]
    for rotation, result in zip((query, key), rotated, strict=True):
        result.meta["val"] = value(rotation.root)
        rotation.root.replace_all_uses_with(result)


def pack_linears(graph: fx.Graph, attributes: dict[str, torch.Tensor]) -> int:
    """Linear layers with weights of a type that repacking makes faster; those of one input become one."""
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        transposed = is_op(node, aten.addmm.default)
        if (not transposed and not is_op(node, aten.linear.default)) or node.kwargs:
            continue
        x, weight = (node.args[1], node.args[2]) if transposed else node.args[:2]
        bias = node.args[0] if transposed else (node.args[2] if len(node.args) > 2 else None)
        named = all(each is None or each.op == "get_attr" for each in (weight, bias))
        if not named or not packs(value(weight).dtype) or value(weight).dtype != value(x).dtype:
            continue
        node.meta["linear"] = (weight, bias)
        # What takes the columns of a wider tensor as they are may share it.
        shares = all(_takes_columns(user) for user in node.users)
        groups.setdefault((x, transposed, None if shares else node), []).append(node)
    for (x, transposed, _), nodes in groups.items():
        weights = [attributes[str(node.meta["linear"][0].target)] for node in nodes]
        biases = [bias and attributes[str(bias.target)] for bias in (node.meta["linear"][1] for node in nodes)]
        layer = PackedLinear(weights, biases, transposed=transposed)
        first = value(nodes[0])
        with graph.inserting_before(nodes[0]):
            merged = graph.call_function(layer, (x,))
            merged.meta["val"] = first.new_empty((*first.shape[:-1], sum(value(node).shape[-1] for node in nodes)))
            start = 0
            for node in nodes:
                columns = int(value(node).shape[-1])
                result = merged
                if len(nodes) > 1:
                    result = graph.call_function(torch.narrow, (merged, -1, start, columns))
                    result.meta["val"] = value(merged).narrow(-1, start, columns)
                start += columns
                node.replace_all_uses_with(result)
    graph.eliminate_dead_code()
    return len(groups)


def _takes_columns(user: Node) -> bool:
    """Whether the operation gives the same for a part of a wider tensor as for a tensor of its own."""
    if is_op(user, aten.view.default):
        return bool(value(user).dim() == 4)  # cuts the columns into heads
    return is_op(user, aten.silu.default, aten.gelu.default, aten.mul.Tensor)
