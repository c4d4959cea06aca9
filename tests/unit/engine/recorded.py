"""Graphs for machines without a GPU: the operations that a function runs, recorded with their tensors, and repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations that make a CPU wait for a GPU, and that no graph can hold.
_WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::item")


class Recorder:
    """Does on the CPU what a CUDA graph does: the replay runs no Python of the recorded function.

    It repeats each operation with the numbers and tensors of the recording, and leaves each result where it was.

    Attributes:
        recordings: how many were made.
        replays: how many were run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.recordings = 0
        self.replays = 0

    def __call__(self, run: Callable[[], object]) -> Callable[[], object]:
        log = _Log()
        with log:
            run()
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            for function, args, kwargs, results in log.operations:
                for result, new in zip(results, tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(result, torch.Tensor) and result.data_ptr() != new.data_ptr():
                        result.copy_(new)

        return replay


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() in _WAITING:
            raise RuntimeError(f"{func.name()} is not permitted when a stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tree_leaves(result)))
        return result
