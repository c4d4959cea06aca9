"""Measurements that alternate between engines, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollspan.bench.side import Side

_WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Middle:
    """Median, smallest and largest of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Middle:
        return cls(statistics.median(values), min(values), max(values))

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.low, "max": self.high}


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of every round: prompts are random ids below ``vocabulary_size``, new ones each round, the same for
    every engine, so that no engine's prefix cache has seen them.
    """

    input_tokens: int
    output_tokens: int
    temperature: float
    vocabulary_size: int
    seed: int

    def request(self, op: str, size: int, logprobs: int | None, number: int, output_tokens: int) -> dict[str, Any]:
        """The object for ``peers/host.py``; ``number`` names the round."""
        generator = random.Random(f"{self.seed}/{size}/{logprobs}/{number}")
        prompts = [[generator.randrange(self.vocabulary_size) for _ in range(self.input_tokens)] for _ in range(size)]
        return {
            "op": op,
            "prompts": prompts,
            "output_tokens": output_tokens,
            "logprobs": logprobs,
            "temperature": self.temperature,
        }


@dataclass(slots=True)
class Cell:
    """All rounds of one batch size and log-probs setting: for each engine its answers, in order of the rounds."""

    size: int
    logprobs: int | None
    output_tokens: int
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def tokens_per_second(self, name: str) -> list[float]:
        """Output tokens a second, prompts' time included, of each round."""
        return [self.size * self.output_tokens / answer["seconds"] for answer in self.answers.get(name, ())]

    def cpu_microseconds(self, name: str) -> float | None:
        """Smallest CPU time of a round, all processes of the engine together, for each output token."""
        times = [answer["cpu_seconds"] for answer in self.answers.get(name, ())]
        known = [seconds for seconds in times if seconds is not None]
        return min(known) * 1e6 / (self.size * self.output_tokens) if known else None

    def ratios(self, ours: str, peer: str) -> list[float]:
        """Our speed over the peer's, round by round."""
        pairs = zip(self.tokens_per_second(ours), self.tokens_per_second(peer), strict=False)
        return [mine / theirs for mine, theirs in pairs]

    def agreement(self, ours: str, peer: str) -> float | None:
        """Share of prompts after which both gave the same first token, over all rounds; None when sampled or traced."""
        pairs = [
            (mine[0], theirs[0])
            for one, other in zip(self.answers.get(ours, ()), self.answers.get(peer, ()), strict=False)
            for mine, theirs in zip(one.get("token_ids", ()), other.get("token_ids", ()), strict=True)
        ]
        return sum(mine == theirs for mine, theirs in pairs) / len(pairs) if pairs else None


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def run_cells(
    sides: Sequence[Side],
    batch: Batch,
    *,
    op: str,
    size: int,
    logprobs: Sequence[int | None],
    rounds: int,
    cells: list[Cell],
    watch: Callable[[str], None],
) -> None:
    """Runs all cells of one batch size and fills ``cells`` as it goes, so that an interrupted run has figures too.

    Each round takes all log-prob settings in turn, each setting all engines in turn, and every other round goes the
    other way round. An engine that waits is stopped.

    Args:
        op: ``generate`` or ``trace``.
        watch: told in one line what runs next.

    Raises:
        SideError: an engine failed or died.
    """
    for side in sides:
        side.rest()
    row = [Cell(size, setting, batch.output_tokens) for setting in logprobs]
    for cell, side in ((cell, side) for cell in row for side in sides):
        watch(f"{cell_name(cell)}: warming {side.name} up")
        _ask(side, batch.request(op, size, cell.logprobs, -1, min(_WARMUP_TOKENS, batch.output_tokens)))
    cells += row
    for number in range(rounds):
        for cell, side in _order(row, sides, number):
            watch(f"{cell_name(cell)}: round {number + 1} of {rounds}: {side.name}")
            answer = _ask(side, batch.request(op, size, cell.logprobs, number, batch.output_tokens))
            cell.answers.setdefault(side.name, []).append(answer)


def steps(sides: int, logprobs: int, rounds: int) -> int:
    """How often `run_cells` calls ``watch``."""
    return sides * logprobs * (rounds + 1)


def cell_name(cell: Cell) -> str:
    """The cell in words."""
    return f"batch {cell.size}, log-probs {'off' if cell.logprobs is None else cell.logprobs}"


def _order(row: Sequence[Cell], sides: Sequence[Side], number: int) -> Iterator[tuple[Cell, Side]]:
    turn = -1 if number % 2 else 1
    for cell in row[::turn]:
        for side in sides[::turn]:
            yield cell, side


def _ask(side: Side, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return side.ask(request)
    finally:
        side.rest()
