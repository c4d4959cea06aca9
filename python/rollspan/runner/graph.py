"""The model's forward pass, captured once at load as a flat function: no module calls and no dispatch between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from rollspan.kernels import fusions, passes
from rollspan.kernels.linear import PackedLinear
from rollspan.kernels.program import Program
from rollspan.kernels.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("rollspan.engine")

_library = torch.library.Library("rollspan", "DEF")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int sliding_window, float softcap, "
    "Tensor? sinks) -> Tensor"
)


def _attend_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


_library.impl("attend", _attend_shape, "Meta")


#: Fusions in the order in which they run.
FUSIONS = ("linears", "rotations", "norms", "gates")


@dataclass(frozen=True)
class CaptureOptions:
    """What may be done to the captured forward.

    Attributes:
        exact: only what keeps every bit of the eager forward.
        fusions: which of :data:`FUSIONS` run when not exact.
        replacements: what is called instead of an operation, with the same arguments; for forms of it whose bits do
            not depend on the number of rows. Takes effect when exact.
    """

    exact: bool = False
    fusions: frozenset[str] = frozenset(FUSIONS)
    replacements: Mapping[torch._ops.OpOverload, Callable[..., Any]] = field(default_factory=dict)


class CapturedForward:
    """``forward(input_ids [1, T], positions [1, T], sample_rows [S]) -> logits [S, vocabulary]``.

    Weights are bound as objects: swapping their ``.data`` is seen by the next call, once :meth:`after_commit` has run.
    """

    def __init__(self, program: Program, layers: list[PackedLinear]) -> None:
        self.program = program
        self._layers = layers
        self.forward = program.forward

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, sample_rows: torch.Tensor) -> torch.Tensor:
        return self.forward(input_ids, positions, sample_rows)  # type: ignore[no-any-return]

    @property
    def derived_bytes(self) -> int:
        """Memory of the repacked copies of weights."""
        return sum(layer.nbytes for layer in self._layers)

    def after_commit(self) -> None:
        """Repacks what is derived from the parameters; to be called after they changed, before the next step."""
        for layer in self._layers:
            layer.refresh()

    def prepare(self, new: Mapping[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
        """Repacks what is derived from the parameters that are keys, from the data that are to be theirs.

        Takes the memory of another copy, and may run beside steps.

        Returns:
            What exchanges the result with what is in use, at the moment when the data of the parameters are exchanged.
        """
        exchanges = [exchange for layer in self._layers if (exchange := layer.prepare(new)) is not None]

        def exchange_all() -> None:
            for exchange in exchanges:
                exchange()

        return exchange_all

    def drop(self) -> None:
        """Gives the memory of the repacked copies back; :meth:`after_commit` or :meth:`prepare` makes them anew."""
        for layer in self._layers:
            layer.drop()


def capture(model: PreTrainedModel, context: Any, options: CaptureOptions | None = None) -> CapturedForward | None:
    """Traces the model's forward with two sizes (see :class:`Trace`) and turns it into a function for any size.

    Args:
        model: on the CPU, in evaluation mode, with the engine's attention selected.
        context: the forward's ``rollspan_step``; its attribute ``tracing`` is set for the time of the trace, its
            method ``attend`` is what the function calls, with the arguments of ``torch.ops.rollspan.attend``.
        options: defaults to all passes.

    Returns:
        The function, or None where the model cannot be captured: its own forward has to be called then.
    """
    options = options or CaptureOptions()
    try:
        context.tracing = True
        try:
            traced = _trace(model, context)
        finally:
            context.tracing = False
        return _compile(traced, model, context, options)
    except Exception as error:  # noqa: BLE001 (model code and the tracer may raise anything)
        text = " ".join(str(error).split())[:200]
        logger.info("%s runs uncaptured: %s: %s", type(model).__name__, type(error).__name__, text)
        return None


def _trace(model: PreTrainedModel, context: Any) -> Trace:
    def forward(input_ids: torch.Tensor, positions: torch.Tensor, sample_rows: torch.Tensor) -> torch.Tensor:
        output = model(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=sample_rows,
            rollspan_step=context,
        )
        return output.logits[0]  # type: ignore[no-any-return]

    def inputs(sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        rows, sampled = sizes
        ids, positions = torch.empty((2, 1, rows), dtype=torch.int64)
        return ids, positions, torch.empty(sampled, dtype=torch.int64)

    return Trace(forward, inputs)


def _compile(traced: Trace, model: PreTrainedModel, context: Any, options: CaptureOptions) -> CapturedForward:
    graph, attributes = traced.graph, traced.attributes
    _check_weights(attributes, model)
    for node in graph.nodes:
        if node.target is torch.ops.rollspan.attend.default:
            node.target = context.attend
    passes.simplify(graph)
    if options.exact:
        for node in graph.nodes:
            node.target = options.replacements.get(node.target, node.target)
    else:
        _fuse(graph, attributes, options.fusions)
    layers = [node.target for node in graph.nodes if isinstance(node.target, PackedLinear)]
    return CapturedForward(Program(graph, attributes), layers)


def _fuse(graph: fx.Graph, attributes: dict[str, torch.Tensor], names: frozenset[str]) -> None:
    counts = {}
    if "linears" in names:
        counts["linears"] = fusions.pack_linears(graph, attributes)
    if "rotations" in names:
        counts["rotations"] = fusions.fuse_rotations(graph)
    if "norms" in names:
        counts["norms"] = fusions.fuse_norms(graph)
    if "gates" in names:
        counts["gates"] = fusions.fuse_gates(graph)
    logger.debug("fused %s", ", ".join(f"{count} {name}" for name, count in counts.items()))


def _check_weights(attributes: Mapping[str, torch.Tensor], model: PreTrainedModel) -> None:
    """Refuses a trace that would not follow an update.

    Raises:
        ValueError: a tensor that it refers to shares memory with a weight without being it.
    """
    weights = [*model.parameters(), *model.buffers()]
    known = {id(weight) for weight in weights}
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    for tensor in attributes.values():
        if id(tensor) not in known and tensor.untyped_storage().data_ptr() in storages:
            raise ValueError(f"its code keeps an alias of a weight, {list(tensor.shape)}")
