"""The ASGI application: routes to handlers, and every failure to a JSON error."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rollspan.errors import RollspanError
from rollspan.frontend.answers import ErrorAnswer, internal_error
from rollspan.frontend.control import ControlRoutes
from rollspan.frontend.generate import GenerateEndpoint
from rollspan.frontend.state import FrontendState


def build_app(state: FrontendState) -> Starlette:
    """The application over ``state``."""
    control = ControlRoutes(state)
    get = {
        "/health": control.health,
        "/version": control.version,
        "/v1/models": control.models,
        "/metrics": control.metrics,
        "/is_paused": control.is_paused,
        "/weight_info": control.weight_info,
        "/server_info": control.server_info,
    }
    post = {
        "/pause": control.pause,
        "/resume": control.resume,
        "/reset_prefix_cache": control.reset_prefix_cache,
        "/abort_requests": control.abort_requests,
        "/inference/v1/abort_requests": control.abort_given_requests,
        "/start_weight_update": control.start_weight_update,
        "/update_weights": control.update_weights,
        "/finish_weight_update": control.finish_weight_update,
        "/update_weight_version": control.update_weight_version,
    }
    app = Starlette(
        routes=[
            Route("/inference/v1/generate", GenerateEndpoint(state), methods=["POST"]),
            *(Route(path, handler, methods=["GET"]) for path, handler in get.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in post.items()),
        ],
        exception_handlers={
            RollspanError: _rollspan_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _unexpected_error,
        },
    )
    app.router.redirect_slashes = False
    return app


async def _rollspan_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RollspanError)
    return ErrorAnswer(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return ErrorAnswer(RollspanError(f"{request.url.path} does not exist", reason="not_found"))
    answer = ErrorAnswer(
        RollspanError(f"{request.url.path} does not take {request.method}", reason="method_not_allowed")
    )
    answer.headers.update(error.headers or {})
    return answer


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return ErrorAnswer(internal_error(error))
