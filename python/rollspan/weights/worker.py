"""Worker: the thread that does what must not keep a step waiting: receiving, hashing, repacking, freeing."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from rollspan.errors import RollspanError

logger = logging.getLogger("rollspan.engine")

T = TypeVar("T")
_Job = Callable[[], None]
#: Seconds that the end of the process waits for a job: torch must not be left running under it.
_END_TIMEOUT = 5.0


class Bell:
    """Wakes an engine's loop from other threads."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._listener: Callable[[], None] = self._event.set

    def ring(self) -> None:
        """Something may be there to do; never blocks."""
        self._listener()

    def wait(self, timeout: float | None) -> None:
        """Returns after the next ring, or one since the last wait, or after so many seconds."""
        self._event.wait(timeout)
        self._event.clear()

    def redirect(self, listener: Callable[[], None]) -> None:
        """From now on ``listener`` is called instead: for a loop that waits for other things as well."""
        self._listener = listener


class Worker:
    """Runs jobs one after the other, in order, on a daemon thread; it ends with its owner.

    A job that fails is told to whoever holds its future, as a RollspanError without a traceback: what the job's frames
    hold, copies of all weights perhaps, is given back on this thread and at once.

    Args:
        bell: rung whenever a job is done.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._dismiss: weakref.finalize[Any, Worker] | None = None
        self._leave = threading.Event()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queues a job; its result, or its RollspanError, is in the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except RollspanError as error:
                future.set_exception(RollspanError(error.message, reason=error.reason, param=error.param))
            except BaseException as error:  # a panic of native code is no Exception
                logger.exception("a job beside the steps failed")
                future.set_exception(
                    RollspanError(f"{type(error).__name__}: {' '.join(str(error).split())}", reason="internal_error")
                )

        self._put(run)
        return future

    def free(self, holder: list[Any] | dict[Any, Any]) -> None:
        """Empties a container here: giving gigabytes back to the system takes as long as many steps."""
        self._put(holder.clear)

    def replace(self) -> None:
        """Another thread goes on with the queue: the present one hangs in a job that nobody waits for any more."""
        if self._dismiss is not None:
            self._leave.set()
            self._dismiss.detach()
            atexit.unregister(self._end)
            self._start()

    def _put(self, job: _Job) -> None:
        if self._dismiss is None:
            self._start()
        self._jobs.put(job)

    def _start(self) -> None:
        self._leave = threading.Event()
        thread = threading.Thread(target=_run, args=(self._jobs, self._bell, self._leave), name="weights", daemon=True)
        self._end = partial(_end, self._jobs, thread)
        atexit.register(self._end)
        self._dismiss = weakref.finalize(self, _dismiss, self._jobs, self._end)
        self._dismiss.atexit = False
        thread.start()


def _run(jobs: queue.SimpleQueue[_Job | None], bell: Bell, leave: threading.Event) -> None:
    _use_one_core()
    while (job := jobs.get()) is not None:
        job()
        del job  # with all that it holds, before the next one is waited for
        bell.ring()
        if leave.is_set():
            return


def _dismiss(jobs: queue.SimpleQueue[_Job | None], end: Callable[[], None]) -> None:
    atexit.unregister(end)
    jobs.put(None)


def _end(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join(_END_TIMEOUT)


def _use_one_core() -> None:
    """Keeps torch from spreading this thread's work over the cores that a step computes on.

    ``torch.set_num_threads`` is of the whole process; OpenMP's own number is of the calling thread.
    """
    torch.get_num_threads()  # sets OpenMP's number for this thread, once and for all
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(1)
