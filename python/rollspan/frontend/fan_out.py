"""One call of all engines of a set, and what to make of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollspan.errors import RollspanError
from rollspan.frontend.engine import Engine

#: An engine that has died takes no part any more: that is no failure of the call.
GONE = ("engine_dead", "decode_error")


@dataclass(frozen=True)
class Outcome:
    """What became of a call in one engine: a result, or an error."""

    engine: Engine
    result: Any = None
    error: RollspanError | None = None

    @property
    def gone(self) -> bool:
        """Whether the engine died before it answered."""
        return self.error is not None and self.error.reason in GONE

    def to_json(self) -> dict[str, Any]:
        """What clients are told of it."""
        index = {"engine_index": self.engine.index}
        return {**index, "result": self.result} if self.error is None else {**index, **self.error.body()}


class SetError(RollspanError):
    """A call that failed in a set of engines; its body tells what became of it in each of them."""

    def __init__(self, message: str, reason: str, outcomes: Sequence[Outcome]) -> None:
        super().__init__(message, reason=reason)
        self._outcomes = outcomes

    def body(self) -> dict[str, Any]:
        return {**super().body(), "engines": [outcome.to_json() for outcome in self._outcomes]}


async def call_engine(engine: Engine, method: str, *args: Any) -> Outcome:
    """Calls one engine, and waits as long as it takes."""
    try:
        return Outcome(engine, await engine.client.call_utility(method, *args))
    except RollspanError as error:
        return Outcome(engine, error=error)


async def call_all(engines: Sequence[Engine], method: str, *args: Any) -> list[Outcome]:
    """Calls all of them at once."""
    return list(await asyncio.gather(*(call_engine(engine, method, *args) for engine in engines)))


def successes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that succeeded, in a call that did.

    Raises:
        RollspanError: a single engine's own error; the engines' error where all that live have failed for one reason;
            otherwise ``partial_failure``.
    """
    failed = [outcome for outcome in outcomes if outcome.error is not None and not outcome.gone]
    done = [outcome for outcome in outcomes if outcome.error is None]
    if done and not failed:
        return done
    raise failure(outcomes, failed or outcomes, whole=not done)


def failure(outcomes: Sequence[Outcome], causes: Sequence[Outcome], *, whole: bool) -> RollspanError:
    """The error of a call that failed.

    Args:
        outcomes: of all engines.
        causes: those that failed by themselves, at least one.
        whole: nothing has changed in any engine.
    """
    first = causes[0].error
    assert first is not None
    if len(outcomes) == 1:
        return first
    reasons = {outcome.error.reason for outcome in causes if outcome.error is not None}
    if whole and len(reasons) == 1:
        return SetError(f"engine {causes[0].engine.index}: {first.message}", first.reason, outcomes)
    told = ", ".join(f"engine {outcome.engine.index}: {outcome.error.message}" for outcome in causes if outcome.error)
    failed = f"{len(causes)} of {len(outcomes)} engines failed ({told})"
    return SetError(failed, "partial_failure", outcomes)


def agreed(outcomes: Sequence[Outcome]) -> Any:
    """The result that all engines gave.

    Raises:
        RollspanError: as for :func:`successes`; ``partial_failure`` when they differ.
    """
    done = successes(outcomes)
    first = done[0].result
    if any(outcome.result != first for outcome in done):
        raise SetError("the engines differ", "partial_failure", outcomes)
    return first
