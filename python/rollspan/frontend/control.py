"""Control routes: pause, abort, weight updates, and what the server says about itself.

They take any content type and an empty body, on GET too; unknown keys are named in ``X-Ignored-Fields``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import rollspan
from rollspan.errors import RollspanError, check_label, wrong_value
from rollspan.frontend.answers import JsonAnswer, read_body
from rollspan.frontend.metrics import CONTENT_TYPE
from rollspan.frontend.server_info import server_info
from rollspan.frontend.state import FrontendState
from rollspan.frontend.strict_json import parse_object
from rollspan.sampling_rules import check_neutral

logger = logging.getLogger("rollspan.frontend")

#: mode -> (mode of the engine, clear_cache when the caller does not say).
PAUSE_MODES = {
    "abort": ("abort", True),
    "wait": ("wait", True),
    "keep": ("keep", True),
    "retract": ("keep", True),
    "in_place": ("keep", False),
}
RESET_FLAGS = ("reset_running_requests", "reset_external")
BOOLEAN_WORDS = {"true": True, "1": True, "false": False, "0": False}


class ControlRoutes:
    """The handlers, one method a route."""

    def __init__(self, state: FrontendState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """GET /health"""
        self._state.live_engine()
        return JsonAnswer({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return JsonAnswer({"version": rollspan.__version__, "frontend": "python"})

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        engine = self._state.engine()
        card = {
            "id": engine.hello.model.name,
            "object": "model",
            "created": self._state.started,
            "owned_by": "rollspan",
            "root": engine.root,
            "parent": None,
            "max_model_len": engine.hello.limits.max_model_len,
        }
        return JsonAnswer({"object": "list", "data": [card]})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(self._state.engine().metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def pause(self, request: Request) -> Response:
        """POST /pause"""
        body = await self._body(request)
        mode, default = _pause_mode(request.query_params.get("mode", body.get("mode")))
        clear_cache = _flag("clear_cache", request.query_params.get("clear_cache"), body.get("clear_cache"), default)
        await self._state.live_engine().llm.pause_generation(mode, clear_cache)
        logger.info("paused: mode %s, clear_cache %s", mode, clear_cache)
        return self._answer({"status": "paused"}, body, ("mode", "clear_cache"))

    async def resume(self, request: Request) -> Response:
        """POST /resume"""
        body = await self._body(request)
        await self._state.live_engine().llm.resume_generation()
        logger.info("resumed")
        return self._answer({"status": "resumed"}, body)

    async def is_paused(self, request: Request) -> Response:
        """GET /is_paused"""
        body = await self._body(request)
        return self._answer({"is_paused": await self._state.live_engine().llm.is_paused()}, body)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """POST /reset_prefix_cache"""
        body = await self._body(request)
        flags = {name: _flag(name, request.query_params.get(name), body.get(name), False) for name in RESET_FLAGS}
        running, external = flags.values()
        success = await self._state.live_engine().llm.reset_prefix_cache(running, external)
        logger.info("prefix cache reset: running requests %s", "too" if running else "keep theirs")
        return self._answer({"success": success}, body, RESET_FLAGS)

    async def server_info(self, request: Request) -> Response:
        """GET /server_info"""
        body = await self._body(request)
        config_format = request.query_params.get("config_format", "json")
        if config_format not in ("json", "text"):
            raise wrong_value("config_format", "json or text", config_format)
        engine = self._state.live_engine()
        return self._answer(server_info(engine, await engine.llm.server_info()), body)

    async def abort_requests(self, request: Request) -> Response:
        """POST /abort_requests: the given ids, or all."""
        body = await self._body(request)
        return await self._abort(body, _request_ids(body.get("request_ids")))

    async def abort_given_requests(self, request: Request) -> Response:
        """POST /inference/v1/abort_requests: the given ids."""
        body = await self._body(request)
        ids = _request_ids(body.get("request_ids"))
        if ids is None:
            raise _missing("request_ids")
        return await self._abort(body, ids)

    async def start_weight_update(self, request: Request) -> Response:
        """POST /start_weight_update"""
        body = await self._body(request)
        await self._state.live_engine().llm.start_weight_update()
        logger.info("weight update started")
        return self._answer({"message": "Weight update started"}, body)

    async def update_weights(self, request: Request) -> Response:
        """POST /update_weights"""
        body = await self._body(request)
        check_neutral("weight_dir", body.get("weight_dir"), (None,))
        info = body.get("update_info")
        if info is None:
            raise _missing("update_info")
        if isinstance(info, list) and len(info) == 1:
            info = info[0]
        if not isinstance(info, dict):
            raise wrong_value("update_info", "an object or a list of one object", body["update_info"])
        await self._state.live_engine().llm.update_weights(info)
        logger.info("weights updated")
        return self._answer({"message": "Weights updated"}, body, ("update_info",))

    async def finish_weight_update(self, request: Request) -> Response:
        """POST /finish_weight_update"""
        body = await self._body(request)
        label = body.get("weight_version")
        label = None if label is None else check_label(label, "weight_version")
        result = await self._state.live_engine().llm.finish_weight_update(label)
        logger.info("weight update finished: commit %s, label %s", result["weight_commit"], result["weight_version"])
        return self._answer({"message": "Weight update finished", **result}, body, ("weight_version",))

    async def update_weight_version(self, request: Request) -> Response:
        """POST /update_weight_version: a new label for the weights in force."""
        body = await self._body(request)
        if body.get("new_version") is None:
            raise _missing("new_version")
        label = check_label(body["new_version"], "new_version")
        await self._state.live_engine().llm.update_weight_version(label)
        logger.info("weight version is now %s", label)
        return self._answer({"success": True, "new_version": label}, body, ("new_version",))

    async def weight_info(self, request: Request) -> Response:
        """GET /weight_info"""
        body = await self._body(request)
        return self._answer({"weight_version": await self._state.live_engine().llm.get_weight_version()}, body)

    async def _abort(self, body: dict[str, Any], ids: list[str] | None) -> Response:
        aborted = await self._state.live_engine().llm.abort(ids)
        logger.info("aborted %d requests", aborted)
        return self._answer({"status": "aborted", "aborted": aborted}, body, ("request_ids",))

    async def _body(self, request: Request) -> dict[str, Any]:
        """The body as an object, empty when there is none; refuses before reading while there is no engine."""
        self._state.live_engine()
        body = await read_body(request, self._state.options.max_body_bytes)
        return parse_object(body) if body.strip() else {}

    def _answer(self, value: Any, body: dict[str, Any], known: Collection[str] = ()) -> Response:
        ignored = tuple(sorted(name for name in body if name not in known))
        self._state.log_ignored(ignored)
        return JsonAnswer(value, ignored=ignored)


def _pause_mode(mode: Any) -> tuple[str, bool]:
    if mode is None:
        mode = "abort"
    if not isinstance(mode, str) or mode not in PAUSE_MODES:
        raise wrong_value("mode", "abort, wait, keep, retract or in_place", mode)
    return PAUSE_MODES[mode]


def _flag(name: str, query: str | None, in_body: Any, default: bool) -> bool:
    """A flag of the query, which wins, or of the body."""
    if query is not None:
        value = BOOLEAN_WORDS.get(query.lower())
        if value is None:
            raise wrong_value(name, "true or false", query)
        return value
    if in_body is None:
        return default
    if not isinstance(in_body, bool):
        raise wrong_value(name, "true or false", in_body)
    return in_body


def _request_ids(value: Any) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise wrong_value("request_ids", "a list of strings", value)
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise wrong_value("request_ids", "a list of strings", item, index)
    return value


def _missing(path: str) -> RollspanError:
    return RollspanError(f"{path} is required", reason="invalid_request", param=path)
