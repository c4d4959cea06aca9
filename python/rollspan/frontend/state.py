"""What the frontend's routes share: its options, the engine behind it, and how many requests are open."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollspan.errors import RollspanError, shown
from rollspan.frontend.metrics import Metrics
from rollspan.protocol.messages import EngineHello

if TYPE_CHECKING:
    from rollspan.async_llm import AsyncLLM

logger = logging.getLogger("rollspan.frontend")

#: So many different ignored names are remembered (each is logged once).
MAX_LOGGED_NAMES = 1000


@dataclass(frozen=True)
class FrontendOptions:
    """The frontend's flags. Sizes in bytes, times in seconds; ``port`` 0 is any free one."""

    engine: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_body_bytes: int = 64 * 1024 * 1024
    max_queued_requests: int = 4096
    strict_requests: bool = False
    engine_ready_timeout: float = 600.0
    shutdown_timeout: float = 5.0
    watch_stdin: bool = False


@dataclass(frozen=True)
class Engine:
    """An engine that said hello. ``hello.model.name`` is the name served here; ``root`` the engine's own name."""

    llm: AsyncLLM
    hello: EngineHello
    root: str
    metrics: Metrics


class FrontendState:
    """Mutable state of one frontend process; everything runs on one event loop."""

    def __init__(self, options: FrontendOptions) -> None:
        self.options = options
        self.started = int(time.time())
        self.open_requests = 0
        self._engine: Engine | None = None
        self._failure: str | None = None
        self._shutting_down = False
        self._logged_names: set[str] = set()

    def engine_ready(self, llm: AsyncLLM, hello: EngineHello, metrics: Metrics) -> None:
        """The engine said hello: from now on routes answer."""
        root = hello.model.name
        served = dataclasses.replace(hello.model, name=self.options.served_model_name or root)
        self._engine = Engine(llm, dataclasses.replace(hello, model=served), root, metrics)

    def engine_failed(self, error: RollspanError) -> None:
        """The link to the engine has ended: from now on requests find a dead engine, whatever ended it."""
        self._failure = self._failure or error.message

    def shut_down(self) -> None:
        """From now on new requests are refused and /health says so."""
        self._shutting_down = True

    def engine(self) -> Engine:
        """The engine, dead or alive, once it has said hello.

        Raises:
            RollspanError: ``engine_starting``.
        """
        if self._engine is None:
            raise RollspanError("the engine is still starting", reason="engine_starting")
        return self._engine

    @property
    def llm(self) -> AsyncLLM | None:
        """The engine's API, None before it has said hello."""
        return None if self._engine is None else self._engine.llm

    def live_engine(self) -> Engine:
        """The engine when it can take requests.

        Raises:
            RollspanError: ``shutting_down``, ``engine_dead`` or ``engine_starting``.
        """
        if self._shutting_down:
            raise RollspanError("the server is shutting down", reason="shutting_down")
        if self._failure is not None:
            raise RollspanError(self._failure, reason="engine_dead")
        return self.engine()

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Counts one generate request as open.

        Raises:
            RollspanError: ``queue_full``.
        """
        limit = self.options.max_queued_requests
        if self.open_requests >= limit:
            raise RollspanError(f"{limit} requests are open, which is the limit", reason="queue_full")
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1

    def log_ignored(self, names: tuple[str, ...]) -> None:
        """Logs unknown field names, each once."""
        for name in map(shown, names):
            if name not in self._logged_names and len(self._logged_names) < MAX_LOGGED_NAMES:
                self._logged_names.add(name)
                logger.info("ignoring unknown request field %s", name)
