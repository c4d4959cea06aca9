"""The load generator's HTTP client: JSON answers, event streams however they are cut, errors with their reasons."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest

from rollspan.http_client import Content, HttpClient, HttpError
from support.scripted_http import Pieces, answer, event_stream, scripted_server


async def test_answers_are_decoded_and_the_connection_is_used_again() -> None:
    async with scripted_server(lambda *asked: answer({"asked": asked})) as server, HttpClient(server.url) as client:
        assert await client.request("GET", "/version") == {"asked": ["GET", "/version", None]}
        assert await client.request("POST", "/pause", {"mode": "keep"}) == {
            "asked": ["POST", "/pause", {"mode": "keep"}]
        }
        assert server.connections == 1


async def test_requests_at_once_have_a_connection_each() -> None:
    gate = asyncio.Event()

    def respond(method: str, path: str, body: Any) -> Pieces:
        if path == "/last":
            gate.set()
        return [gate, *answer(path)]

    async with scripted_server(respond) as server, HttpClient(server.url) as client:
        answers = await asyncio.gather(*(client.request("GET", path) for path in ("/first", "/last")))
        assert answers == ["/first", "/last"]
        assert server.connections == 2


async def test_an_empty_answer_is_none() -> None:
    respond = lambda *_: [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]  # noqa: E731
    async with scripted_server(respond) as server, HttpClient(server.url) as client:
        assert await client.request("POST", "/abort_requests") is None


async def test_pieces_of_bytes_are_one_body_with_its_own_headers_and_the_key_goes_with_it() -> None:
    received = bytearray()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.extend(await reader.readuntil(b"\r\n\r\n"))
        received.extend(await reader.readexactly(3_000_006))
        writer.write(answer(None)[0])
        writer.close()

    pieces = [memoryview(b"ab"), memoryview(b""), memoryview(b"c" * 3_000_000), memoryview(b"defg")]
    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with HttpClient(f"http://127.0.0.1:{port}", api_key="k") as client:
            assert await client.request("PUT", "/x", Content(pieces, [("Content-Range", "bytes 0-1/2")])) is None
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    assert body == b"ab" + b"c" * 3_000_000 + b"defg"
    lines = head.decode().lower().split("\r\n")
    assert {"content-length: 3000006", "content-range: bytes 0-1/2", "authorization: bearer k"} <= set(lines)
    assert not any(line.startswith("content-type") for line in lines)


async def test_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    async with scripted_server(lambda *_: [*answer(1), None]) as server, HttpClient(server.url) as client:
        assert [await client.request("GET", "/") for _ in range(3)] == [1, 1, 1]


async def test_a_request_that_is_cancelled_closes_its_connection_new_or_used_before() -> None:
    left = asyncio.Event()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(1000):
            if head.startswith(b"GET /once"):
                writer.write(answer(None)[0])
        left.set()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with HttpClient(f"http://127.0.0.1:{port}") as client:
            await client.request("GET", "/once")
            for _ in range(2):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.request("GET", "/never"), 0.05)
                await left.wait()
                left.clear()


async def test_a_request_that_must_not_be_repeated_has_a_connection_of_its_own() -> None:
    async with scripted_server(lambda *_: [*answer(1)]) as server, HttpClient(server.url) as client:
        for once in (False, False, True):
            await client.request("POST", "/", once=once)
        assert server.connections == 2


async def collect(client: HttpClient) -> list[Any]:
    async with aclosing(client.stream("/inference/v1/generate", {"stream": True})) as events:
        return [event async for event in events]


@pytest.mark.parametrize("cut", [1, 2, 7, 10_000])
async def test_events_are_found_however_the_network_cuts_them(cut: int) -> None:
    whole = b"".join(event_stream({"n": 1}, {"text": "a\n\nb"}, {"n": 3}))
    pieces = [whole[begin : begin + cut] for begin in range(0, len(whole), cut)]
    async with scripted_server(lambda *_: pieces) as server, HttpClient(server.url) as client:
        assert await collect(client) == [{"n": 1}, {"text": "a\n\nb"}, {"n": 3}]
        assert await collect(client) == [{"n": 1}, {"text": "a\n\nb"}, {"n": 3}]
        assert server.connections == 1


async def test_comments_between_events_are_skipped() -> None:
    pieces = event_stream({"n": 1})
    pieces.insert(1, b"e\r\n: keep-alive\n\n\r\n")
    async with scripted_server(lambda *_: pieces) as server, HttpClient(server.url) as client:
        assert await collect(client) == [{"n": 1}]


async def test_an_error_answer_carries_status_reason_and_message() -> None:
    body = {"error": {"message": "the engine is paused", "code": 503, "reason": "engine_paused"}}
    async with scripted_server(lambda *_: answer(body, 503)) as server, HttpClient(server.url) as client:
        for attempt in (client.request("POST", "/"), collect(client)):
            with pytest.raises(HttpError, match="the engine is paused") as caught:
                await attempt
            assert (caught.value.status, caught.value.reason) == (503, "engine_paused")


async def test_an_error_of_another_server_keeps_its_status() -> None:
    refusal = answer({"error": "Unauthorized"}, 401)
    async with scripted_server(lambda *_: refusal) as server, HttpClient(server.url) as client:
        with pytest.raises(HttpError, match="Unauthorized") as caught:
            await client.request("GET", "/")
    assert (caught.value.status, caught.value.reason) == (401, "http_401")


async def test_an_error_in_mid_stream_is_raised_after_the_events_before_it() -> None:
    error = {"error": {"message": "engine died", "code": 503, "reason": "engine_dead"}}
    seen = []
    async with scripted_server(lambda *_: event_stream({"n": 1}, error)) as server, HttpClient(server.url) as client:
        events = client.stream("/", {})
        seen.append(await anext(events))
        with pytest.raises(HttpError, match="engine died") as caught:
            await anext(events)
    assert seen == [{"n": 1}]
    assert (caught.value.status, caught.value.reason) == (503, "engine_dead")


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (event_stream({"n": 1}, done=False), "protocol"),
        ([*event_stream({"n": 1})[:2], None], "protocol"),
        ([None], "connection"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "protocol"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", None], "protocol"),
    ],
    ids=["no DONE", "cut off", "closed without an answer", "another protocol", "short body"],
)
async def test_a_broken_stream_is_an_error(pieces: Pieces, reason: str) -> None:
    async with scripted_server(lambda *_: pieces) as server, HttpClient(server.url) as client:
        with pytest.raises(HttpError) as caught:
            await collect(client)
        assert caught.value.reason == reason


async def test_an_answer_that_is_no_json_is_an_error() -> None:
    respond = lambda *_: [b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"]  # noqa: E731
    async with scripted_server(respond) as server, HttpClient(server.url) as client:
        with pytest.raises(HttpError, match="no JSON: <html>"):
            await client.request("GET", "/")


async def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with HttpClient(f"127.0.0.1:{taken.getsockname()[1]}") as client:
            with pytest.raises(HttpError, match="GET /version") as caught:
                await client.request("GET", "/version")
    assert caught.value.reason == "connection"


async def test_leaving_a_stream_early_closes_its_connection() -> None:
    never = asyncio.Event()
    pieces = [*event_stream({"n": 1})[:2], never]
    async with scripted_server(lambda *_: pieces if server.connections == 1 else answer("fresh")) as server:
        async with HttpClient(server.url) as client:
            async with aclosing(client.stream("/", {})) as events:
                assert await anext(events) == {"n": 1}
            assert await client.request("GET", "/") == "fresh"
            assert server.connections == 2
        never.set()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://", ""])
def test_what_is_no_http_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        HttpClient(url)
