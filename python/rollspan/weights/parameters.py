"""Parameters: a model's weights by name, and what a tensor must be to become one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from rollspan.errors import RollspanError, cut
from rollspan.weights.checkpoint_names import CheckpointNames


def invalid(message: str) -> RollspanError:
    """The error for weights that cannot be used."""
    return RollspanError(message, reason="weights_invalid", param="update_info")


def some(names: Iterable[str]) -> str:
    """The first few of the names, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


class Parameters:
    """Parameters and persistent buffers of a model (a router's correction bias is a weight as well).

    Tied parameters are one object under several names: each needs one tensor, under any of its names.

    Attributes:
        named: every name -> the model's tensor, whose ``data`` is the weight in force.
        first: the first name of each tensor, in the order of the model, -> the tensor.
        first_name: tensor -> the first of its names.
        specs: every name -> (dtype, shape); of the model as it was loaded, also while its weights are dropped.
    """

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict(keep_vars=True)
        self.named: dict[str, torch.Tensor] = {
            name: value for name, value in state.items() if isinstance(value, torch.Tensor)
        }
        self.first_name: dict[torch.Tensor, str] = {}
        for name, tensor in self.named.items():
            self.first_name.setdefault(tensor, name)
        self.first = {name: tensor for tensor, name in self.first_name.items()}
        self.specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.named.items()}
        self._checkpoint_names = CheckpointNames(model)
        self._device = next((tensor.device for tensor in self.first_name), torch.device("cpu"))

    @property
    def device(self) -> torch.device:
        """Where steps compute with them."""
        return self._device

    def data(self) -> dict[str, torch.Tensor]:
        """The weights in force by the first name of each; a swap does not change what is in here."""
        return {name: tensor.data for name, tensor in self.first.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, tied ones once."""
        return sum(self._bytes(name) for name in self.first)

    @property
    def largest(self) -> int:
        """Bytes of the largest weight."""
        return max(map(self._bytes, self.first), default=0)

    def _bytes(self, name: str) -> int:
        dtype, shape = self.specs[name]
        return int(torch.Size(shape).numel()) * dtype.itemsize

    def known(self, name: str) -> bool:
        """Whether an update may bring a tensor of this name: one of the model's, or one of its checkpoints'."""
        return name in self.named or self._checkpoint_names.target(name) is not None

    def fitted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the parameter's dtype, contiguous; floating-point types convert, others don't.

        Raises:
            RollspanError: ``weights_invalid``: another shape, or a dtype that does not convert.
        """
        dtype, shape = self.specs[name]
        if tensor.shape != shape:
            raise invalid(f"tensor {name!r} has shape {list(tensor.shape)}, the model needs {list(shape)}")
        if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
            raise invalid(f"tensor {name!r} has dtype {tensor.dtype}, the model needs {dtype}")
        return tensor.detach().to(dtype=dtype).contiguous()

    def converted(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What tensors with a checkpoint's names become, by the model's; all parts of a parameter at once.

        Raises:
            RollspanError: ``weights_invalid``: they cannot be merged, or what comes of them does not fit.
        """
        result = {}
        for name, tensor in self._checkpoint_names.convert(parts).items():
            if name not in self.named:
                raise invalid(f"tensor {cut(name)!r} is none of the model's parameters")
            result[name] = self.fitted(name, tensor)
        return result

    # While the engine sleeps

    def offload(self) -> None:
        """Moves the weights to host memory, where they are not there already."""
        for tensor in self.first_name:
            tensor.data = tensor.data.cpu()

    def drop(self) -> list[torch.Tensor]:
        """Leaves the model without weights; returns them, for somebody to free."""
        return self._exchange(lambda shape, dtype: torch.empty(0, dtype=dtype, device=self._device))

    def zero(self) -> list[torch.Tensor]:
        """Makes all weights zeros; returns what they were, for somebody to free, unless they have to stay in place."""
        if self._device.type != "cpu":
            for tensor in self.first_name:
                tensor.data.zero_()
            return []
        return self._exchange(lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=self._device))

    def reload(self) -> None:
        """Gives each weight its place on the model's device again: what was dropped comes back without values."""
        for name, tensor in self.first.items():
            dtype, shape = self.specs[name]
            if tensor.shape == shape:
                tensor.data = tensor.data.to(self._device)
            else:
                tensor.data = torch.empty(shape, dtype=dtype, device=self._device)

    def _exchange(self, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]) -> list[torch.Tensor]:
        old = []
        for name, tensor in self.first.items():
            dtype, shape = self.specs[name]
            old.append(tensor.data)
            tensor.data = make(shape, dtype)
        return old
