"""Pausing and resuming generation, ending requests, and forgetting cached prefixes."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import Response

from rollspan.errors import wrong_value
from rollspan.frontend.control import Control

logger = logging.getLogger("rollspan.frontend")

#: mode -> (mode of the engine, clear_cache when the caller does not say). The last two are spellings of SGLang.
PAUSE_MODES = {
    "abort": ("abort", True),
    "wait": ("wait", True),
    "keep": ("keep", True),
    "retract": ("keep", True),
    "in_place": ("keep", False),
}
RUNNING = "reset_running_requests"
EXTERNAL = "reset_external"


async def pause(control: Control) -> Response:
    """POST /pause: answers when the state holds, which in wait mode may take long."""
    mode, clears = _pause_mode(control.given("mode"))
    clear_cache = control.flag("clear_cache", clears)
    outcomes = await control.call("pause_generation", mode, clear_cache)
    logger.info("paused: mode %s, clear_cache %s", mode, clear_cache)
    return control.answer({"status": "paused"}, ("mode", "clear_cache"), outcomes)


async def resume(control: Control) -> Response:
    """POST /resume"""
    outcomes = await control.call("resume_scheduler")
    logger.info("resumed")
    return control.answer({"status": "resumed"}, (), outcomes)


async def is_paused(control: Control) -> Response:
    """GET /is_paused"""
    return control.answer({"is_paused": await control.ask("is_scheduler_paused")})


async def reset_prefix_cache(control: Control) -> Response:
    """POST /reset_prefix_cache; there is no cache outside the engine, so ``reset_external`` has nothing to do."""
    running = control.flag(RUNNING, False)
    control.flag(EXTERNAL)
    outcomes = await control.call("reset_prefix_cache", running)
    success = all(outcome.result for outcome in outcomes if outcome.error is None)
    logger.info("prefix cache reset: running requests %s", "too" if running else "keep theirs")
    return control.answer({"success": success}, (RUNNING, EXTERNAL), outcomes)


async def abort_requests(control: Control) -> Response:
    """POST /abort_requests: the given ids, or all."""
    return await _abort(control, control.field("request_ids"))


async def abort_given_requests(control: Control) -> Response:
    """POST /inference/v1/abort_requests: the given ids."""
    return await _abort(control, control.required("request_ids"))


async def _abort(control: Control, given: Any) -> Response:
    ids = _request_ids(given)
    aborted = sum([await engine.llm.abort(ids) for engine in control.state.engines.callable()])
    logger.info("aborted %d requests", aborted)
    return control.answer({"status": "aborted", "aborted": aborted}, ("request_ids",))


def _pause_mode(mode: Any) -> tuple[str, bool]:
    if mode is None:
        mode = "abort"
    if not isinstance(mode, str) or mode not in PAUSE_MODES:
        raise wrong_value("mode", "abort, wait, keep, retract or in_place", mode)
    return PAUSE_MODES[mode]


def _request_ids(value: Any) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong_value("request_ids", "a list of strings", value)
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise wrong_value("request_ids", "a list of strings", item, index)
    return value
