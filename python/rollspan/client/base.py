"""The calls that every asynchronous engine link offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

from rollspan.errors import RollspanError
from rollspan.protocol.messages import EngineCoreOutputs, EngineCoreRequest, EngineHello

OutputHandler = Callable[[EngineCoreOutputs], None]
DeathHandler = Callable[[RollspanError], None]


class EngineCoreClient(ABC):
    """One link to one EngineCore.

    Attributes:
        hello: the engine's limits, model facts, and what was in force when the link was made.
        death: why the link ended, or None while it works. Once it is set, every call raises it.
        decode_errors: messages that could not be decoded, by reason.
        skipped_fields: trailing elements of messages that this release does not know.
    """

    hello: EngineHello

    def __init__(self) -> None:
        self.death: RollspanError | None = None
        self.decode_errors: Counter[str] = Counter()
        self.skipped_fields = 0
        self._on_outputs: OutputHandler | None = None
        self._on_death: DeathHandler | None = None

    def set_output_handler(self, handler: OutputHandler) -> None:
        """``handler`` gets every message but utility replies, in order, on the event loop; it must not block."""
        self._on_outputs = handler

    def set_death_handler(self, handler: DeathHandler) -> None:
        """``handler`` is called once when the link ends by itself, not by `close`; at once if it has ended already."""
        self._on_death = handler
        if self.death is not None:
            handler(self.death)

    def check_alive(self) -> None:
        """Raises why the link ended, if it has: ``engine_dead``, ``decode_error`` or ``shutting_down``."""
        if self.death is not None:
            # A new exception each time: an old one would collect the traceback of everybody who raised it.
            raise RollspanError(self.death.message, reason=self.death.reason)

    @abstractmethod
    async def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request for one sequence.

        Raises:
            RollspanError: ``engine_dead`` or ``decode_error`` when the link has ended.
        """

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """Aborts by internal id; unknown ids are ignored, and so is a link that has ended. Never waits."""

    @abstractmethod
    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls an engine method and returns its result when it is there.

        Raises:
            RollspanError: the engine refused (with its reason), or the link ended before the answer.
        """

    @abstractmethod
    async def close(self) -> None:
        """Ends the link; may be called twice."""
