"""Which engine of a set a request goes to. Pure; ``tests/conformance/routing.json`` holds both languages to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blake3 import blake3


def session_engine(session_id: str, engines: Sequence[int]) -> int:
    """The engine of a session, by rendezvous hashing: when engines come or go, only their own sessions move.

    The score of an engine is the first 8 bytes, little-endian, of BLAKE3(session id in UTF-8 ‖ 0x00 ‖ engine index in
    decimal); the highest score wins, then the lowest index.

    Args:
        session_id: what ``X-Session-ID`` says.
        engines: indices of the engines that take requests, at least one.
    """
    start = blake3(session_id.encode("utf-8") + b"\0")

    def score(index: int) -> tuple[int, int]:
        hasher = start.copy()
        hasher.update(str(index).encode("ascii"))
        return int.from_bytes(hasher.digest(8), "little"), -index

    return max(engines, key=score)


def least_loaded(open_requests: Mapping[int, int], after: int) -> int:
    """The engine with the fewest open requests; of several the first one behind engine ``after``, round and round.

    Args:
        open_requests: by index of the engines that take requests, at least one.
        after: the engine that was chosen last, -1 at first.
    """
    return min(open_requests, key=lambda index: (open_requests[index], index <= after, index))
