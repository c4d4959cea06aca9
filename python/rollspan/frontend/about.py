"""What the server says about itself."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

import rollspan
from rollspan.errors import wrong_value
from rollspan.frontend.answers import JsonAnswer
from rollspan.frontend.control import Control
from rollspan.frontend.metrics import CONTENT_TYPE
from rollspan.frontend.server_info import described
from rollspan.frontend.state import FrontendState


class AboutRoutes:
    """Routes without a body, one method each."""

    def __init__(self, state: FrontendState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        """GET /health: whether a request could be generated now."""
        self._state.live_engine().status.check()
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


async def server_info(control: Control) -> Response:
    """GET /server_info"""
    config_format = control.query.get("config_format", "json")
    if config_format not in ("json", "text"):
        raise wrong_value("config_format", "json or text", config_format)
    return control.answer(described(control.engine, await control.call("server_info")))


async def world_size(control: Control) -> Response:
    """GET /get_world_size: how many engines there are."""
    return control.answer({"world_size": 1})
