"""A progress bar over a known number of steps: in place on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

_BAR_WIDTH = 24
_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Use as a context manager: leaving it takes the bar off the screen."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._terminal = out.isatty()
        self._done = -1
        self._started = time.monotonic()
        self._last_line = -_SECONDS_BETWEEN_LINES

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._terminal:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def begin(self, what: str) -> None:
        """The step called ``what`` begins, and the one before it has ended."""
        self._done += 1
        elapsed = time.monotonic() - self._started
        if not self._terminal and elapsed - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = elapsed
        filled = self._done * _BAR_WIDTH // max(self._total, 1)
        text = f"[{'#' * filled}{'-' * (_BAR_WIDTH - filled)}] {self._done}/{self._total} {elapsed:.0f} s  {what}"
        self._out.write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        self._out.flush()
