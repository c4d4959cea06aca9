"""Requests in, answers out: bounded bodies, compact JSON, error bodies, and header values that HTTP can carry."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from rollspan.errors import RollspanError

logger = logging.getLogger("rollspan.frontend")

MAX_IGNORED_HEADER = 1024
RETRY_STATUSES = (429, 503)

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode_json(value: Any) -> bytes:
    """``value`` as compact UTF-8 JSON."""
    return _ENCODER.encode(value).encode("utf-8")


class JsonAnswer(Response):
    """A JSON answer; ``ignored`` are the request's unknown fields, ``request_id`` is echoed."""

    def __init__(
        self, value: Any, status_code: int = 200, *, ignored: Iterable[str] = (), request_id: str | None = None
    ) -> None:
        super().__init__(encode_json(value), status_code, media_type="application/json")
        self.raw_headers.extend(answer_headers(ignored, request_id))


class ErrorAnswer(JsonAnswer):
    """The error body of the HTTP contract, with ``Retry-After`` where trying again may help."""

    def __init__(self, error: RollspanError, *, request_id: str | None = None) -> None:
        super().__init__(error.body(), error.status, request_id=request_id)
        if error.status in RETRY_STATUSES:
            self.raw_headers.append((b"retry-after", b"1"))


def answer_headers(ignored: Iterable[str] = (), request_id: str | None = None) -> list[tuple[bytes, bytes]]:
    """``X-Ignored-Fields`` and ``X-Request-Id`` as raw headers, those that apply."""
    headers: list[tuple[bytes, bytes]] = []
    if request_id is not None:
        headers.append((b"x-request-id", _header_value(request_id)))
    value = ""
    for name in ignored:
        longer = f"{value},{_escape(name)}" if value else _escape(name)
        if len(longer) > MAX_IGNORED_HEADER:
            break
        value = longer
    if value:
        headers.append((b"x-ignored-fields", value.encode("ascii")))
    return headers


def _escape(name: str) -> str:
    """Percent-encodes everything but ``A-Za-z0-9_.-``."""
    return quote(name, safe="").replace("~", "%7E")


def _header_value(text: str) -> bytes:
    """``text`` as UTF-8; white space at its ends is percent-encoded, because header values lose it."""
    inner = text.strip(" ")
    start = len(text) - len(text.lstrip(" "))
    return ("%20" * start + inner + "%20" * (len(text) - start - len(inner))).encode("utf-8")


def internal_error(error: Exception) -> RollspanError:
    """The answer to a bug of ours: its id leads to the traceback in the log."""
    incident = uuid.uuid4().hex
    logger.error("internal error %s", incident, exc_info=error)
    return RollspanError(f"internal error, in the server's log as {incident}", reason="internal_error")


def header_text(headers: Headers, name: str) -> str | None:
    """A header as UTF-8; what is none is replaced."""
    value = headers.get(name)
    return None if value is None else value.encode("latin-1").decode("utf-8", "replace")


async def read_body(request: Request, limit: int) -> bytes:
    """Reads the body, and never holds more than ``limit`` bytes of it.

    Raises:
        RollspanError: ``body_too_large``.
        starlette.requests.ClientDisconnect: the client went away.
    """
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(limit: int) -> RollspanError:
    return RollspanError(f"request body must be at most {limit} bytes", reason="body_too_large")
