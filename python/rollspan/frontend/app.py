"""The ASGI application: routes to handlers, and every failure to a JSON error."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rollspan.errors import RollspanError
from rollspan.frontend import pause, sleep, weights
from rollspan.frontend.about import AboutRoutes, server_info, world_size
from rollspan.frontend.answers import ErrorAnswer, internal_error
from rollspan.frontend.control import Handler, control_route
from rollspan.frontend.generate import GenerateEndpoint
from rollspan.frontend.state import FrontendState
from rollspan.frontend.uploads import UploadRoute, UploadRoutes

CONTROL_GET: dict[str, Handler] = {
    "/is_paused": pause.is_paused,
    "/is_sleeping": sleep.is_sleeping,
    "/weight_info": weights.info,
    "/weight_history": weights.history,
    "/server_info": server_info,
    "/get_world_size": world_size,
}
CONTROL_POST: dict[str, Handler] = {
    "/pause": pause.pause,
    "/resume": pause.resume,
    "/reset_prefix_cache": pause.reset_prefix_cache,
    "/abort_requests": pause.abort_requests,
    "/inference/v1/abort_requests": pause.abort_given_requests,
    "/sleep": sleep.sleep,
    "/wake_up": sleep.wake_up,
    "/init_weight_transfer_engine": weights.init_transfer,
    "/shutdown_weight_transfer_engine": weights.shut_down_transfer,
    "/start_weight_update": weights.start,
    "/start_draft_weight_update": weights.start_draft,
    "/update_weights": weights.update,
    "/finish_weight_update": weights.finish,
    "/abort_weight_update": weights.abort,
    "/update_weight_version": weights.relabel,
    "/weight_checker": weights.check,
}


def build_app(state: FrontendState) -> Starlette:
    """The application over ``state``."""
    about, uploads = AboutRoutes(state), UploadRoutes(state)
    plain = {
        "/health": about.health,
        "/version": about.version,
        "/v1/models": about.models,
        "/metrics": about.metrics,
    }
    app = Starlette(
        routes=[
            Route("/inference/v1/generate", GenerateEndpoint(state), methods=["POST"]),
            *(Route(path, handler, methods=["GET"]) for path, handler in plain.items()),
            *(Route(path, control_route(state, handler), methods=["GET"]) for path, handler in CONTROL_GET.items()),
            *(Route(path, control_route(state, handler), methods=["POST"]) for path, handler in CONTROL_POST.items()),
            UploadRoute("/weight_uploads/{upload}/{file}", uploads.put, methods=["PUT"]),
            UploadRoute("/weight_uploads/{upload}", uploads.on_upload, methods=["GET", "DELETE"]),
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
    answer.headers["allow"] = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
    return answer


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return ErrorAnswer(internal_error(error))
