"""How the demo shows rollouts: tokens coloured by weight version, tables of spans. Makes text, prints nothing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollspan.models import task

COLOURS = (36, 33, 35, 32, 34, 31)
"""ANSI foregrounds of the versions, in the order of their appearance."""
_DIM = 2
_BOLD = 1
_SUM = re.compile(r"(\d\d)\+(\d\d)=(\d+)<eos>")


@dataclass(slots=True)
class Rollout:
    """One streamed rollout: what was asked, and what came back so far."""

    number: int
    problem: task.Problem
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chunk_versions: list[str | None] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)

    def take(self, choice: Mapping[str, Any]) -> None:
        """Add one chunk's choice; the spans of the whole output come with the one that has a finish_reason."""
        self.token_ids += choice["token_ids"]
        self.logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content", ())]
        spans = choice.get("weight_versions") or []
        if choice.get("finish_reason") is None:
            self._note_chunk(spans)
            return
        self.versions = spans
        self.commits = choice.get("weight_commits") or []
        # The last chunk carries the spans of everything, its own tokens included.
        known = len(self.chunk_versions)
        self._note_chunk([{**span, "start": max(span["start"], known)} for span in spans if span["end"] > known])

    def _note_chunk(self, spans: Sequence[Mapping[str, Any]]) -> None:
        for span in spans:
            self.chunk_versions += [span["version"]] * (span["end"] - span["start"])


class Painter:
    """Colours text by weight version, or marks the changes where there are no colours."""

    def __init__(self, *, colours: bool, width: int) -> None:
        self._colours = colours
        self._width = width
        self._order: list[str] = []

    @property
    def legend(self) -> str:
        """What tells the versions apart in :meth:`tokens`."""
        return "each colour is a weight version" if self._colours else "[label] begins the tokens of a weight version"

    def bold(self, text: str) -> str:
        return self._paint(text, _BOLD)

    def dim(self, text: str) -> str:
        return self._paint(text, _DIM)

    def version(self, label: str, text: str) -> str:
        """``text`` in the colour of a version."""
        if label not in self._order:
            self._order.append(label)
        return self._paint(text, COLOURS[self._order.index(label) % len(COLOURS)])

    def tokens(self, rollout: Rollout) -> str:
        """A rollout's text over several lines: ``<eos>`` as a semicolon, ``<bos>`` as a space, a character a token."""
        indent = "  "
        cells: list[tuple[str | None, str]] = [(None, character) for character in rollout.problem.prompt]
        for span in rollout.versions:
            if not self._colours:
                cells += [(None, character) for character in f"[{span['version']}]"]
            cells += [(span["version"], _glyph(token)) for token in rollout.token_ids[span["start"] : span["end"]]]
        width = max(20, self._width - len(indent))
        lines = [cells[begin : begin + width] for begin in range(0, len(cells), width)]
        return "\n".join(indent + self._runs(line) for line in lines)

    def _runs(self, cells: Sequence[tuple[str | None, str]]) -> str:
        text = ""
        run = ""
        current: str | None = None
        for label, glyph in [*cells, (None, "")]:
            if label != current or not glyph:
                text += self.dim(run) if current is None else self.version(current, run)
                run, current = "", label
            run += glyph
        return text

    def _paint(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colours and text else text


def _glyph(token_id: int) -> str:
    if token_id == task.EOS:
        return ";"
    if token_id == task.BOS:
        return " "
    token = task.VOCABULARY[token_id]
    return token if len(token) == 1 else "?"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Left-aligned columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return textwrap.indent("\n".join(lines), indent)


def count_sums(rollout: Rollout) -> dict[str, tuple[int, int]]:
    """For each version, how many of the sums that lie wholly in its spans are right, and how many there are."""
    counts: dict[str, tuple[int, int]] = {}
    for span in rollout.versions:
        prompt = rollout.problem.prompt if span["start"] == 0 else ""
        text = prompt + task.decode(rollout.token_ids[span["start"] : span["end"]])
        right, total = counts.get(span["version"], (0, 0))
        for left, other, answer in _SUM.findall(text):
            total += 1
            right += int(left) + int(other) == int(answer)
        counts[span["version"]] = (right, total)
    return counts
