"""Rollouts: what is asked of the server, what comes back, and a thread that always keeps some in flight."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rollspan.http_client import HttpClient
from rollspan.models import task


@dataclass(frozen=True)
class Rollout:
    """One output sequence.

    Attributes:
        problem: the sum that was asked; the output answers it, and goes on with sums of its own making.
        token_ids, logprobs: of the output.
        commits: the commit number that sampled each token, from the response's ``weight_commits``.
    """

    problem: task.Problem
    token_ids: list[int]
    logprobs: list[float]
    commits: list[int]

    def answers(self) -> Iterator[tuple[int, int, bool]]:
        """(first token, one behind the last, whether it is right) of each complete answer in the output."""
        asked: task.Problem | None = self.problem
        start = 0
        for index, token in enumerate(self.token_ids):
            if token == task.EOS:
                if asked is not None:
                    yield start, index + 1, asked.is_solved_by(self.token_ids[start : index + 1])
                asked = None
            elif task.VOCABULARY[token] == "=" and asked is None:
                asked = _question(self.token_ids[max(index + 1 - task.PROMPT_TOKENS, 0) : index + 1])
                start = index + 1


def _question(token_ids: Sequence[int]) -> task.Problem | None:
    """The sum that ``<bos>12+34=`` asks; None for anything else."""
    if len(token_ids) != task.PROMPT_TOKENS or token_ids[0] != task.BOS:
        return None
    left, plus, right = (task.decode(token_ids[i:j]) for i, j in ((1, 3), (3, 4), (4, 6)))
    return task.Problem(int(left), int(right)) if plus == "+" and left.isdigit() and right.isdigit() else None


@dataclass(frozen=True)
class Sampling:
    """What is asked for. ``samples`` rollouts of each problem make a group; ``max_lag`` commits end a rollout early."""

    samples: int = 8
    tokens: int = 48
    max_lag: int = 4
    groups_in_flight: int = 16


class Collector:
    """Keeps groups of rollouts in flight, across weight updates, in a thread of its own.

    Iterate over it to get groups as they end. At most as many wait to be taken as are in flight.
    """

    def __init__(self, url: str, problems: Sequence[task.Problem], sampling: Sampling, seed: int) -> None:
        self._url = url
        self._problems = problems
        self._sampling = sampling
        self._random = random.Random(seed)
        self._done: queue.Queue[list[Rollout] | BaseException] = queue.Queue(sampling.groups_in_flight)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._done.get(timeout=0.05)

    def take(self) -> list[Rollout]:
        """The next group that ends; raises what the collector died of."""
        group = self._done.get()
        if isinstance(group, BaseException):
            raise group
        return group

    def _run(self) -> None:
        try:
            asyncio.run(self._collect())
        except BaseException as error:  # noqa: BLE001 (take() raises it)
            self._done.put(error)

    async def _collect(self) -> None:
        async with HttpClient(self._url) as client:
            workers = [asyncio.create_task(self._work(client)) for _ in range(self._sampling.groups_in_flight)]
            await asyncio.gather(*workers)

    async def _work(self, client: HttpClient) -> None:
        while not self._stopped.is_set():
            problem = self._random.choice(self._problems)
            answer = await client.request("POST", "/inference/v1/generate", self._request(problem))
            await asyncio.to_thread(self._done.put, [_rollout(problem, choice) for choice in answer["choices"]])

    def _request(self, problem: task.Problem) -> dict[str, Any]:
        return {
            "token_ids": problem.prompt_ids,
            "max_weight_lag": self._sampling.max_lag,
            "sampling_params": {
                "n": self._sampling.samples,
                "max_tokens": self._sampling.tokens,
                "ignore_eos": True,
                "logprobs": 0,
                "seed": self._random.getrandbits(62),
            },
        }


def _rollout(problem: task.Problem, choice: dict[str, Any]) -> Rollout:
    content = (choice["logprobs"] or {}).get("content") or []
    commits = [span["commit"] for span in choice["weight_commits"] for _ in range(span["start"], span["end"])]
    return Rollout(problem, choice["token_ids"], [entry["logprob"] for entry in content], commits)
