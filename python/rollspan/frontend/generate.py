"""POST /inference/v1/generate: collected or streamed, aborted as soon as its client is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from rollspan.admission import check_request_id
from rollspan.errors import RollspanError, shown, wrong_value
from rollspan.frontend import completion
from rollspan.frontend.answers import (
    ErrorAnswer,
    JsonAnswer,
    answer_headers,
    encode_json,
    header_text,
    internal_error,
    read_body,
)
from rollspan.frontend.engine import Engine
from rollspan.frontend.schemas import GenerateRequest, parse_generate
from rollspan.frontend.state import FrontendState
from rollspan.output_processor import RequestFailedError
from rollspan.outputs import RequestOutput
from rollspan.sampling_params import RequestOutputKind

RANK = "X-data-parallel-rank"
DONE = b"data: [DONE]\n\n"


class GenerateEndpoint:
    """The route as an ASGI application."""

    def __init__(self, state: FrontendState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = header_text(headers, "x-request-id")
        try:
            hello = self._state.check_live().hello
            _check_content_type(headers)
            body = await read_body(Request(scope, receive), self._state.options.max_body_bytes)
            request = parse_generate(body, request_id, hello, self._state.options.strict_requests)
            request_id = request.request_id or uuid.uuid4().hex
            self._state.log_ignored(request.ignored_fields)
            session_id, rank = header_text(headers, "x-session-id"), _rank(headers, len(self._state.engines))
            with self._state.open_request(request_id, session_id, rank) as engine:
                answer = _Answer(engine, request, request_id, session_id)
                work = answer.stream(send) if request.stream else answer.collect(scope, receive, send)
                await _run_until_disconnect(work, receive)
        except ClientDisconnect:
            return
        except RollspanError as error:
            await ErrorAnswer(error, request_id=_echo(request_id))(scope, receive, send)


class _Answer:
    """One validated request on its way through the engine."""

    def __init__(self, engine: Engine, request: GenerateRequest, request_id: str, session_id: str | None) -> None:
        self._engine = engine
        self._request = request
        self._request_id = request_id
        self._session_id = session_id
        self._created = int(time.time())

    def _outputs(self, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput, None]:
        request = self._request
        return self._engine.llm.generate(
            request.token_ids,
            dataclasses.replace(request.sampling_params, output_kind=kind),
            self._request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            session_id=self._session_id,
            provenance=request.provenance,
            include_weight_versions=request.include_weight_versions,
        )

    async def collect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits for the final output and answers with it."""
        async with aclosing(self._outputs(RequestOutputKind.FINAL_ONLY)) as outputs:
            final = await anext(outputs, None)
        if final is None:
            raise RollspanError("the engine ended the request without an output", reason="internal_error")
        value = completion.collected(self._request, final, self._engine.hello.model.name, self._created)
        answer = JsonAnswer(value, ignored=self._request.ignored_fields, request_id=self._request_id)
        await answer(scope, receive, send)

    async def stream(self, send: Send) -> None:
        """Sends one event per new piece; headers only after the first one, so that a refusal has its real status.

        While ``send`` waits for a slow reader, new tokens gather in the one pending output of this request.
        """
        async with aclosing(self._outputs(RequestOutputKind.DELTA)) as outputs:
            output: RequestOutput | None = await anext(outputs, None)
            await self._send_headers(send)
            chunks = _Chunks(self._request, self._engine.hello.model.name, self._created)
            try:
                while output is not None:
                    await _send_events(send, chunks.of(output))
                    output = await anext(outputs, None)
                await _send_events(send, chunks.last(self._request_id))
            except RollspanError as error:
                if isinstance(error, RequestFailedError) and error.partial_output is not None:
                    await _send_events(send, chunks.of(error.partial_output))
                await _send_events(send, [error.body()])
            except Exception as error:  # noqa: BLE001 - internal_error logs it; the headers are out
                await _send_events(send, [internal_error(error).body()])
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _send_headers(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
            *answer_headers(self._request.ignored_fields, self._request_id),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class _Chunks:
    """The chunks of one stream: what outputs become, and the counts that run along."""

    def __init__(self, request: GenerateRequest, model: str, created: int) -> None:
        self._request = request
        self._model = model
        self._created = created
        self._completion_tokens = 0
        self._cached_tokens = 0
        self._first = True
        self._ended: set[int] = set()

    def of(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """A chunk for each choice that has new tokens or has ended since its last chunk."""
        request = self._request
        self._cached_tokens = output.num_cached_tokens
        for choice in output.outputs:
            if choice.index in self._ended or not (choice.token_ids or choice.finished()):
                continue
            if choice.finished():
                self._ended.add(choice.index)
            self._completion_tokens += len(choice.token_ids)
            event = completion.chunk(request, output, choice, self._model, self._created)
            if self._first and request.return_token_ids:
                event["prompt_token_ids"] = request.token_ids
            self._first = False
            if request.continuous_usage_stats:
                event["usage"] = self._usage()
            yield event

    def last(self, request_id: str) -> Iterator[dict[str, Any]]:
        """The usage chunk, when it was asked for."""
        if self._request.include_usage:
            yield {"request_id": request_id, "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        return completion.usage(len(self._request.token_ids), self._completion_tokens, self._cached_tokens)


async def _send_events(send: Send, values: Iterable[Any]) -> None:
    for value in values:
        event = b"data: " + encode_json(value) + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": True})


async def _run_until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Runs ``work``; a client that goes away cancels it, which aborts its request in the engine."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_content_type(headers: Headers) -> None:
    value = headers.get("content-type")
    if value is not None and value.partition(";")[0].strip().lower() != "application/json":
        raise RollspanError(
            f"Content-Type must be application/json, got {shown(value)}", reason="unsupported_media_type"
        )


def _rank(headers: Headers, num_engines: int) -> int | None:
    """The engine that has to take the request, None for any."""
    value = header_text(headers, RANK)
    if value is None:
        return None
    rank = int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else num_engines
    if rank >= num_engines:
        raise wrong_value(RANK, f"an integer from 0 to {num_engines - 1}", value)
    return rank


def _echo(request_id: str | None) -> str | None:
    """The id to echo on an error; one that was refused is not repeated."""
    try:
        return None if request_id is None else check_request_id(request_id, "X-Request-Id")
    except RollspanError:
        return None
