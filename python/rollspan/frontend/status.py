"""What an engine last said about itself, and whether it can serve."""

from __future__ import annotations

from dataclasses import dataclass

from rollspan.errors import RollspanError
from rollspan.protocol.messages import EngineCoreOutputs, EngineHello

#: weight_state -> (reason, message) of an engine that cannot generate. The others can.
UNFIT = {
    "inconsistent": (
        "weights_inconsistent",
        "the weights are not whole: an update in place was cut off, or they were reset or dropped; update them all",
    ),
    "undeclared": (
        "weights_undeclared",
        "nobody has named the weights yet: finish an update with a weight_version, or POST /update_weight_version",
    ),
    "sleeping": ("engine_sleeping", "the engine sleeps: POST /wake_up"),
}


@dataclass(slots=True)
class EngineStatus:
    """State of one engine as of its last message.

    Attributes:
        weight_state: ready, updating, inconsistent, undeclared or sleeping.
        weight_version: label of the weights in force.
        weight_commit: their commit number.
        paused: the scheduler is.
    """

    weight_state: str
    weight_version: str
    weight_commit: int
    paused: bool

    @classmethod
    def at_start(cls, hello: EngineHello) -> EngineStatus:
        """What the engine said in its hello."""
        return cls(hello.weight_state, hello.weight_version, hello.weight_commit, hello.paused)

    def update(self, message: EngineCoreOutputs) -> None:
        """Takes in what a message says, as far as it does."""
        if message.scheduler_stats is not None:
            state = message.scheduler_stats.get("weight_state")
            if isinstance(state, str):
                self.weight_state = state
            paused = message.scheduler_stats.get("paused")
            if isinstance(paused, bool):
                self.paused = paused
        # The outputs of a step come behind the commit that it was launched before.
        if message.weight_commit is not None and message.weight_commit < self.weight_commit:
            return
        if message.weight_version is not None:
            self.weight_version = message.weight_version
        if message.weight_commit is not None:
            self.weight_commit = message.weight_commit

    @property
    def is_fit(self) -> bool:
        """Whether the engine can generate."""
        return self.weight_state not in UNFIT

    def check(self) -> None:
        """Raises why the engine cannot generate, if it cannot.

        Raises:
            RollspanError: ``weights_inconsistent``, ``weights_undeclared`` or ``engine_sleeping``.
        """
        unfit = UNFIT.get(self.weight_state)
        if unfit is not None:
            reason, message = unfit
            raise RollspanError(message, reason=reason)
