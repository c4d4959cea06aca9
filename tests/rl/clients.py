"""What may be in front of an engine."""

from __future__ import annotations

from rollspan.async_llm import AsyncLLM
from rollspan.client.framed import FramedClient
from support.drivers import AsyncLLMDriver, Driver, HttpDriver
from support.servers import Server

START_SECONDS = 100.0


async def drive(kind: str, server: Server) -> Driver:
    """A client of this kind, connected."""
    if kind == "async_llm":
        client = await FramedClient.connect(server.engine.socket_path, START_SECONDS)
        return AsyncLLMDriver(await AsyncLLM.from_client(client))
    return HttpDriver(kind, server.frontend(kind).url)
