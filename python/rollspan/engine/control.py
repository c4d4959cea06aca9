"""Control: the utility calls of PROTOCOL.md (pause, weights, sleep, cache, facts), run between two steps."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rollspan.engine.pause import Pause
from rollspan.engine.scheduler import PauseState
from rollspan.engine.sleep import Sleep
from rollspan.errors import RollspanError, shown
from rollspan.protocol import messages as m
from rollspan.weights.check import check_weights

if TYPE_CHECKING:
    from rollspan.engine.core import EngineCore

logger = logging.getLogger("rollspan.engine")


class Control:
    """Runs the calls of frontends on an EngineCore and answers each exactly once.

    A method that returns a future is answered when that is done; other calls and steps go on meanwhile.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._pause = Pause(core)
        weights = self._weights = core.weights
        sleep = Sleep(core, self._pause)
        self._open: list[tuple[int, m.UtilityCall, Future[Any]]] = []
        self._methods: dict[str, Callable[..., Any]] = {
            "pause_generation": self._pause.hold,
            "resume_scheduler": self._pause.resume,
            "is_scheduler_paused": lambda: self._scheduler.pause_state is not PauseState.UNPAUSED,
            "get_weight_version": lambda: weights.label,
            "get_weight_commit": lambda: weights.commit,
            "get_weight_digest": weights.digest_known,
            "get_weight_history": weights.describe,
            "set_weight_version": weights.set_label,
            "init_weight_transfer_engine": weights.init,
            "shutdown_weight_transfer_engine": weights.shut_down_transfer,
            "start_weight_update": lambda options=None: weights.start(options, quiet=self._pause.quiet),
            "update_weights": weights.update,
            "prepare_weight_update": weights.prepare,
            "finish_weight_update": weights.finish,
            "abort_weight_update": weights.abort,
            "check_weights": lambda action, baseline=None: check_weights(
                weights, action, baseline, quiet=self._pause.quiet
            ),
            "sleep": sleep.fall_asleep,
            "wake_up": sleep.wake_up,
            "is_sleeping": lambda: sleep.asleep,
            "reset_prefix_cache": self._reset_prefix_cache,
            "server_info": core.facts,
        }

    def has_work(self) -> bool:
        """True when :meth:`before_step` or :meth:`after_step` has something to do."""
        return self._weights.due() or self._pause.drained or any(future.done() for _, _, future in self._open)

    def call(self, client_index: int, call: m.UtilityCall) -> None:
        """Runs a method of PROTOCOL.md's table; its answer goes to the core's outbox."""
        changes = not call.method.startswith(("get_", "is_"))
        if changes:
            self._core.drain()
        self._answer(client_index, call, lambda: self._run_method(call))
        if changes:
            self._core.report()

    def refuse(self, client_index: int, call: m.UtilityCall, error: RollspanError) -> None:
        """Answers a call that cannot be run."""
        self._answer(client_index, call, lambda: _raise(error))

    def before_step(self) -> None:
        """Goes on with what was asked of the weights; a commit takes place in here."""
        if self._weights.due():
            self._weights.poll()

    def after_step(self) -> None:
        """Answers what has been done meanwhile."""
        self._pause.after_step()
        if not self._open:
            return
        done = [entry for entry in self._open if entry[2].done()]
        self._open = [entry for entry in self._open if not entry[2].done()]
        for client_index, call, future in done:
            self._answer(client_index, call, future.result)

    def _run_method(self, call: m.UtilityCall) -> Any:
        if call.method not in self._methods:
            raise RollspanError(f"unknown method {shown(call.method)}", reason="unknown_method")
        method = self._methods[call.method]
        try:
            inspect.signature(method).bind(*call.args)
        except TypeError as error:
            text = f"{call.method} cannot be called with {len(call.args)} arguments: {error}"
            raise RollspanError(text, reason="invalid_request") from None
        return method(*call.args)

    def _answer(self, client_index: int, call: m.UtilityCall, work: Callable[[], Any]) -> None:
        try:
            result = work()
            if isinstance(result, Future) and not result.done():
                self._open.append((client_index, call, result))
                return
            reply = m.UtilityOutput(call.call_id, result=result.result() if isinstance(result, Future) else result)
        except RollspanError as error:
            reply = m.UtilityOutput(call.call_id, failure=error.message, reason=error.reason)
        except Exception as error:
            logger.exception("%s failed", call.method)
            text = f"{call.method} failed: {type(error).__name__}: {error}"
            reply = m.UtilityOutput(call.call_id, failure=text, reason="internal_error")
        self._core.outbox.put(client_index, None, utility_output=reply)

    def _reset_prefix_cache(self, reset_running: bool = False) -> bool:
        if reset_running:
            self._scheduler.preempt_all()
        self._scheduler.pool.reset()
        return True


def _raise(error: RollspanError) -> None:
    raise error
