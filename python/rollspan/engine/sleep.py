"""Sleep: an idle engine that gives its memory back, and takes it again when it wakes up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from rollspan.engine.pause import Pause
from rollspan.errors import RollspanError, wrong_value
from rollspan.sampling_rules import is_int

if TYPE_CHECKING:
    from rollspan.engine.core import EngineCore
    from rollspan.engine.scheduler import PauseState

TAGS = ("weights", "kv_cache")


class Sleep:
    """Level 1 frees the KV cache and moves weights off CUDA devices; level 2 drops the weights as well."""

    def __init__(self, core: EngineCore, pause: Pause) -> None:
        self._core = core
        self._weights = core.weights
        self._pause = pause

    @property
    def asleep(self) -> bool:
        """Something sleeps."""
        return bool(self._weights.asleep)

    def fall_asleep(self, level: Any = 1, mode: Any = "abort") -> Future[None]:
        """Pauses as ``mode`` says and gives the memory back; done when that has taken place.

        Requests that ``mode`` has kept are computed again when the engine is awake; awake, it is paused if it was so
        before it slept, however often it was put to sleep meanwhile.

        Raises:
            RollspanError: ``update_active``, ``invalid_request``.
        """
        if not is_int(level, 1, 2):
            raise wrong_value("level", "1 or 2", level)
        self._check_no_update()
        before = self._pause.state
        done: Future[None] = Future()

        def paused(pause: Future[None]) -> None:
            error = pause.exception()
            if error is not None:
                done.set_exception(error)
            else:
                released = self._weights.exclusively(lambda: self._release(level, before))
                released.add_done_callback(told)

        def told(released: Future[None]) -> None:
            error = released.exception()
            done.set_result(None) if error is None else done.set_exception(error)

        self._pause.hold(mode, True).add_done_callback(paused)
        return done

    def wake_up(self, tags: Any = None) -> Future[None]:
        """Takes memory again; without tags for all that sleeps. What is awake stays so.

        Raises:
            RollspanError: ``invalid_request``.
        """
        wanted = TAGS if tags is None else tags
        if not isinstance(wanted, Sequence) or isinstance(wanted, str) or not set(map(str, wanted)) <= set(TAGS):
            raise wrong_value("tags", "a list of weights and kv_cache, or null for both", tags)
        return self._weights.exclusively(lambda: self._take(frozenset(wanted)))

    def _check_no_update(self) -> None:
        if self._weights.updating:
            text = "a weight update is active: finish or abort it before the engine sleeps"
            raise RollspanError(text, reason="update_active")

    def _release(self, level: int, before: PauseState) -> None:
        try:
            self._check_no_update()
        except RollspanError:
            self._pause.restore(before)  # who does not sleep is not left held either
            raise
        self._pause.freeze(before)
        self._core.release_memory(weights=level == 2)
        self._weights.fall_asleep(drop=level == 2)
        _return_cuda_memory()
        self._core.report()

    def _take(self, tags: frozenset[str]) -> None:
        self._weights.wake_up(tags)
        if not self.asleep:
            self._pause.thaw()
        self._core.report()


def _return_cuda_memory() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
