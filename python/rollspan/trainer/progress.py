"""TransferBar: how much of an update has been handed over, in place on a terminal."""

from __future__ import annotations

import time
from typing import TextIO

_WIDTH = 24
_SECONDS_BETWEEN = 0.1


class TransferBar:
    """Call it with bytes done and bytes in all; on anything but a terminal it writes nothing."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._started = self._last = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0:
            self._started = now
        if not self._terminal or (done < total and now - self._last < _SECONDS_BETWEEN):
            return
        self._last = now
        filled = done * _WIDTH // max(total, 1)
        rate = done / max(now - self._started, 1e-3) / 1e9
        text = (
            f"weights [{'#' * filled}{'-' * (_WIDTH - filled)}] {done / 1e9:.2f}/{total / 1e9:.2f} GB {rate:.2f} GB/s"
        )
        self._out.write(f"\r\x1b[K{text}" if done < total else "\r\x1b[K")
        self._out.flush()
