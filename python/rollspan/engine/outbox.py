"""Outbox: what an engine has to say to its frontends, until the next step delivers it."""

from __future__ import annotations

import time
from typing import Any

from rollspan.errors import RollspanError
from rollspan.protocol import messages as m
from rollspan.protocol.messages import Stamp

#: (client index, message): where a message goes.
Addressed = tuple[int, m.EngineCoreOutputs]

#: The same request may succeed later.
_PASSING_CODES = (
    "engine_paused",
    "stale_weights",
    "queue_full",
    "engine_sleeping",
    "weights_inconsistent",
    "weights_undeclared",
)
_KNOWN_CODES = (*_PASSING_CODES, "duplicate_request_id", "prompt_too_long")


class Outbox:
    """Messages in the order in which they go out.

    Args:
        engine_index: rank of this engine.

    Attributes:
        clients: frontends that get reports of changes of state.
    """

    def __init__(self, engine_index: int) -> None:
        self.clients = {0}
        self._engine_index = engine_index
        self._entries: list[Addressed] = []

    def __len__(self) -> int:
        """Messages that wait."""
        return len(self._entries)

    def put(self, client_index: int, stamp: Stamp | None, **fields: Any) -> None:
        """Adds a message; ``stamp`` is that of the weights that its step was launched with."""
        label, commit = stamp if stamp is not None else (None, None)
        message = m.EngineCoreOutputs(
            engine_index=self._engine_index,
            timestamp=time.monotonic(),
            weight_version=label,
            weight_commit=commit,
            **fields,
        )
        self._entries.append((client_index, message))

    def put_all(self, stamp: Stamp, **fields: Any) -> None:
        """Adds a message for every client."""
        for client_index in self.clients:
            self.put(client_index, stamp, **fields)

    def end(
        self,
        client_index: int,
        request_id: str,
        error: m.EngineError | None = None,
        *,
        admission: Stamp | None = None,
        stop_reason: str | None = None,
    ) -> None:
        """Adds the terminal output of a request that ends without a token: with an error, or aborted."""
        reason = m.FinishReason.ABORT if error is None else m.FinishReason.ERROR
        output = m.EngineCoreOutput(request_id, [], finish_reason=reason, error=error, admission=admission)
        output.stop_reason = stop_reason
        self.put(client_index, None, outputs=[output], finished_requests=[request_id])

    def refuse(self, client_index: int, request_id: str, error: RollspanError) -> None:
        """Adds the terminal output of a request that cannot be admitted."""
        code = error.reason if error.reason in _KNOWN_CODES else "validation_error"
        failure = m.EngineError(code, error.message, code in _PASSING_CODES, error.param, error.reason)
        self.end(client_index, request_id, failure)

    def drop_client(self, client_index: int) -> None:
        """A frontend is gone, and what waits for it with it."""
        self.clients.discard(client_index)
        self._entries = [entry for entry in self._entries if entry[0] != client_index]

    def take(self) -> list[Addressed]:
        """All messages, which are forgotten here."""
        entries, self._entries = self._entries, []
        return entries
