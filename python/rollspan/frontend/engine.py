"""Engine: one engine that said hello, as the routes see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollspan.frontend.metered_client import MeteredClient
from rollspan.frontend.status import EngineStatus
from rollspan.protocol.messages import EngineHello

if TYPE_CHECKING:
    from rollspan.async_llm import AsyncLLM


@dataclass(frozen=True, eq=False)
class Engine:
    """An engine that said hello.

    Attributes:
        llm: generates and aborts.
        client: its link, for control calls.
        hello: with the name served here as that of the model.
        root: the engine's own name of the model.
    """

    llm: AsyncLLM
    client: MeteredClient
    hello: EngineHello
    root: str

    @property
    def index(self) -> int:
        """Its rank in the set."""
        return self.hello.engine_index

    @property
    def status(self) -> EngineStatus:
        """What it last said about itself."""
        return self.client.status
