"""WeightManager: the only writer of weights, label and commit number. Everything here runs between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollspan.engine.request import Stamp
from rollspan.engine.transfer import disk
from rollspan.errors import RollspanError, check_label
from rollspan.runner.checkpoint_names import CheckpointNames

DEFAULT_LABEL = "default"


def _invalid(message: str) -> RollspanError:
    return RollspanError(message, reason="weights_invalid", param="update_info")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


class WeightManager:
    """Stages an update beside the weights in use and publishes it as a whole.

    An update is ``start``, one or more ``update``, ``finish``. Until ``finish`` has verified that every parameter of
    the model was received, nothing of the model changes; any failure drops the staging area and ends the update.

    Args:
        model: whose parameters and persistent buffers are the weights.
        label: weight version at start.
        root: directory below which updates may be read.
        after_swap: makes anew what is derived from the weights, before anything is published; where it raises, the old
            weights are put back.

    Attributes:
        label: weight version in force.
        commit: number of finished updates since start.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label: str | None,
        root: str | None,
        after_swap: Callable[[], None] = lambda: None,
    ) -> None:
        self._root = None if root is None else Path(root)
        # Tied parameters are one object under several names: each needs one tensor, under any of its names.
        # Persistent buffers (a router's correction bias) are weights as well.
        self._names: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._checkpoint_names = CheckpointNames(model)
        self._staged: dict[str, torch.Tensor] | None = None
        self._last_finish: str | None = None  # the label that the last finish named, until the next start
        self._after_swap = after_swap
        self.label = check_label(label) if label is not None else DEFAULT_LABEL
        self.commit = 0

    @property
    def stamp(self) -> Stamp:
        """Label and commit number of the weights that a step launched now runs with."""
        return (self.label, self.commit)

    @property
    def updating(self) -> bool:
        """True between start and finish."""
        return self._staged is not None

    def set_label(self, label: Any) -> None:
        """Relabels the weights in force; they and the commit number stay.

        Raises:
            RollspanError: ``invalid_label``.
        """
        self.label = check_label(label, "new_version")
        self._last_finish = None

    def start(self) -> None:
        """Opens an update.

        Raises:
            RollspanError: ``update_active`` when one is open already; it goes on.
        """
        if self._staged is not None:
            raise RollspanError(
                "a weight update is already active: finish it, or drop it (an update_weights that fails does)",
                reason="update_active",
            )
        self._staged = {}
        self._last_finish = None

    def update(self, info: Any) -> None:
        """Receives tensors into the staging area.

        Args:
            info: ``{"path": DIR}``, or a list that holds one such object. Tensors have the model's names, or those
                of its checkpoints.

        Raises:
            RollspanError: ``no_update_active``; ``weights_invalid`` or ``unsupported_field`` for what cannot be
                used, which also ends the update.
        """
        staged = self._require_active()
        self._staged = None  # stays so if anything below fails
        if isinstance(info, list) and len(info) == 1:
            info = info[0]
        if not isinstance(info, Mapping):
            raise _invalid('update_info must be an object such as {"path": DIR}, or a list with one such object')
        for name, tensor in disk.read_tensors(info, self._root):
            if name in self._names:
                tensor = self._fitted(name, tensor)
            elif self._checkpoint_names.target(name) is None:
                raise _invalid(f"tensor {name!r} is none of the model's parameters")
            staged[name] = tensor
        self._staged = staged

    def _fitted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the parameter's dtype, in host memory; floating-point types convert, others don't."""
        target = self._names[name]
        if tensor.shape != target.shape:
            raise _invalid(f"tensor {name!r} has shape {list(tensor.shape)}, the model needs {list(target.shape)}")
        if tensor.dtype != target.dtype and not (tensor.is_floating_point() and target.is_floating_point()):
            raise _invalid(f"tensor {name!r} has dtype {tensor.dtype}, the model needs {target.dtype}")
        return tensor.to(dtype=target.dtype)

    def finish(self, label: Any = None) -> Stamp:
        """Verifies the staged update and publishes weights, label and commit number together.

        Args:
            label: name of the new weights; None keeps the label.

        Returns:
            The stamp now in force. The same call again, by a client whose answer was lost, gets the same answer.

        Raises:
            RollspanError: ``invalid_label`` (the update stays open), ``no_update_active``, or ``weights_invalid``
                when parameters are missing, which drops the update.
        """
        new_label = self.label if label is None else check_label(label)
        if self._staged is None and label is not None and new_label == self._last_finish:
            return self.stamp
        staged = self._require_active()
        self._staged = None
        parts = {name: staged.pop(name) for name in list(staged) if name not in self._names}
        for name, tensor in self._checkpoint_names.convert(parts).items():
            staged[name] = self._fitted(name, tensor)
        new: dict[torch.Tensor, torch.Tensor] = {}
        for name, tensor in staged.items():
            parameter = self._names[name]
            if parameter in new and not torch.equal(new[parameter], tensor):
                raise _invalid(f"tensor {name!r} differs from another tensor that the model ties it to")
            new[parameter] = tensor
        missing = [name for name, parameter in self._names.items() if parameter not in new]
        if missing:
            raise _invalid(f"the update lacks {len(missing)} of the model's parameters: {_some(missing)}")
        self._swap(new)
        self.label = new_label
        self._last_finish = None if label is None else new_label
        self.commit += 1
        return self.stamp

    def _swap(self, new: dict[torch.Tensor, torch.Tensor]) -> None:
        """Puts new data into the parameters that are the keys, and old data back if that cannot be completed."""
        old = {parameter: parameter.data for parameter in new if parameter.device.type == "cpu"}
        for parameter, tensor in new.items():
            if parameter in old:
                parameter.data = tensor  # a pointer swap: cannot fail half-way
            else:
                parameter.data.copy_(tensor)  # upload; addresses stay, for captured graphs
        try:
            self._after_swap()
        except Exception as error:
            for parameter, tensor in old.items():
                parameter.data = tensor
            self._after_swap()
            text = (
                f"what is derived from the weights cannot be made: {type(error).__name__}: {error}; the old ones stay"
            )
            raise RollspanError(text, reason="internal_error") from error

    def _require_active(self) -> dict[str, torch.Tensor]:
        if self._staged is None:
            raise RollspanError("no weight update is active: start one first", reason="no_update_active")
        return self._staged
