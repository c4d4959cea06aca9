"""Sleeping: the engine gives its memory back, and takes it again."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import Response

from rollspan.errors import wrong_value
from rollspan.frontend.control import Control
from rollspan.sampling_rules import is_int

logger = logging.getLogger("rollspan.frontend")

SLEEP_LEVELS = (1, 2)
SLEEP_MODES = ("abort", "wait", "keep")
WAKE_TAGS = ("weights", "kv_cache")


async def sleep(control: Control) -> Response:
    """POST /sleep: first what a pause of this mode does to requests, then the memory is free."""
    level = _level(control)
    mode = control.given("mode")
    mode = SLEEP_MODES[0] if mode is None else mode
    if mode not in SLEEP_MODES:
        raise wrong_value("mode", "abort, wait or keep", mode)
    outcomes = await control.call("sleep", level, mode)
    logger.info("sleeping: level %d, mode %s", level, mode)
    return control.answer({"status": "sleeping", "level": level}, ("level", "mode"), outcomes)


async def wake_up(control: Control) -> Response:
    """POST /wake_up: the given parts, or all; what is awake stays so."""
    tags = _tags(control.query.getlist("tags") or control.field("tags"))
    outcomes = await control.call("wake_up", tags)
    sleeping = await control.ask("is_sleeping")
    logger.info("woken up: %s", "all" if tags is None else ", ".join(tags))
    return control.answer({"status": "sleeping" if sleeping else "awake", "tags": tags}, ("tags",), outcomes)


async def is_sleeping(control: Control) -> Response:
    """GET /is_sleeping"""
    return control.answer({"is_sleeping": await control.ask("is_sleeping")})


def _level(control: Control) -> int:
    word = control.query.get("level")
    given = control.field("level") if word is None else {str(level): level for level in SLEEP_LEVELS}.get(word, word)
    if given is None:
        return 1
    if not is_int(given, SLEEP_LEVELS[0], SLEEP_LEVELS[-1]):
        raise wrong_value("level", "1 or 2", given)
    return int(given)


def _tags(given: Any) -> list[str] | None:
    if given is None or given == []:
        return None
    allowed = "a list of weights and kv_cache"
    if not isinstance(given, list):
        raise wrong_value("tags", allowed, given)
    for index, tag in enumerate(given):
        if tag not in WAKE_TAGS:
            raise wrong_value("tags", allowed, tag, index)
    return given
