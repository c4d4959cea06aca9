"""A closed-loop load: so many requests at once, each followed by the next, with weight updates in between on demand."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rollspan.bench.results import LoadResult, RequestRecord, UpdateRecord
from rollspan.http_client import HttpClient, HttpError

GENERATE = "/inference/v1/generate"
_SECONDS_AFTER_ERROR = 0.1
"""A server that refuses everything is asked ten times a second by each worker, not as fast as it can refuse."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What each request asks for. Prompts are random ids below ``vocabulary_size``, a function of seed and number."""

    prompt_tokens: int
    output_tokens: int
    stream: bool
    logprobs: int | None
    temperature: float
    vocabulary_size: int
    seed: int

    def body(self, number: int) -> dict[str, Any]:
        """The JSON body of request ``number``."""
        generator = random.Random(f"{self.seed}/{number}")
        sampling: dict[str, Any] = {
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": self.temperature,
            "seed": generator.randrange(2**63),
        }
        if self.logprobs is not None:
            sampling["logprobs"] = self.logprobs
        token_ids = [generator.randrange(self.vocabulary_size) for _ in range(self.prompt_tokens)]
        return {"token_ids": token_ids, "sampling_params": sampling, "stream": self.stream}


@dataclass(frozen=True, slots=True)
class Extent:
    """How long a run is: a number of requests, or no new request after so many seconds."""

    requests: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Weight updates while the load runs: the paths in turn, each ``interval`` seconds after the last one's end."""

    paths: Sequence[str]
    interval: float


async def generate_once(client: HttpClient, workload: Workload, number: int, record: RequestRecord) -> None:
    """Send request ``number`` and fill in ``record``.

    Raises:
        HttpError: the request failed; ``record`` holds what came before.
    """
    body = workload.body(number)
    if not workload.stream:
        answer = await client.request("POST", GENERATE, body)
        for choice in answer["choices"]:
            record.tokens += len(choice["token_ids"])
            record.versions = len(choice.get("weight_versions") or ())
    else:
        async with aclosing(client.stream(GENERATE, body)) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    if choice["token_ids"]:
                        record.chunk_times.append(time.perf_counter())
                        record.tokens += len(choice["token_ids"])
                    if choice.get("weight_versions"):
                        record.versions = len(choice["weight_versions"])
    record.ended = time.perf_counter()


class Load:
    """One run at one concurrency. ``result`` is filled while it runs, so that an interrupted run has figures too."""

    def __init__(self, url: str, workload: Workload, extent: Extent, concurrency: int) -> None:
        self._url = url
        self._workload = workload
        self._extent = extent
        self._next = 0
        self.result = LoadResult(concurrency, started=time.perf_counter())

    async def run(self, stop: asyncio.Event, updates: UpdatePlan | None, watch: Callable[[LoadResult], Any]) -> None:
        """Run to the extent's end or until ``stop`` is set; ``watch(result)`` makes the progress display's task."""
        result = self.result
        result.started = time.perf_counter()
        async with HttpClient(self._url) as client:
            workers = [asyncio.create_task(self._work(client)) for _ in range(result.concurrency)]
            attendants = [asyncio.create_task(watch(result)), asyncio.create_task(stop.wait())]
            if updates is not None:
                attendants.append(asyncio.create_task(update_weights(client, updates, result)))
            finished = asyncio.gather(*workers)
            try:
                await asyncio.wait({finished, attendants[1]}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                result.ended = time.perf_counter()
                for task in (*workers, *attendants):
                    task.cancel()
                outcomes = await asyncio.gather(finished, *attendants, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome

    async def _work(self, client: HttpClient) -> None:
        while self._has_more():
            number = self._next
            self._next += 1
            record = RequestRecord(started=time.perf_counter())
            self.result.records.append(record)
            try:
                await generate_once(client, self._workload, number, record)
            except HttpError as error:
                record.error = error.reason
                await asyncio.sleep(_SECONDS_AFTER_ERROR)

    def _has_more(self) -> bool:
        if self._extent.requests is not None:
            return self._next < self._extent.requests
        return time.perf_counter() - self.result.started < (self._extent.seconds or 0.0)


async def update_weights(client: HttpClient, plan: UpdatePlan, result: LoadResult) -> None:
    """Update the weights by the plan until cancelled, and note each update in ``result``."""
    number = 0
    while True:
        await asyncio.sleep(plan.interval)
        path = plan.paths[number % len(plan.paths)]
        number += 1
        label = f"bench-{number}"
        started = time.perf_counter()
        error = None
        try:
            await client.request("POST", "/start_weight_update")
            await client.request("POST", "/update_weights", {"update_info": {"path": path}})
            await client.request("POST", "/finish_weight_update", {"weight_version": label})
        except HttpError as failure:
            error = f"update: {failure.reason}: {failure.message}"
        result.updates.append(UpdateRecord(path, label, started, time.perf_counter(), error))
