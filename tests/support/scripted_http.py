"""An HTTP server that answers with exactly the bytes a test wants, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Pieces = Sequence["bytes | asyncio.Event | None"]
"""What to send: bytes in writes of their own, an event to wait for, None to close the connection."""


def answer(body: Any, status: int = 200) -> list[bytes]:
    """A JSON answer with a content length."""
    content = json.dumps(body).encode()
    return [b"HTTP/1.1 %d Scripted\r\nContent-Length: %d\r\n\r\n" % (status, len(content)) + content]


def event_stream(*events: Any, done: bool = True) -> list[bytes]:
    """Server-sent events in a chunked answer, each in a chunk of its own."""
    data = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    data += [b"data: [DONE]\n\n"] if done else []
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in data), b"0\r\n\r\n"]


@dataclass
class ScriptedServer:
    """What was asked of it, in order, and on how many connections."""

    url: str = ""
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def scripted_server(respond: Callable[[str, str, Any], Pieces]) -> AsyncIterator[ScriptedServer]:
    """A server whose answer to (method, path, decoded body) is ``respond``'s."""
    server = ScriptedServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split("\r\n")[0].split()
                length = next(
                    int(line.split(":")[1]) for line in head.split("\r\n") if "content-length" in line.lower()
                )
                content = await reader.readexactly(length)
                body = json.loads(content) if content else None
                server.requests.append((method, path, body))
                for piece in respond(method, path, body):
                    if piece is None:
                        return
                    if isinstance(piece, asyncio.Event):
                        await piece.wait()
                    else:
                        writer.write(piece)
                        await writer.drain()
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await listener.wait_closed()
