"""Operations: what is asked of the weights, in order, each with a part on the worker and an end between steps."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollspan.errors import RollspanError
from rollspan.weights.ticket import Ticket
from rollspan.weights.worker import Worker

logger = logging.getLogger("rollspan.engine")

#: Seconds that a transfer has to end in after it was told to.
STUCK_SECONDS = 10.0


def _as_it_is(result: Any) -> Any:
    return result


@dataclass(eq=False)
class Operation:
    """One call.

    Attributes:
        begin: on the engine's thread, when all before it have ended; returns what the worker has to do, None for
            nothing. What it raises is the answer.
        end: on the engine's thread, with the worker's result; returns the answer.
        failed: on the engine's thread, when the worker or ``end`` has raised.
        owner: whose it is, for :meth:`Operations.cancel`.
        sender: its ticket, when it waits for somebody outside.
        answer: the caller's.
    """

    begin: Callable[[], Callable[[], Any] | None]
    end: Callable[[Any], Any] = _as_it_is
    failed: Callable[[RollspanError], None] | None = None
    owner: object = None
    sender: Ticket | None = None
    answer: Future[Any] = field(default_factory=Future)
    job: Future[Any] | None = None


class Operations:
    """A queue of them, of which the first one runs. For the engine's thread only."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._queue: deque[Operation] = deque()
        self._left: tuple[Future[Any], float] | None = None  # a transfer that was told to stop, and when

    @property
    def busy(self) -> bool:
        """One is running."""
        return bool(self._queue)

    @property
    def due(self) -> bool:
        """The worker has done its part of the one that runs."""
        return bool(self._queue) and (self._queue[0].job is None or self._queue[0].job.done())

    @property
    def awaited(self) -> Ticket | None:
        """The ticket of the one that runs, if it waits for a sender."""
        return self._queue[0].sender if self._queue and not self.due else None

    @property
    def stuck_at(self) -> float | None:
        """Monotonic seconds from which on a transfer that was told to stop counts as one that never will.

        What computes ends by itself, and must: it may be writing to what the next job would write to.
        """
        if self._left is None or self._left[0].done():
            return None
        return self._left[1] + STUCK_SECONDS

    def relieve(self) -> None:
        """Leaves such a transfer to itself; others go on without it."""
        self._left = None
        logger.error("a transfer does not stop: its thread is given up")
        self._worker.replace()

    def add(self, operation: Operation) -> Future[Any]:
        """Queues it, and begins it when it is the first."""
        self._queue.append(operation)
        if len(self._queue) == 1:
            self.advance()
        return operation.answer

    def advance(self) -> None:
        """Ends what the worker has done, and begins what comes next."""
        while self.due:
            operation = self._queue[0]
            if operation.job is None:
                self._begin(operation)
            else:
                self._queue.popleft()
                self._settle(operation, operation.job)

    def _begin(self, operation: Operation) -> None:
        try:
            work = operation.begin()
        except RollspanError as error:
            self._queue.popleft()
            operation.answer.set_exception(error)
            return
        if operation.sender is not None:
            operation.sender.note()
        if work is not None:
            operation.job = self._worker.submit(work)
        else:
            operation.job = Future()
            operation.job.set_result(None)

    def _settle(self, operation: Operation, job: Future[Any]) -> None:
        try:
            answer = operation.end(job.result())
        except Exception as error:  # noqa: BLE001 (whatever happens, the caller gets an answer and the engine goes on)
            failure = _failure(error)
            if operation.failed is not None:
                operation.failed(failure)
            operation.answer.set_exception(failure)
        else:
            operation.answer.set_result(answer)

    def cancel(self, owner: object, error: RollspanError) -> None:
        """Answers all operations of an owner with an error; one that runs is told to stop, and nobody waits for it."""
        mine = [operation for operation in self._queue if operation.owner is owner]
        self._queue = deque(operation for operation in self._queue if operation.owner is not owner)
        for operation in mine:
            if operation.sender is not None:
                operation.sender.cancel()
            if operation.sender is not None and operation.job is not None and not operation.job.done():
                self._left = operation.job, time.monotonic()
            operation.answer.set_exception(RollspanError(error.message, reason=error.reason))
        # Not advanced here: the caller has not put its own state in order yet, and the next one is due at once.


def _failure(error: Exception) -> RollspanError:
    if isinstance(error, RollspanError):
        return error
    logger.error("a weight operation failed", exc_info=error)
    return RollspanError(f"{type(error).__name__}: {' '.join(str(error).split())}", reason="internal_error")
