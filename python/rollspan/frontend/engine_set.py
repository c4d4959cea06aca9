"""The engines behind one frontend: connected or not, which of them take requests, and which one takes the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rollspan.errors import RollspanError
from rollspan.frontend.engine import Engine
from rollspan.frontend.routing import least_loaded, session_engine

logger = logging.getLogger("rollspan.frontend")

#: Between two attempts to reach an engine that is being restarted.
RETRY_SECONDS = 0.2

Connect = Callable[[int, Callable[[RollspanError], None]], Awaitable[Engine]]
"""Connects with the engine of this index; the function is told when the link has ended."""


@dataclass
class Member:
    """One place in the set.

    Attributes:
        engine: who is there; None before the first hello, and while one is restarted.
        failure: why nobody is there.
        serves: whether it takes requests. One that was restarted, or has missed a commit, has other weights than the
            rest, so it does not before the next commit of all.
        open_requests: requests that it is busy with.
    """

    engine: Engine | None = None
    failure: str | None = None
    serves: bool = False
    open_requests: int = 0


class EngineSet:
    """All engines of one frontend. A single one that dies stays dead; of several, one that dies is awaited again.

    Args:
        size: how many there are.
        connect: reaches one.
    """

    def __init__(self, size: int, connect: Connect) -> None:
        self._members = [Member() for _ in range(size)]
        self._connect = connect
        self._greeted: dict[int, Engine] = {}
        self._first: Engine | None = None
        self._last_chosen = -1
        self._open_ids: set[str] = set()
        self._reconnecting: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._members)

    async def start(self) -> None:
        """Waits until every engine has said hello.

        They take requests, but for those that were restarted before this frontend was: commits of all have made the
        numbers of the others equal.

        Raises:
            RollspanError: one of them did not start.
        """
        await asyncio.gather(*(self._reach(index) for index in range(len(self))))
        newest = max(engine.hello.weight_commit for engine in self._greeted.values())
        for member in self._members:
            member.serves = member.engine is not None and member.engine.hello.weight_commit == newest
        self._first = self._greeted[0]

    async def close(self) -> None:
        """Ends what is open with what it has, and the links."""
        for task in self._reconnecting.values():
            task.cancel()
        for engine in self.connected:
            await engine.llm.shutdown()

    @property
    def connected(self) -> list[Engine]:
        """Engines that are there, by index."""
        return [member.engine for member in self._members if member.engine is not None]

    @property
    def serving(self) -> list[Engine]:
        """Engines that take requests, by index."""
        return [member.engine for member in self._members if member.engine is not None and member.serves]

    def failures(self) -> dict[int, str]:
        """Why engines are not there, by index."""
        return {index: member.failure for index, member in enumerate(self._members) if member.failure is not None}

    def first(self) -> Engine:
        """The engine that said hello as number 0, whatever has become of it: limits and model are those of all.

        Raises:
            RollspanError: ``engine_starting``.
        """
        if self._first is None:
            raise RollspanError("the engine is still starting", reason="engine_starting")
        return self._first

    def check_alive(self) -> None:
        """Refuses work while no engine is there.

        Raises:
            RollspanError: ``engine_starting`` or ``engine_dead``.
        """
        self.first()
        if not self.connected:
            raise RollspanError(next(iter(self.failures().values())), reason="engine_dead")

    def callable(self) -> list[Engine]:
        """The engines that control calls go to: all that are there.

        Raises:
            RollspanError: ``engine_starting`` or ``engine_dead``.
        """
        self.check_alive()
        return self.connected

    def check_fit(self) -> None:
        """Raises why nothing can be generated, if nothing can.

        Raises:
            RollspanError: ``engine_starting``, ``engine_dead``, or what is wrong with the weights.
        """
        candidates = self._candidates()
        if not any(self._is_fit(index) for index in candidates):
            engine = self._members[candidates[0]].engine
            assert engine is not None
            engine.status.check()

    def join(self, engines: Sequence[Engine]) -> None:
        """Lets them take requests: their weights are those of all."""
        for member in self._members:
            if member.engine in engines and member.engine is not None and not member.serves:
                member.serves = True
                logger.info("engine %d takes requests again", member.engine.index)

    def leave(self, engines: Sequence[Engine]) -> None:
        """Gives them no more requests: the others have committed weights that they do not have."""
        for member in self._members:
            if member.engine in engines and member.engine is not None and member.serves:
                member.serves = False
                logger.error("engine %d has missed a commit: no requests before the next one", member.engine.index)

    @contextmanager
    def open_request(self, request_id: str, session_id: str | None, rank: int | None) -> Iterator[Engine]:
        """The engine that takes a request, which counts as open there.

        Args:
            request_id: must be none of an open request.
            session_id: requests of one session go to one engine, as long as that is there.
            rank: index of the engine that has to take it, None for any.

        Raises:
            RollspanError: ``duplicate_request_id``, or there is no such engine.
        """
        if request_id in self._open_ids:
            raise RollspanError(
                f'request_id "{request_id}" is already in use by an open request',
                reason="duplicate_request_id",
                param="request_id",
            )
        index = self._choose(session_id, rank)
        member = self._members[index]
        assert member.engine is not None
        self._open_ids.add(request_id)
        member.open_requests += 1
        try:
            yield member.engine
        finally:
            member.open_requests -= 1
            self._open_ids.discard(request_id)

    def _candidates(self) -> list[int]:
        """Indices of the engines that take requests, at least one."""
        self.check_alive()
        serving = [index for index, member in enumerate(self._members) if member.engine is not None and member.serves]
        if not serving:
            message = "no engine takes requests: those that are there wait for the next weight update"
            raise RollspanError(message, reason="engine_starting")
        return serving

    def _choose(self, session_id: str | None, rank: int | None) -> int:
        serving = self._candidates()
        if rank is not None:
            if rank not in serving:
                why = self.failures().get(
                    rank, "it was restarted or has missed a commit, and waits for the next weight update"
                )
                raise RollspanError(f"engine {rank} takes no requests: {why}", reason="engine_dead")
            return rank
        fit = [index for index in serving if self._is_fit(index)] or serving
        if session_id is not None:
            return session_engine(session_id, fit)
        self._last_chosen = least_loaded(
            {index: self._members[index].open_requests for index in fit}, self._last_chosen
        )
        return self._last_chosen

    def _is_fit(self, index: int) -> bool:
        engine = self._members[index].engine
        return engine is not None and engine.status.is_fit

    async def _reach(self, index: int) -> None:
        member = self._members[index]
        engine = await self._connect(index, lambda error: self._lost(index, error))
        self._greeted[index] = engine
        member.engine, member.failure = engine, None
        if engine.client.death is not None:
            self._lost(index, engine.client.death)

    def _lost(self, index: int, error: RollspanError) -> None:
        """The link has ended: its requests have failed, and the place is free."""
        member = self._members[index]
        if member.engine is None:  # it ended before it was in its place: whoever puts it there will notice
            return
        member.engine, member.serves, member.failure = None, False, error.message
        if len(self) == 1:
            return
        logger.error("engine %d is gone: %s", index, error.message)
        reconnecting = self._reconnecting.get(index)
        if reconnecting is None or reconnecting.done():
            self._reconnecting[index] = asyncio.create_task(self._reconnect(index), name=f"rollspan-engine-{index}")

    async def _reconnect(self, index: int) -> None:
        while self._members[index].engine is None:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                await self._reach(index)
            except RollspanError as error:
                logger.debug("engine %d: %s", index, error.message)
            else:
                logger.info("engine %d is back; it takes requests after the next weight update", index)
