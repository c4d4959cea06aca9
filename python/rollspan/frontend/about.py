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
        self._state.check_live()
        self._state.engines.check_fit()
        return JsonAnswer({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """GET /version"""
        return JsonAnswer({"version": rollspan.__version__, "frontend": "python"})

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        engine = self._state.engines.first()
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
        self._state.engines.first()
        assert self._state.metrics is not None
        return Response(self._state.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def server_info(control: Control) -> Response:
    """GET /server_info"""
    config_format = control.query.get("config_format", "json")
    if config_format not in ("json", "text"):
        raise wrong_value("config_format", "json or text", config_format)
    outcomes = await control.call("server_info")
    facts = [(outcome.engine, outcome.result) for outcome in outcomes if outcome.error is None]
    return control.answer(described(facts, len(control.state.engines)))


async def world_size(control: Control) -> Response:
    """GET /get_world_size: how many engines there are, or without ``include_dp`` how many ranks one has."""
    size = len(control.state.engines) if control.flag("include_dp", True) else 1
    return control.answer({"world_size": size}, ("include_dp",))
