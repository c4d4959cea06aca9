"""SetUpdate: one weight update of all engines, which commits in all of them or, up to its last step, in none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from rollspan.errors import RollspanError
from rollspan.frontend.engine import Engine
from rollspan.frontend.engine_set import EngineSet
from rollspan.frontend.fan_out import Outcome, SetError, call_all, call_engine, failure, successes

logger = logging.getLogger("rollspan.frontend")

START, UPDATE, PREPARE, FINISH = (
    "start_weight_update",
    "update_weights",
    "prepare_weight_update",
    "finish_weight_update",
)


class SetUpdate:
    """The update that this frontend's clients are doing, in the engines that take part in it.

    An engine takes part when it was there at the start. One that dies meanwhile is left out, and so is one that fails
    and takes no requests anyway: it was restarted, and may lack what the others build upon. Any other failure before
    the last step drops the update everywhere.

    A single engine is called as it is: it verifies and commits in one call.
    """

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._members: list[Engine] | None = None
        # Held while a set commits: a client that asks again meanwhile would drop what other engines have yet to commit.
        self._finishing = asyncio.Lock()

    async def start(self, *options: Any) -> list[Outcome]:
        """Opens the update everywhere.

        Raises:
            RollspanError: an engine refused; it is open nowhere where it was not before.
        """
        outcomes = await call_all(self._engines.callable(), START, *options)
        if any(outcome.error is not None and self._counts(outcome) for outcome in outcomes):
            await self._abort([outcome.engine for outcome in outcomes if outcome.error is None])
        kept = self._judged(outcomes)
        self._members = [outcome.engine for outcome in kept]
        return outcomes

    async def update(self, infos: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Receives everywhere; ``infos`` has one for each engine of the set, or one for all."""
        arguments = {engine: (infos[engine.index if len(infos) > 1 else 0],) for engine in self._taking_part()}
        return await self._all_or_none(UPDATE, arguments)

    async def finish(self, label: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], list[Outcome]]:
        """Commits everywhere under one number.

        Returns:
            What is in force now, and the outcomes.

        Raises:
            RollspanError: up to the last step, why it was dropped; in it, ``partial_failure``.
        """
        async with self._finishing:
            return await self._finish(label, options)

    async def _finish(self, label: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], list[Outcome]]:
        taking_part = self._taking_part()
        if len(self._engines) == 1:
            outcomes = await call_all(taking_part, FINISH, label, *([options] if options else []))
            self._members = None
            return successes(outcomes)[0].result, outcomes
        try:
            prepared = await self._all_or_none(PREPARE, dict.fromkeys(taking_part, (options,)))
        except RollspanError as error:
            if error.reason != "no_update_active":
                raise
            # A client that got no answer asks again: engines that have just committed say so again.
            outcomes = await call_all(taking_part, FINISH, label, *([options] if options else []))
            return self._judged(outcomes)[0].result, outcomes
        await self._compare(prepared)
        return await self._commit(label, options)

    async def abort(self) -> list[Outcome]:
        """Drops the update everywhere, whoever has opened it."""
        self._members = None
        return await call_all(self._engines.connected, "abort_weight_update")

    async def _compare(self, prepared: Sequence[Outcome]) -> None:
        """Drops an update after which engines would have different weights; one that was restarted is left out."""
        counted = [outcome for outcome in prepared if outcome.error is None and self._serves(outcome.engine)]
        digests = {outcome.result.get("weight_digest") for outcome in counted}
        if len(digests) > 1:
            await self._abort(self._taking_part())
            self._members = None
            told = ", ".join(f"engine {outcome.engine.index}: {outcome.result['weight_digest']}" for outcome in counted)
            raise SetError(f"the engines would have different weights: {told}", "digest_mismatch", prepared)
        odd = [o.engine for o in prepared if o.error is None and o.result.get("weight_digest") not in digests]
        await self._abort(odd)
        self._members = [engine for engine in self._taking_part() if engine not in odd]

    async def _commit(self, label: str | None, options: dict[str, Any]) -> tuple[dict[str, Any], list[Outcome]]:
        engines = self._taking_part()
        self._members = None
        commits = [outcome.result for outcome in successes(await call_all(engines, "get_weight_commit"))]
        chosen = {**options, "commit": 1 + max(commits)}
        serving = self._engines.serving
        # One that was restarted does not know the label that an unnamed update keeps.
        kept = serving[0].status.weight_version if label is None and serving else None
        outcomes = list(
            await asyncio.gather(
                *(
                    call_engine(engine, FINISH, label if engine in serving or not serving else label or kept, chosen)
                    for engine in engines
                )
            )
        )
        done = [outcome.engine for outcome in outcomes if outcome.error is None]
        try:
            return self._judged(outcomes, last=True)[0].result, outcomes
        finally:
            await self._regroup(serving, done)

    async def _regroup(self, serving: Sequence[Engine], done: Sequence[Engine]) -> None:
        """Engines that have committed take requests, and the others none, where any has."""
        back = [engine for engine in done if engine not in serving]
        if any(engine.status.paused for engine in serving):  # those that are back have not heard of that pause
            await call_all([engine for engine in back if not engine.status.paused], "pause_generation", "keep", False)
        self._engines.join(back)
        if done:
            self._engines.leave([engine for engine in serving if engine not in done])

    def _taking_part(self) -> list[Engine]:
        """Engines of the open update that are still there; where another frontend has opened it, all."""
        there = self._engines.connected
        found = there if self._members is None else [engine for engine in self._members if engine in there]
        if not found:
            raise RollspanError("no engine of this weight update is left", reason="update_aborted")
        return found

    async def _all_or_none(self, method: str, arguments: dict[Engine, tuple[Any, ...]]) -> list[Outcome]:
        """One step in all engines; the first failure drops the update in all of them, which ends calls that wait."""
        calls = {asyncio.create_task(call_engine(engine, method, *args)) for engine, args in arguments.items()}
        waiting, outcomes, dropped = calls, [], False
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            outcomes += [task.result() for task in done]
            if not dropped and any(outcome.error is not None and self._counts(outcome) for outcome in outcomes):
                dropped = True
                await self._abort(list(arguments))
        outcomes.sort(key=lambda outcome: outcome.engine.index)
        if dropped:
            self._members = None
        kept = self._judged(outcomes)
        if len(kept) < len(outcomes):
            await self._abort([outcome.engine for outcome in outcomes if outcome not in kept and not outcome.gone])
            self._members = [outcome.engine for outcome in kept]
        return outcomes

    async def _abort(self, engines: Sequence[Engine]) -> None:
        if len(self._engines) > 1:
            await call_all(engines, "abort_weight_update")

    def _serves(self, engine: Engine) -> bool:
        """Whether it has the weights of all, as far as there is any that has."""
        serving = self._engines.serving
        return engine in serving or not serving

    def _counts(self, outcome: Outcome) -> bool:
        """Whether the failure of this engine is one of the set."""
        return not outcome.gone and self._serves(outcome.engine)

    def _judged(self, outcomes: Sequence[Outcome], last: bool = False) -> list[Outcome]:
        """The successes, where nothing that counts has failed.

        Raises:
            RollspanError: the reason that all failures share; ``partial_failure`` where they have several, and in the
                last step always, because there what has been done stays.
        """
        failed = [outcome for outcome in outcomes if outcome.error is not None and self._counts(outcome)]
        done = [outcome for outcome in outcomes if outcome.error is None]
        if done and not failed:
            return done
        if last and done:
            raise failure(outcomes, failed, whole=False)
        causes = [outcome for outcome in failed if outcome.error and outcome.error.reason != "update_aborted"]
        raise failure(outcomes, causes or failed or list(outcomes), whole=True)
