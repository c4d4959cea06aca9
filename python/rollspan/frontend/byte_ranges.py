"""Half-open ranges of bytes: which of a file are there."""

from __future__ import annotations

import re

from rollspan.errors import wrong_value

CONTENT_RANGE = "Content-Range"
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")


class ByteRanges:
    """A set of bytes as its ranges: sorted, apart from each other, none empty."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def add(self, start: int, end: int) -> None:
        """Adds bytes ``start`` to ``end - 1``; ranges that touch become one."""
        if start >= end:
            return
        apart = []
        for low, high in self._ranges:
            if high < start or low > end:
                apart.append((low, high))
            else:
                start, end = min(start, low), max(end, high)
        self._ranges = sorted([*apart, (start, end)])

    def remove(self, start: int, end: int) -> None:
        """Removes bytes ``start`` to ``end - 1``."""
        if start >= end:
            return
        pieces = [piece for low, high in self._ranges for piece in ((low, min(high, start)), (max(low, end), high))]
        self._ranges = [(low, high) for low, high in pieces if low < high]

    def missing(self, total: int) -> tuple[int, int] | None:
        """The first range of bytes 0 to ``total - 1`` that is not there, None when all are."""
        start = self._ranges[0][1] if self._ranges and self._ranges[0][0] == 0 else 0
        if start >= total:
            return None
        later = [low for low, _ in self._ranges if low > start]
        return start, min([*later, total])

    def to_list(self) -> list[list[int]]:
        """``[[start, end], ...]``."""
        return [[start, end] for start, end in self._ranges]


def parse_content_range(text: str) -> tuple[int, int, int]:
    """Reads a Content-Range header.

    Returns:
        (start, end, total) in bytes, half-open.

    Raises:
        RollspanError: ``invalid_request`` naming the header.
    """
    match = _CONTENT_RANGE.fullmatch(text.strip())
    first, last, total = (int(digits) for digits in match.groups()) if match else (1, 0, 0)
    if not first <= last < total:
        raise wrong_value(CONTENT_RANGE, "bytes FIRST-LAST/TOTAL with FIRST <= LAST < TOTAL", text)
    return first, last + 1, total
