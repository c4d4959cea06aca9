"""Control: the utility calls of PROTOCOL.md (pause, weights, cache, facts), run between two steps."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollspan.engine.scheduler import PauseState
from rollspan.errors import RollspanError, shown
from rollspan.protocol import messages as m

if TYPE_CHECKING:
    from rollspan.engine.core import EngineCore

logger = logging.getLogger("rollspan.engine")


class Control:
    """Runs the calls of frontends on an EngineCore and answers each exactly once, at once or (pause "wait") later."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._weights = core.weights
        self._draining: tuple[int, m.UtilityCall, bool] | None = None
        self._methods: dict[str, Callable[..., Any]] = {
            "resume_scheduler": self._resume,
            "is_scheduler_paused": lambda: self._scheduler.pause_state is not PauseState.UNPAUSED,
            "get_weight_version": lambda: self._weights.label,
            "get_weight_commit": lambda: self._weights.commit,
            "set_weight_version": self._weights.set_label,
            "start_weight_update": self._weights.start,
            "update_weights": self._weights.update,
            "finish_weight_update": self._finish_weight_update,
            "reset_prefix_cache": self._reset_prefix_cache,
            "server_info": core.facts,
        }

    @property
    def drained(self) -> bool:
        """True when a pause that waits can be answered now."""
        return self._draining is not None and self._scheduler.drained

    def call(self, client_index: int, call: m.UtilityCall) -> None:
        """Runs a method of PROTOCOL.md's table; its answer goes to the core's outbox."""
        if not call.method.startswith(("get_", "is_")):
            self._core.drain()
        if call.method == "pause_generation":
            self._pause(client_index, call)
        elif call.method not in self._methods:
            unknown = RollspanError(f"unknown method {shown(call.method)}", reason="unknown_method")
            self.refuse(client_index, call, unknown)
        else:
            self._reply(client_index, call, lambda: self._run_method(call))
            if not call.method.startswith(("get_", "is_")):
                self._core.report()

    def refuse(self, client_index: int, call: m.UtilityCall, error: RollspanError) -> None:
        """Answers a call that cannot be run."""
        self._reply(client_index, call, lambda: _raise(error))

    def after_step(self) -> None:
        """Answers the pause that waits, once nothing runs any more."""
        if self._draining is not None and self._scheduler.drained:
            client_index, call, clear_cache = self._draining
            self._draining = None
            self._reply(client_index, call, lambda: self._clear(clear_cache))

    def _run_method(self, call: m.UtilityCall) -> Any:
        method = self._methods[call.method]
        try:
            inspect.signature(method).bind(*call.args)
        except TypeError as error:
            text = f"{call.method} cannot be called with {len(call.args)} arguments: {error}"
            raise RollspanError(text, reason="invalid_request") from None
        return method(*call.args)

    def _reply(self, client_index: int, call: m.UtilityCall, work: Callable[[], Any]) -> None:
        try:
            reply = m.UtilityOutput(call.call_id, result=work())
        except RollspanError as error:
            reply = m.UtilityOutput(call.call_id, failure=error.message, reason=error.reason)
        except Exception as error:
            logger.exception("%s failed", call.method)
            text = f"{call.method} failed: {type(error).__name__}: {error}"
            reply = m.UtilityOutput(call.call_id, failure=text, reason="internal_error")
        self._core.send(client_index, None, utility_output=reply)

    def _pause(self, client_index: int, call: m.UtilityCall) -> None:
        args = [*call.args, *["abort", True][len(call.args) :]]
        mode, clear_cache = args[:2]
        if len(args) > 2 or mode not in ("abort", "wait", "keep") or not isinstance(clear_cache, bool):
            wrong = RollspanError(
                f"mode must be abort, wait or keep and clear_cache true or false, got {shown(call.args)}",
                reason="invalid_request",
                param="mode",
            )
            self.refuse(client_index, call, wrong)
            return
        self._supersede_drain()
        keep = mode == "keep"
        self._scheduler.pause_state = PauseState.PAUSED_ALL if keep else PauseState.PAUSED_NEW
        if mode == "abort":
            self._core.abort_all()
        if mode == "wait" and not self._scheduler.drained:
            self._draining = (client_index, call, clear_cache)
        else:
            self._reply(client_index, call, lambda: self._clear(clear_cache))
        self._core.report()

    def _clear(self, clear_cache: bool) -> None:
        if clear_cache:
            self._scheduler.preempt_all()

    def _supersede_drain(self) -> None:
        if self._draining is not None:
            client_index, call, _ = self._draining
            self._draining = None
            error = RollspanError(
                "another pause or resume came before the running requests ended", reason="pause_superseded"
            )
            self.refuse(client_index, call, error)

    def _resume(self) -> None:
        self._supersede_drain()
        self._scheduler.pause_state = PauseState.UNPAUSED

    def _reset_prefix_cache(self, reset_running: bool = False) -> bool:
        if reset_running:
            self._scheduler.preempt_all()
        self._scheduler.pool.reset()
        return True

    def _finish_weight_update(self, label: str | None = None) -> dict[str, Any]:
        started, before = time.monotonic(), self._weights.commit
        label, commit = self._weights.finish(label)
        if commit != before:
            self._core.weights_changed()
        logger.info(
            "weights %r in force, commit %d, swapped in %.1f ms", label, commit, 1e3 * (time.monotonic() - started)
        )
        return {"weight_version": label, "weight_commit": commit}


def _raise(error: RollspanError) -> None:
    raise error
