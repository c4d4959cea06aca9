"""What the frontend's routes share: its options, the engines behind it, and how many requests are open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollspan.errors import RollspanError, shown
from rollspan.frontend.engine import Engine
from rollspan.frontend.engine_set import Connect, EngineSet
from rollspan.frontend.metrics import MetricFamilies
from rollspan.frontend.set_update import SetUpdate
from rollspan.frontend.spool import Spool

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

    engines: tuple[str, ...]
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


class FrontendState:
    """Mutable state of one frontend process; everything runs on one event loop.

    Args:
        options: its flags.
        connect: reaches an engine.

    Attributes:
        engines: the engines behind it.
        update: the weight update that clients are doing.
        directory_update: held by updates that are one request: a second one waits for the first.
        metrics: what passed over the links; None before an engine has said hello.
    """

    def __init__(self, options: FrontendOptions, connect: Connect) -> None:
        self.options = options
        self.started = int(time.time())
        self.open_requests = 0
        self.engines = EngineSet(len(options.engines), connect)
        self.update = SetUpdate(self.engines)
        self.directory_update = asyncio.Lock()
        self.metrics: MetricFamilies | None = None
        self.spool: Spool | None = None
        self._shutting_down = False
        self._logged_names: set[str] = set()

    async def start(self) -> None:
        """Waits until the engines have said hello: from then on routes answer.

        Raises:
            RollspanError: one of them did not start.
        """
        await self.engines.start()
        if self.options.weights_spool is not None:
            size = default_upload_bytes(self.engines.first().hello.model.num_parameters)
            limit = self.options.max_weight_upload_bytes or size
            self.spool = Spool(self.options.weights_spool, limit, self.options.weight_update_timeout)
            self.spool.start()

    def shut_down(self) -> None:
        """From now on new requests are refused and /health says so."""
        self._shutting_down = True

    async def close(self) -> None:
        """Ends what is open, and deletes uploads."""
        await self.engines.close()
        if self.spool is not None:
            await self.spool.close()

    def check_live(self) -> Engine:
        """Refuses work that no engine could do.

        Returns:
            An engine whose limits and model are those of all.

        Raises:
            RollspanError: ``shutting_down``, ``engine_dead`` or ``engine_starting``.
        """
        if self._shutting_down:
            raise RollspanError("the server is shutting down", reason="shutting_down")
        self.engines.check_alive()
        return self.engines.first()

    def open_spool(self) -> Spool:
        """Uploads of weights, while there is an engine for them.

        Raises:
            RollspanError: no live engine, or ``not_found`` without a directory for them.
        """
        self.check_live()
        if self.spool is None:
            raise RollspanError("weight uploads are off: start the server with --weights-spool DIR", reason="not_found")
        return self.spool

    @contextmanager
    def open_request(self, request_id: str, session_id: str | None, rank: int | None) -> Iterator[Engine]:
        """Counts one generate request as open, in the engine that takes it.

        Raises:
            RollspanError: ``queue_full``, ``duplicate_request_id``, or no engine takes it.
        """
        limit = self.options.max_queued_requests
        if self.open_requests >= limit:
            raise RollspanError(f"{limit} requests are open, which is the limit", reason="queue_full")
        with self.engines.open_request(request_id, session_id, rank) as engine:
            self.open_requests += 1
            try:
                yield engine
            finally:
                self.open_requests -= 1

    def log_ignored(self, names: tuple[str, ...]) -> None:
        """Logs unknown field names, each once."""
        for name in map(shown, names):
            if name not in self._logged_names and len(self._logged_names) < MAX_LOGGED_NAMES:
                self._logged_names.add(name)
                logger.info("ignoring unknown request field %s", name)
