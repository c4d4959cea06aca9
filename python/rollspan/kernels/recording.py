"""The operations that a function calls on tensors, recorded as a graph; nothing is computed but sizes and dtypes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
#: Asks for the device of a fake tensor: no computation.
_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
#: Attribute of a fake tensor: the node whose result it is.
_NODE = "_rollspan_node"


class Recording:
    """One run of a function whose inputs have sizes and no contents.

    ``make_fx`` of torch records the same graph; it takes four times as long, most of it for what only torch's compiler
    needs.

    Attributes:
        graph: placeholders, operations in order, and the output; ``meta["val"]`` of each node has its size and dtype.
        attributes: the tensors that the function brings itself, each once, by the targets of the ``get_attr`` nodes.

    Raises:
        ValueError: the function's course depends on the contents of a tensor, or it computes under autocast.
    """

    def __init__(self, function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, torch.Tensor] = {}
        self._names: dict[int, fx.Node] = {}  # of the attributes, by their ids
        self._symbols: dict[str, fx.Node] = {}  # numbers that a call reads from tensors, by their names
        self._shapes = _Shapes()
        arguments = [self._shapes.fakes.from_tensor(tensor) for tensor in inputs]
        for index, argument in enumerate(arguments):
            _name(argument, self.graph.placeholder(f"input_{index}"))
        with torch.no_grad(), self._shapes.fakes, enable_python_dispatcher(), _Mode(self):
            result = function(*arguments)
        self.graph.output(self._argument(result))
        self.graph.eliminate_dead_code()

    def call(self, operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Files a call of an operation and returns its fake result."""
        if operation is _DEVICE:
            return operation(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            raise ValueError(f"its code calls {operation} under autocast")
        if operation is aten.lift_fresh.default:
            operation = aten.lift_fresh_copy.default  # a tensor made of numbers: in each call the function's own
        node = self.graph.call_function(
            operation, self._argument(args), {name: self._argument(value) for name, value in kwargs.items()}
        )
        result = self._shapes.call(operation, args, kwargs)
        if isinstance(result, torch.Tensor):
            _name(result, node)
        elif isinstance(result, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in result):
            node.meta["val"] = [_likeness(item) for item in result]
            for index, item in enumerate(result):
                _name(item, self.graph.call_function(operator.getitem, (node, index)))
        elif isinstance(result, _SYMBOLS):
            self._symbols[str(result)] = node
        elif result is not None:
            # Known numbers are those of tensors made of numbers; others change with the weights.
            raise ValueError(f"its code reads a number from a tensor, with {operation}")
        return result

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Files what Python computes with numbers that were read from tensors, and returns the result's symbol."""
        result = function(*args)
        if isinstance(result, _SYMBOLS):
            self._symbols[str(result)] = self.graph.call_function(function, self._argument(args))
        return result

    def _argument(self, value: Any) -> Any:
        """What stands for a value in the graph."""
        if isinstance(value, torch.Tensor):
            node: fx.Node | None = getattr(value, _NODE, None)
            return node if node is not None and node.graph is self.graph else self._attribute(value)
        if isinstance(value, (list, tuple)):
            return type(value)([self._argument(item) for item in value])
        if isinstance(value, _SYMBOLS):
            return self._symbols[str(value)]
        return value

    def _attribute(self, tensor: torch.Tensor) -> fx.Node:
        if isinstance(tensor, FakeTensor):
            raise ValueError(f"its code has a tensor of unknown origin, {list(tensor.shape)}")
        node = self._names.get(id(tensor))
        if node is None:
            name = f"tensor_{len(self.attributes)}"
            self.attributes[name] = tensor
            node = self._names[id(tensor)] = self.graph.create_node("get_attr", name)
            node.meta["val"] = tensor
        return node


def _name(tensor: torch.Tensor, node: fx.Node) -> None:
    """Marks a fake tensor as a node's result.

    The node gets a likeness of it: where anybody else holds what torch has just made, torch hands on a copy, unmarked.
    """
    setattr(tensor, _NODE, node)
    node.meta["val"] = _likeness(tensor)


def _likeness(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same sizes and dtype, with neither memory nor marks."""
    shape, strides = tensor.shape, tensor.stride()
    if any(isinstance(size, torch.SymInt) for size in (*shape, *strides)):
        return tensor.detach()
    with unset_fake_temporarily():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")


class _Shapes:
    """Finds what results look like; once for all calls that look the same, as those of a model's layers do."""

    def __init__(self) -> None:
        self.fakes = FakeTensorMode(
            allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
        )
        self.fakes.cache_enabled = False  # it remembers more, at the price of finding out anew
        self._known: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def call(self, operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The fake result of an operation."""
        if operation._schema.is_mutable:
            return operation(*args, **kwargs)
        try:
            key = (operation, self._key(args), *((name, self._key(value)) for name, value in kwargs.items()))
            known = self._known.get(key)
        except TypeError:  # there is a symbol in it, which has no hash
            return operation(*args, **kwargs)
        if known is not None:
            shape, strides, dtype = known
            with unset_fake_temporarily():
                likeness = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            return FakeTensor(self.fakes, likeness, _CPU)
        result = operation(*args, **kwargs)
        plain = type(result) is FakeTensor and result.device == _CPU and result.constant is None
        if plain and not any(result is argument for argument in args):
            self._known[key] = result.shape, result.stride(), result.dtype
        return result

    def _key(self, value: Any) -> Any:
        """All of an argument that the size and dtype of a result can depend on."""
        if isinstance(value, torch.Tensor):
            return value.shape, value.stride(), value.dtype, value.device
        if isinstance(value, (list, tuple)):
            return tuple(self._key(item) for item in value)
        if isinstance(value, _SYMBOLS):
            raise TypeError("a symbol has no hash")
        return type(value), value


class _Mode(ProxyTorchDispatchMode):
    """Hands every operation over before it is taken apart: a linear layer is one operation here.

    At this point torch lets nothing in but its own recorder. This is one by name only.
    """

    def __init__(self, recording: Recording) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack = []
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recording.call(func, args, kwargs or {})

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._recording.compute(func, args)
