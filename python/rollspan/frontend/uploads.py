"""Uploads of weights: files that come in pieces, over any number of connections, before the engine reads them."""

from __future__ import annotations

import logging
import re
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from rollspan.errors import wrong_value
from rollspan.frontend.answers import JsonAnswer, header_text
from rollspan.frontend.byte_ranges import CONTENT_RANGE, parse_content_range
from rollspan.frontend.state import FrontendState
from rollspan.frontend.upload_chunk import UploadChunk

logger = logging.getLogger("rollspan.frontend")

CHECKSUM = "X-Checksum"
_CHECKSUM = re.compile(r"blake3:([0-9a-f]{64})")


#: Stands for an encoded slash while a path is matched; no decoded path holds it.
_SLASH = "\ud800"


class UploadRoute(Route):
    """A route whose names may hold encoded slashes, which are no part of the path: such names are refused whole."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if b"%2f" not in scope["raw_path"].lower():
            return super().matches(scope)
        segments = scope["raw_path"].decode("ascii").split("/")
        path = "/".join(unquote(segment).replace("/", _SLASH) for segment in segments)
        match, child = super().matches({**scope, "path": path})
        names = {name: value.replace(_SLASH, "/") for name, value in child.get("path_params", {}).items()}
        return match, ({**child, "path_params": names} if child else child)


class UploadRoutes:
    """The routes below /weight_uploads."""

    def __init__(self, state: FrontendState) -> None:
        self._state = state

    async def put(self, request: Request) -> Response:
        """PUT /weight_uploads/{upload}/{file}: a range of a file, or a whole one."""
        spool = self._state.open_spool()
        upload, name = request.path_params["upload"], request.path_params["file"]
        headers = request.headers
        span = header_text(headers, CONTENT_RANGE)
        length = headers.get("content-length")
        with UploadChunk(
            spool,
            upload,
            name,
            None if span is None else parse_content_range(span),
            None if length is None else int(length),
            _checksum(header_text(headers, CHECKSUM)),
        ) as chunk:
            async for piece in request.stream():
                await chunk.write(piece)
            await chunk.finish()
        return JsonAnswer({"upload": upload, "file": name, **chunk.file.to_json()})

    async def on_upload(self, request: Request) -> Response:
        """GET or DELETE /weight_uploads/{upload}"""
        return await (self.delete(request) if request.method == "DELETE" else self.get(request))

    async def get(self, request: Request) -> Response:
        """GET /weight_uploads/{upload}: what of its files is there."""
        upload = self._state.open_spool().find(request.path_params["upload"])
        files = {name: file.to_json() for name, file in sorted(upload.files.items())}
        return JsonAnswer({"upload": upload.name, "files": files})

    async def delete(self, request: Request) -> Response:
        """DELETE /weight_uploads/{upload}"""
        name = request.path_params["upload"]
        await self._state.open_spool().delete(name)
        logger.info("upload %s deleted", name)
        return JsonAnswer({"status": "deleted"})


def _checksum(text: str | None) -> str | None:
    if text is None:
        return None
    match = _CHECKSUM.fullmatch(text.strip())
    if match is None:
        raise wrong_value(CHECKSUM, "blake3: and 64 lower-case hex digits", text)
    return match[1]
