"""Pause: generation held by its three modes, and frozen while the engine sleeps."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rollspan.engine.scheduler import PauseState
from rollspan.errors import RollspanError, shown

if TYPE_CHECKING:
    from rollspan.engine.core import EngineCore

MODES = ("abort", "wait", "keep")


class Pause:
    """The scheduler's pause state, and the call that waits for running requests to end."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._draining: tuple[Future[None], bool] | None = None
        self._before_sleep: PauseState | None = None

    @property
    def state(self) -> PauseState:
        """What clients have asked for; the engine may sleep besides."""
        return self._scheduler.pause_state if self._before_sleep is None else self._before_sleep

    @property
    def quiet(self) -> bool:
        """A pause is in force under which nothing runs."""
        state = self._scheduler.pause_state
        return state is PauseState.PAUSED_ALL or (state is PauseState.PAUSED_NEW and self._scheduler.drained)

    @property
    def drained(self) -> bool:
        """True when a pause that waits can be answered now."""
        return self._draining is not None and self._scheduler.drained

    def hold(self, mode: Any = "abort", clear_cache: Any = True) -> Future[None]:
        """Pauses; done when the state holds.

        Raises:
            RollspanError: ``invalid_request``; why running requests cannot end, if it is to wait for them.
        """
        if mode not in MODES or not isinstance(clear_cache, bool):
            raise RollspanError(
                f"mode must be abort, wait or keep and clear_cache true or false, got {shown([mode, clear_cache])}",
                reason="invalid_request",
                param="mode",
            )
        if mode == "wait" and not self._scheduler.drained:
            self._core.weights.check_runnable()
        self._supersede()
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        if self._before_sleep is None:
            self._scheduler.pause_state = state
        else:
            self._before_sleep = state  # everything is held already; this is for when it wakes up
        if mode == "abort":
            self._core.abort_all()
        done: Future[None] = Future()
        self._draining = (done, clear_cache)
        if mode != "wait" or self._scheduler.drained:
            self._settle()
        return done

    def resume(self) -> None:
        """Ends a pause.

        Raises:
            RollspanError: why nothing can run.
        """
        self._core.weights.check_runnable()
        self._supersede()
        self._scheduler.pause_state = PauseState.UNPAUSED

    def after_step(self) -> None:
        """Answers the pause that waits, once nothing runs any more."""
        if self.drained:
            self._settle()

    def restore(self, state: PauseState) -> None:
        """Goes back to what clients had asked for before a :meth:`hold` that was not theirs."""
        if self._before_sleep is None:
            self._scheduler.pause_state = state
        else:
            self._before_sleep = state

    def freeze(self, before: PauseState) -> None:
        """Lets nothing run until :meth:`thaw`, which goes back to ``before``."""
        self._before_sleep = before
        self._scheduler.pause_state = PauseState.PAUSED_ALL

    def thaw(self) -> None:
        """Ends what :meth:`freeze` began."""
        if self._before_sleep is not None:
            self._scheduler.pause_state, self._before_sleep = self._before_sleep, None

    def _settle(self) -> None:
        assert self._draining is not None
        (done, clear_cache), self._draining = self._draining, None
        if clear_cache:
            self._scheduler.preempt_all()
        done.set_result(None)

    def _supersede(self) -> None:
        if self._draining is not None:
            (done, _), self._draining = self._draining, None
            text = "another pause or resume came before the running requests ended"
            done.set_exception(RollspanError(text, reason="pause_superseded"))
