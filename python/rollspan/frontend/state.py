"""What the frontend's routes share: its options, the engine behind it, and how many requests are open."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollspan.errors import RollspanError, shown
from rollspan.frontend.metered_client import MeteredClient
from rollspan.frontend.metrics import Metrics
from rollspan.frontend.spool import Spool
from rollspan.frontend.status import EngineStatus
from rollspan.protocol.messages import EngineHello

if TYPE_CHECKING:
    from rollspan.async_llm import AsyncLLM

logger = logging.getLogger("rollspan.frontend")

#: So many different ignored names are remembered (each is logged once).
MAX_LOGGED_NAMES = 1000


def default_upload_bytes(num_parameters: int) -> int:
    """Bytes that uploads may take together: two models of float32, and 64 MiB for their headers."""
    return 2 * 4 * num_parameters + 64 * 1024 * 1024


@dataclass(frozen=True)
class FrontendOptions:
    """The frontend's flags. Sizes in bytes, times in seconds; ``port`` 0 is any free one.

    ``max_weight_upload_bytes`` None is what two copies of the model in float32 take, and some room for file headers.
    """

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
    weights_spool: Path | None = None
    max_weight_upload_bytes: int | None = None
    weight_update_timeout: float = 600.0


@dataclass(frozen=True)
class Engine:
    """An engine that said hello.

    Attributes:
        llm: generates and aborts.
        client: its link, for control calls.
        hello: with the name served here as that of the model.
        root: the engine's own name of the model.
        metrics: what passed over the link.
        status: what the engine last said about itself.
    """

    llm: AsyncLLM
    client: MeteredClient
    hello: EngineHello
    root: str

    @property
    def metrics(self) -> Metrics:
        return self.client.metrics

    @property
    def status(self) -> EngineStatus:
        return self.client.status


class FrontendState:
    """Mutable state of one frontend process; everything runs on one event loop."""

    def __init__(self, options: FrontendOptions) -> None:
        self.options = options
        self.started = int(time.time())
        self.open_requests = 0
        #: Held by updates that are one request: a second one waits for the first.
        self.directory_update = asyncio.Lock()
        self._engine: Engine | None = None
        self._spool: Spool | None = None
        self._failure: str | None = None
        self._shutting_down = False
        self._logged_names: set[str] = set()

    def engine_ready(self, llm: AsyncLLM, client: MeteredClient) -> None:
        """The engine said hello: from now on routes answer."""
        hello = client.hello
        root = hello.model.name
        served = dataclasses.replace(hello.model, name=self.options.served_model_name or root)
        self._engine = Engine(llm, client, dataclasses.replace(hello, model=served), root)
        if self.options.weights_spool is not None:
            self._spool = Spool(
                self.options.weights_spool,
                self.options.max_weight_upload_bytes or default_upload_bytes(hello.model.num_parameters),
                self.options.weight_update_timeout,
            )

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

    @property
    def spool(self) -> Spool | None:
        """Uploads of weights; None while there is no engine, and without a directory for them."""
        return self._spool

    def open_spool(self) -> Spool:
        """Uploads of weights, on a live engine.

        Raises:
            RollspanError: no live engine, or ``not_found`` without a directory for them.
        """
        self.live_engine()
        if self._spool is None:
            raise RollspanError("weight uploads are off: start the server with --weights-spool DIR", reason="not_found")
        return self._spool

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
