"""The last check: what an engine samples after its last update is what a fresh engine of the final weights samples.

Greedy rollouts are in flight when the final weights arrive; the cache is cleared, so that nothing of the old weights
is left. From the boundary on, tokens and log-probs must equal, bit for bit, those of a server that has never seen any
other weights. Both servers run with ``--batch-invariant``: what else they compute plays no role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rollspan.http_client import HttpClient
from rollspan.models import task

TOKENS = 300
BEFORE = 40
"""Tokens that each rollout has before the final weights come."""


@dataclass
class Greedy:
    """One greedy rollout."""

    problem: task.Problem
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def boundary(self) -> int:
        """The first token of the last version."""
        return int(self.versions[-1]["start"])


async def across_update(url: str, problems: Sequence[task.Problem], publish: Callable[[], None]) -> list[Greedy]:
    """Greedy rollouts that were in flight when ``publish`` brought the final weights."""
    rollouts = [Greedy(problem) for problem in problems]
    moved = asyncio.Event()
    async with HttpClient(url) as client:
        streams = [asyncio.create_task(_stream(client, rollout, moved)) for rollout in rollouts]
        while min(len(rollout.token_ids) for rollout in rollouts) < BEFORE:
            moved.clear()
            await moved.wait()
        await client.request("POST", "/pause?mode=keep&clear_cache=true")
        await asyncio.to_thread(publish)
        await client.request("POST", "/resume")
        await asyncio.gather(*streams)
    return rollouts


async def _stream(client: HttpClient, rollout: Greedy, moved: asyncio.Event) -> None:
    body = {"token_ids": rollout.problem.prompt_ids, "stream": True, "sampling_params": _params(TOKENS)}
    async with aclosing(client.stream("/inference/v1/generate", body)) as chunks:
        async for chunk in chunks:
            for choice in chunk["choices"]:
                rollout.token_ids += choice["token_ids"]
                rollout.logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content", ())]
                rollout.versions = choice.get("weight_versions") or rollout.versions
            moved.set()


async def fresh_tails(url: str, rollouts: Sequence[Greedy]) -> list[tuple[list[int], list[float]]]:
    """What a server of the final weights makes of each rollout's beginning: token ids and log-probs."""
    async with HttpClient(url) as client:
        bodies = [
            {
                "token_ids": [*rollout.problem.prompt_ids, *rollout.token_ids[: rollout.boundary]],
                "sampling_params": _params(TOKENS - rollout.boundary),
            }
            for rollout in rollouts
        ]
        answers = await asyncio.gather(*(client.request("POST", "/inference/v1/generate", body) for body in bodies))
    choices = [answer["choices"][0] for answer in answers]
    return [(c["token_ids"], [entry["logprob"] for entry in c["logprobs"]["content"]]) for c in choices]


def same(rollout: Greedy, tail: tuple[list[int], list[float]]) -> bool:
    """Whether the rollout's tail is the fresh one: every token and every bit of every log-prob."""
    return (rollout.token_ids[rollout.boundary :], rollout.logprobs[rollout.boundary :]) == tail


def _params(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
