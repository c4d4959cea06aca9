"""A cheap asyncio HTTP/1.1 client for servers of this API: JSON in and out, server-sent events streamed.

It costs about half the CPU time of a general client for a stream of small events, which matters when load generator and
server share a machine. Parsing is h11's; there are no redirects, proxies or cookies, which no server of this API uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import h11

_READ_BYTES = 65536
_MAX_HEADER_BYTES = 65536
_JSON_TYPE = ("Content-Type", "application/json")
_WRITE_BYTES = 1 << 20


class HttpError(Exception):
    """The server answered with an error, or could not be spoken to.

    ``status`` is the HTTP status (None without an answer, and in mid-stream the error's own code); ``reason`` is the
    server's stable code, or ``http_STATUS``, ``connection``, ``protocol``.
    """

    def __init__(self, message: str, *, status: int | None, reason: str) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason

    @classmethod
    def from_body(cls, status: int | None, body: Any) -> HttpError:
        """The error of an answer's decoded body, in this API's shape or in any other."""
        error = body.get("error") if isinstance(body, Mapping) else None
        if not isinstance(error, Mapping):
            return cls(f"HTTP {status}: {error or body or 'no body'}", status=status, reason=f"http_{status}")
        code = error.get("code")
        if status is None and isinstance(code, int):
            status = code
        return cls(str(error.get("message", error)), status=status, reason=str(error.get("reason", f"http_{status}")))


@dataclass(frozen=True)
class Content:
    """A body that is no JSON: pieces of bytes, which are sent without being joined, and headers that describe it."""

    pieces: Sequence[memoryview]
    headers: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, body: Any) -> Content:
        """``body`` itself when it is content, else its JSON; None is empty."""
        if isinstance(body, Content):
            return body
        return cls(()) if body is None else cls((memoryview(json.dumps(body).encode()),), (_JSON_TYPE,))


class HttpClient:
    """Client of one server; connections are kept open and used again, as many as there are requests at once."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """``url`` is the server's root, like ``http://127.0.0.1:8000``; ``api_key`` goes with each request.

        Raises:
            ValueError: it is no such URL.
        """
        self._url = _split_url(url)
        self._idle: list[_Connection] = []
        self._headers = [("Host", self._url.netloc.rpartition("@")[2]), ("User-Agent", "rollspan")]
        if api_key is not None:
            self._headers.append(("Authorization", f"Bearer {api_key}"))

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    async def request(self, method: str, path: str, body: Any = None, *, once: bool = False) -> Any:
        """Send one request and return the decoded JSON answer (None for an empty one).

        ``body`` is sent as JSON, or as it is where it is a :class:`Content`. A connection that was used
        before may turn out to be closed, and the request is sent again then; with ``once`` it has a new one.

        Raises:
            HttpError: any status but 2xx, an answer that is no JSON, or no answer.
        """
        async with self._exchange(method, path, body, once) as connection:
            data = b"".join([piece async for piece in connection.body()])
            answer = _decode(data, connection.status)
            if not 200 <= connection.status < 300:
                raise HttpError.from_body(connection.status, answer)
            return answer

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """POST and yield each server-sent event's decoded JSON until ``[DONE]``; close it (aclosing) to leave early.

        Raises:
            HttpError: any status but 2xx, an error event, a stream that ends without ``[DONE]``, or no answer.
        """
        async with self._exchange("POST", path, body) as connection:
            if not 200 <= connection.status < 300:
                data = b"".join([piece async for piece in connection.body()])
                raise HttpError.from_body(connection.status, _decode(data, connection.status))
            rest = b""
            done = False
            async for piece in connection.body():
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    if not event.startswith(b"data:"):
                        continue
                    data = event[5:].strip()
                    if data == b"[DONE]":
                        done = True
                        continue
                    chunk = _decode(data, None)
                    if "error" in chunk:
                        raise HttpError.from_body(None, chunk)
                    yield chunk
            if not done:
                raise HttpError("the stream ended without [DONE]", status=None, reason="protocol")

    @contextlib.asynccontextmanager
    async def _exchange(self, method: str, path: str, body: Any, once: bool = False) -> AsyncIterator[_Connection]:
        content = Content.of(body)
        length = sum(len(piece) for piece in content.pieces)
        headers = [*self._headers, ("Content-Length", str(length)), *content.headers]
        request = h11.Request(method=method, target=self._url.path.rstrip("/") + path, headers=headers)
        connection: _Connection | None = None
        try:
            connection = await self._send(request, content, once)
            yield connection
        except (OSError, EOFError) as error:
            message = f"{method} {path}: {str(error) or 'the server closed the connection'}"
            raise HttpError(message, status=None, reason="connection") from error
        except h11.RemoteProtocolError as error:
            raise HttpError(f"{method} {path}: {error}", status=None, reason="protocol") from error
        finally:
            if connection is not None and connection.reusable():
                self._idle.append(connection)
            elif connection is not None:
                connection.close()

    async def _send(self, request: h11.Request, content: Content, once: bool) -> _Connection:
        while self._idle and not once:
            connection = self._idle.pop()
            try:
                await connection.send(request, content)
            except BaseException as error:
                connection.close()
                if isinstance(error, OSError | EOFError):  # the server closed it while it was idle
                    continue
                raise
            return connection
        connection = await _Connection.open(self._url)
        try:
            await connection.send(request, content)
        except BaseException:
            connection.close()
            raise
        return connection


class _Connection:
    """One TCP connection and the state of the exchange on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEADER_BYTES)
        self.status = 0

    @classmethod
    async def open(cls, url: SplitResult) -> _Connection:
        secure = url.scheme == "https"
        port = url.port or (443 if secure else 80)
        context = ssl.create_default_context() if secure else None
        return cls(*await asyncio.open_connection(url.hostname, port, ssl=context))

    async def send(self, request: h11.Request, content: Content) -> None:
        """Send the request and wait for the answer's headers; sets ``status``."""
        head = self._state.send(request) or b""
        for piece in content.pieces:
            for start in range(0, len(piece), _WRITE_BYTES):
                part: Any = piece[start : start + _WRITE_BYTES]  # h11 only counts it, its type says bytes
                self._state.send_with_data_passthrough(h11.Data(data=part))
                self._writer.write(b"".join((head, part)) if head else part)
                head = b""
                await self._writer.drain()
        self._state.send(h11.EndOfMessage())
        self._writer.write(head)
        await self._writer.drain()
        event = await self._next_event()
        while not isinstance(event, h11.Response):
            event = await self._next_event()
        self.status = event.status_code

    async def body(self) -> AsyncIterator[bytes]:
        """The answer's body, as it comes."""
        event = await self._next_event()
        while isinstance(event, h11.Data):
            yield bytes(event.data)
            event = await self._next_event()

    async def _next_event(self) -> Any:
        event = self._state.next_event()
        while event is h11.NEED_DATA:
            data = await self._reader.read(_READ_BYTES)
            if not data and self._state.their_state is h11.SEND_RESPONSE:
                raise EOFError
            self._state.receive_data(data)
            event = self._state.next_event()
        if isinstance(event, h11.ConnectionClosed):
            raise EOFError
        return event

    def reusable(self) -> bool:
        """Whether the exchange is over and the server keeps the connection open; if so, it is ready for the next."""
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        return True

    def close(self) -> None:
        self._writer.close()


def _split_url(url: str) -> SplitResult:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    return parts


def _decode(data: bytes, status: int | None) -> Any:
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        shown = data[:80].decode(errors="replace")
        raise HttpError(f"answer is no JSON: {shown}", status=status, reason=f"http_{status}") from None
