"""One frontend process: binds, serves, connects to its engine, and shuts down in good order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from rollspan.async_llm import AsyncLLM
from rollspan.client.base import DeathHandler
from rollspan.client.framed import FramedClient
from rollspan.errors import RollspanError
from rollspan.frontend.app import build_app
from rollspan.frontend.engine import Engine
from rollspan.frontend.metered_client import MeteredClient
from rollspan.frontend.metrics import MetricFamilies, Metrics
from rollspan.frontend.state import FrontendOptions, FrontendState

logger = logging.getLogger("rollspan.frontend")

#: Seconds that answers may take to leave once their requests were ended at shutdown.
FLUSH_SECONDS = 2
#: Seconds that an idle connection stays open; long, so that clients' pools rarely meet a connection being closed.
KEEP_ALIVE_SECONDS = 600
BACKLOG = 2048


class StartError(Exception):
    """The frontend cannot start; the message is one readable line."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `serve` decides when to exit and with which code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(options: FrontendOptions) -> int:
    """Serves until SIGINT or SIGTERM.

    Returns:
        The exit code: 0, or 1 when the engine never became ready.

    Raises:
        StartError: the address cannot be bound.
    """
    listener = _bind(options.host, options.port)
    state = FrontendState(options, lambda index, lost: _connect(state, index, lost))
    if options.watch_stdin:
        threading.Thread(target=_exit_with_parent, args=(state,), daemon=True).start()
    server = _Server(_uvicorn_config(state))
    host, port = listener.getsockname()[:2]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    connecting = asyncio.create_task(state.start())
    stopping = asyncio.create_task(stop.wait())
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _announce({"event": "listening", "address": address})
    logger.info("listening on http://%s", address)
    await asyncio.wait((connecting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if connecting.done() and not _became_ready(connecting):
        code = 1
    else:
        if connecting.done():
            _announce({"event": "ready"})
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    await _shut_down(state, server, serving, options)
    for task in (connecting, stopping):
        task.cancel()
    return code


def is_loopback(host: str) -> bool:
    """True when only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only on sockets that say they are TCP; with it, answers wait 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _uvicorn_config(state: FrontendState) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(state),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


async def _connect(state: FrontendState, index: int, lost: DeathHandler) -> Engine:
    """Waits for an engine."""
    options = state.options
    path = options.engines[index]
    link = await FramedClient.connect(path, options.engine_ready_timeout, name="python-frontend")
    hello = link.hello
    if hello.engine_index != index:
        await link.close()
        message = f"the engine at {path} says that it is number {hello.engine_index}, not {index}"
        raise RollspanError(message, reason="decode_error")
    root = hello.model.name
    served = options.served_model_name or root
    if state.metrics is None:
        state.metrics = MetricFamilies(served)
    client = MeteredClient(link, Metrics(state.metrics, hello), lost)
    llm = await AsyncLLM.from_client(client)
    logger.info("engine %d ready, serving %s", index, root)
    return Engine(llm, client, dataclasses.replace(hello, model=dataclasses.replace(hello.model, name=served)), root)


def _became_ready(connecting: asyncio.Task[None]) -> bool:
    error = connecting.exception()
    if error is None:
        return True
    if not isinstance(error, RollspanError):
        raise error
    logger.error("%s", error.message)
    return False


async def _shut_down(
    state: FrontendState, server: uvicorn.Server, serving: asyncio.Task[None], options: FrontendOptions
) -> None:
    """Refuses new work, waits for open requests, ends those that take too long, and lets their answers out."""
    logger.info("shutting down")
    state.shut_down()
    server.should_exit = True
    await asyncio.wait((serving,), timeout=options.shutdown_timeout)
    if not serving.done():
        logger.info("ending %d requests that are still open", state.open_requests)
    # Readers of open requests get what there is, waiting calls an error.
    await state.close()
    await asyncio.wait((serving,), timeout=FLUSH_SECONDS)
    if not serving.done():
        logger.warning("some connections did not take their answers in time")
        for connection in list(server.server_state.connections):
            connection.transport.abort()
    await serving


def _announce(event: dict[str, Any]) -> None:
    """One JSON line for the process that started this one."""
    sys.stdout.write(json.dumps(event, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def _exit_with_parent(state: FrontendState) -> None:
    """Ends this process as soon as the other end of stdin is closed: whoever started it is gone.

    Uploads are deleted first: they may lie in memory, where nobody would look for them any more.
    """
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    state.shut_down()
    try:
        if state.spool is not None:
            state.spool.clear()
    finally:
        os._exit(0)
