"""RoutedExperts: which experts computed each token, kept for each slot of the KV cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from rollspan.errors import RollspanError


class RoutedExperts:
    """Records what the routers of a model choose, one entry for each slot of the KV cache.

    A token that is found in the prefix cache was computed once, by the experts recorded then; one that is computed
    again after a preemption is recorded again.

    Args:
        model: its routers return their choice as an integer tensor ``[T, top_k]``.
        block_size: tokens per KV block.

    Raises:
        RollspanError: ``invalid_request``: the model has no routers.
    """

    def __init__(self, model: PreTrainedModel, block_size: int) -> None:
        self._name = type(model).__name__
        self._block_size = block_size
        self._num_layers = int(model.config.get_text_config().num_hidden_layers)
        self._num_slots = 0
        self._slots: torch.Tensor | None = None
        self._table: torch.Tensor | None = None  # int16 [num_slots, layers, top_k]
        self._silent = _routers(model)  # those that have not said anything yet
        if not self._silent:
            raise self._refused("has no routers to experts")
        for layer, router in self._silent.items():
            router.register_forward_hook(lambda _, __, output, layer=layer: self._record(layer, output))

    def _refused(self, what: str) -> RollspanError:
        return RollspanError(f"{self._name} {what}", reason="invalid_request", param="enable_return_routed_experts")

    def allocate(self, num_blocks: int) -> None:
        """Makes room for KV blocks 0 to ``num_blocks``; what was recorded is forgotten."""
        self._num_slots = (num_blocks + 1) * self._block_size
        self._table = None

    def verify(self) -> None:
        """To be called after a few steps.

        Raises:
            RollspanError: ``invalid_request``: not every router has said which experts it chose.
        """
        if self._silent:
            raise self._refused("does not tell which experts its routers choose")

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block's entries; known once a step has run."""
        return 0 if self._table is None else self._table[: self._block_size].nbytes

    def slots(self, block_ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """int64 ``[stop - start]``: slots of the tokens ``start`` to ``stop - 1`` of a sequence."""
        positions = torch.arange(start, stop)
        blocks = torch.tensor(block_ids, dtype=torch.int64)
        return blocks[positions // self._block_size] * self._block_size + positions % self._block_size

    @contextlib.contextmanager
    def recording(self, slots: torch.Tensor) -> Iterator[None]:
        """Inside, the rows of a forward pass belong to ``slots`` (int64 ``[T]``)."""
        self._slots = slots
        try:
            yield
        finally:
            self._slots = None

    def _record(self, layer: int, output: Any) -> None:
        if self._slots is None:
            return
        for found in output if isinstance(output, tuple) else (output,):
            if isinstance(found, torch.Tensor) and found.ndim == 2 and not found.is_floating_point():
                if self._table is None:
                    shape = (self._num_slots, self._num_layers, found.shape[1])
                    # numpy's zeros come from the kernel page by page, on first use
                    self._table = torch.from_numpy(np.zeros(shape, dtype=np.int16))
                self._table[self._slots, layer] = found.to(device="cpu", dtype=torch.int16)
                self._silent.pop(layer, None)
                return

    def gather(self, block_ids: Sequence[int], start: int, stop: int) -> npt.NDArray[np.int16]:
        """The choices for the computed tokens ``start`` to ``stop - 1`` of a sequence.

        Returns:
            int16 ``[stop - start, num_hidden_layers, top_k]``, in the order in which the router gives them; zeros in
            layers without experts.
        """
        assert self._table is not None, "nothing was recorded"
        chosen: npt.NDArray[np.int16] = self._table[self.slots(block_ids, start, stop)].numpy()
        return chosen


def _routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The modules that transformers itself takes router logits from, by the index of their layer."""
    kinds: set[Any] = set()
    for part in model.modules():
        recorders = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
        kinds.update(
            getattr(recorder, "target_class", recorder)
            for recorder in (recorders if isinstance(recorders, list | tuple) else (recorders,))
        )
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if type(module) in kinds and numbers:
            found[numbers[0]] = module
    return found
