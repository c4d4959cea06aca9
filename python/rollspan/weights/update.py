"""Update: a weight update from its start to its end, and what the worker does for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollspan.errors import RollspanError
from rollspan.weights.connection import Connection
from rollspan.weights.staging import Derived, Staging, WeightDigest


@dataclass
class Update:
    """The update that is open.

    Attributes:
        mode: ``staged`` or ``in_place``.
        phase: ``open``, ``receiving``, ``verifying`` or ``prepared``.
        source: where its tensors come from.
        is_delta: a piece of it was a delta, so that it is partial unless it says otherwise.
        seconds: by phase, so far.
    """

    staging: Staging
    mode: str
    phase: str = "open"
    source: str = "nowhere"
    is_delta: bool = False
    since: float = field(default_factory=time.time)
    seconds: dict[str, float] = field(default_factory=lambda: {"receive": 0.0, "verify": 0.0, "prepare": 0.0})

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - started
            self.staging.ticket.note()

    @property
    def root(self) -> str:
        """Digest of all weights with this update in force; once it is verified."""
        assert self.staging.digest is not None, "not verified"
        return self.staging.digest.root

    def to_dict(self) -> dict[str, Any]:
        """As ``get_weight_history`` tells it."""
        return {
            "phase": self.phase,
            "since": self.since,
            "mode": self.mode,
            "tensors": self.staging.num_tensors,
            "bytes": self.staging.num_bytes,
            "source": self.source,
        }

    def receive(self, info: Any, connection: Connection, commit: int, digest: Future[WeightDigest] | None) -> None:
        """Receives what ``update_info`` announces, on the worker.

        Args:
            info: ``update_info``.
            connection: what brings it.
            commit: number of the weights in force.
            digest: theirs, which the worker has computed by now; None for half changed weights.

        Raises:
            RollspanError: ``base_mismatch``, ``weights_invalid``, ``update_aborted`` or the transport's.
        """
        with self._timed("receive"):
            base = connection.delta_base(info)
            if base is not None:
                self.is_delta = True
                _check_base(base, commit, digest)
            self.source = connection.source(info)
            with closing(connection.receive(info, self.staging.ticket)) as tensors:
                self.staging.receive(tensors, delta=base is not None)

    def verify(
        self, digest: Future[WeightDigest] | None, derived: Derived, *, partial: bool, expected: str | None
    ) -> None:
        """Checks what was received as a whole and gets everything ready but the swap, on the worker.

        Raises:
            RollspanError: ``weights_invalid``, ``digest_mismatch`` or ``update_aborted``.
        """
        with self._timed("verify"):
            self.staging.verify(_leaves(digest), partial=partial, expected=expected)
        with self._timed("prepare"):
            self.staging.prepare(derived)


def _leaves(digest: Future[WeightDigest] | None) -> Mapping[str, bytes]:
    return {} if digest is None or digest.exception() is not None else digest.result().leaves


def _check_base(base: tuple[int | None, str | None], commit: int, digest: Future[WeightDigest] | None) -> None:
    present = "none, for they are half changed" if digest is None else digest.result().root
    if digest is None or base[0] not in (None, commit) or base[1] not in (None, present):
        named = [f"commit {base[0]}"] * (base[0] is not None) + [f"digest {base[1]}"] * (base[1] is not None)
        text = f"the delta is of {', '.join(named)}; the weights in force have commit {commit}, digest {present}"
        raise RollspanError(text, reason="base_mismatch", param="update_info.delta")
