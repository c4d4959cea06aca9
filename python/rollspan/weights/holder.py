"""WeightHolder: the weights in memory, to be looked at, spoiled, and put to sleep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from rollspan.config import EngineConfig
from rollspan.errors import RollspanError
from rollspan.weights.operations import Operation, Operations
from rollspan.weights.parameters import Parameters
from rollspan.weights.staging import WeightDigest
from rollspan.weights.state import WeightState
from rollspan.weights.worker import Worker

T = TypeVar("T")


class WeightHolder(WeightState):
    """What is done with the weights besides updating them, in the order in which it is asked for.

    Args:
        model: whose parameters and persistent buffers are the weights.
        config: label and source.
        worker: does what takes time; it begins with the digest of the weights.
    """

    def __init__(self, model: nn.Module, config: EngineConfig, worker: Worker) -> None:
        super().__init__(
            label=config.weight_version, require_label=config.require_weight_version, source=f"disk:{config.model}"
        )
        self._worker = worker
        self._parameters = Parameters(model)
        self._operations = Operations(worker)
        self._digest = worker.submit(partial(WeightDigest.of, self._parameters.data(), {}))

    def exclusively(self, action: Callable[[], T]) -> Future[T]:
        """Runs an action on the engine's thread when all that was asked before has ended, on the worker as well."""
        return self._operations.add(Operation(lambda: _nothing, lambda _: action()))

    def examine(self, work: Callable[[Mapping[str, torch.Tensor]], T]) -> Future[T]:
        """Has the worker look at the weights in force, by the first name of each.

        Raises:
            RollspanError: ``engine_sleeping``, also in the future, as is what ``work`` raises.
        """

        def begin() -> Callable[[], T]:
            self._require_awake()  # they may have been put to sleep by what was asked before
            return partial(work, self._parameters.data())

        self._require_awake()
        return self._operations.add(Operation(begin))

    def reset(self, *, quiet: bool) -> Future[dict[str, Any]]:
        """Overwrites all weights with zeros: nothing is generated until a complete update.

        Raises:
            RollspanError: ``update_active``, ``pause_required``, ``engine_sleeping``.
        """
        self._require_none_open("reset the weights")
        self._require_awake()
        if not quiet:
            text = "weights are reset during a pause under which nothing runs: call pause_generation first"
            raise RollspanError(text, reason="pause_required")

        def act() -> dict[str, Any]:
            self._require_none_open("reset the weights")
            self._require_awake()
            self.inconsistent = True
            self._worker.free(self._parameters.zero())
            return {"status": "reset"}

        return self.exclusively(act)

    def _require_awake(self) -> None:
        if "weights" in self.asleep:
            raise RollspanError("the weights sleep: wake them up first", reason="engine_sleeping")

    def fall_asleep(self, *, drop: bool) -> None:
        """Puts all to sleep; weights are dropped, or moved to host memory if they are not there already."""
        if drop:
            self.inconsistent = True
            self._worker.free(self._parameters.drop())
        else:
            self._parameters.offload()
        self.asleep = frozenset(("weights", "kv_cache"))

    def wake_up(self, tags: frozenset[str]) -> None:
        """Wakes what the tags name; weights that were dropped come back as memory without meaning."""
        if "weights" in tags & self.asleep:
            self._parameters.reload()
        self.asleep -= tags

    def _require_none_open(self, what: str) -> None:
        if self.updating:
            text = f"a weight update is active: finish or abort it to {what}"
            raise RollspanError(text, reason="update_active")


def _nothing() -> None:
    """The worker's part of what has none: it is done when all before it is."""
