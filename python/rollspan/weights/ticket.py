"""Ticket: what lets a job of the worker go on, and stops it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollspan.errors import RollspanError
from rollspan.weights.transfer.base import Transport


class Ticket:
    """Permission to go on with what was begun: the engine's thread takes it back, the worker asks at every tensor.

    Attributes:
        cancelled: the work is not wanted any more.
        moved: monotonic seconds when something was last received.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.moved = time.monotonic()
        self._transport: Transport | None = None
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Makes whoever works on it stop soon; what :meth:`holding` guards happens before this or never."""
        with self._lock:
            self.cancelled = True
            transport = self._transport
        if transport is not None:
            transport.cancel()

    def note(self) -> None:
        """Somebody has made progress."""
        self.moved = time.monotonic()

    def check(self) -> None:
        """Notes progress.

        Raises:
            RollspanError: ``update_aborted``.
        """
        self.note()
        if self.cancelled:
            raise RollspanError("the weight update was aborted", reason="update_aborted")

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, it is not cancelled.

        Raises:
            RollspanError: ``update_aborted``.
        """
        with self._lock:
            self.check()
            yield

    @contextmanager
    def using(self, transport: Transport) -> Iterator[None]:
        """Inside, :meth:`cancel` reaches the transport.

        Raises:
            RollspanError: ``update_aborted``.
        """
        with self.holding():
            self._transport = transport
        try:
            yield
        finally:
            self._transport = None
