"""What the tests of transports share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from rollspan.errors import RollspanError
from rollspan.safetensors_format import DTYPES
from rollspan.weights.transfer.base import TransferContext


def context(
    parameters: Mapping[str, torch.Tensor] | None = None,
    *,
    root: Path | None = None,
    spool: Path | None = None,
    timeout: float = 20.0,
) -> TransferContext:
    """The context of an engine with these parameters, alone in its set."""
    facts = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in (parameters or {}).items()}
    return TransferContext(root, spool, torch.device("cpu"), 0, 1, timeout, facts)


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of every dtype with arbitrary bits, an empty one, a scalar, and a name that isn't ASCII."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for name, dtype in DTYPES.items():
        data = torch.randint(0, 2 if dtype is torch.bool else 256, (15 * dtype.itemsize,), generator=generator)
        made[name] = data.to(torch.uint8).view(dtype).reshape(3, 5)
    return made | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "größe": torch.ones(1, 1)}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether names, dtypes, shapes and bits are equal."""
    return one.keys() == other.keys() and all(
        (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        and torch.equal(_bits(tensor), _bits(other[name]))
        for name, tensor in one.items()
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def raises(reason: str, param: str | None, message: str) -> Iterator[None]:
    """Expects a RollspanError whose text contains ``message``."""
    with pytest.raises(RollspanError) as caught:
        yield
    assert (caught.value.reason, caught.value.param) == (reason, param), caught.value.message
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def mapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in a mapping of a file of shared memory."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return "/dev/shm/" in line or "/memfd:" in line
    return False
