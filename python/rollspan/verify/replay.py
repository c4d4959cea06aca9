"""Re-scores rollouts under checkpoints: what each token's log-prob must have been, if its spans tell the truth.

Keys and values stay those of the weights that computed them, as in an engine that goes on across an update: a rollout
is processed span by span through one cache, each span with its own weights. The token that a step samples is the next
step's input, so output token ``i`` enters the cache under the weights that sampled token ``i + 1``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from rollspan.models.network import cache_argument


class NamedSpan(TypedDict):
    """Output tokens ``start`` to ``end - 1``, sampled by the weights called ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SpanReplay:
    """One span scored again.

    Attributes:
        named: log-probs of its tokens under the weights that the span names.
        others: the same tokens on the same history under each other checkpoint.
    """

    version: str
    start: int
    end: int
    named: list[float]
    others: list[list[float]]


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where weights changed: the output index that the spans name, and the range that the log-probs leave open.

    Were the boundary at any index from ``earliest`` to ``latest``, the reported log-probs would still fit: tokens whose
    log-prob is the same under both checkpoints can't tell.
    """

    position: int
    earliest: int
    latest: int


class Replayer:
    """Checkpoints by label, loaded with plain ``transformers`` in fp32."""

    def __init__(self, checkpoints: Mapping[str, Path]) -> None:
        """Several labels may name one checkpoint; it is loaded once.

        Raises:
            OSError: a directory is no checkpoint.
        """
        logging.disable_progress_bar()
        self._directories = {label: Path(directory) for label, directory in checkpoints.items()}
        self._models: dict[Path, Any] = {}
        for directory in self._directories.values():
            if directory not in self._models:
                model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
                self._models[directory] = model.eval()

    @torch.no_grad()
    def replay(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        spans: Sequence[NamedSpan],
        reported: Sequence[float],
        tolerance: float,
    ) -> tuple[list[SpanReplay], list[Boundary]]:
        """Score ``output_ids`` again, and see how well ``reported`` log-probs pin the boundaries between ``spans``.

        Raises:
            KeyError: a span names a label that no checkpoint goes by.
            ValueError: the spans don't cover the output.
        """
        ends = [0, *(span["end"] for span in spans)]
        if [span["start"] for span in spans] != ends[:-1] or ends[-1] != len(output_ids) == len(reported):
            raise ValueError(f"spans {list(spans)} don't cover {len(output_ids)} output tokens")
        inputs = [*prompt_ids, *output_ids[:-1]]
        cache = DynamicCache()
        replays: list[SpanReplay] = []
        boundaries: list[Boundary] = []
        for number, span in enumerate(spans):
            own = self._directories[span["version"]]
            begin = len(prompt_ids) - 1 + span["start"] if number else 0
            chunk = inputs[begin : len(prompt_ids) - 1 + span["end"]]
            targets = output_ids[span["start"] : span["end"]]
            others = {
                directory: self._score(directory, chunk, targets, copy.deepcopy(cache))
                for directory in self._models
                if directory != own
            }
            if number:
                before = spans[number - 1]
                old = self._directories[before["version"]]
                position = span["start"]
                latest = position + _fitting(others.get(old, []), reported[position:], tolerance)
                fits_earlier = self._fits_earlier(own, inputs[:begin], output_ids, before, cache, reported, tolerance)
                boundaries.append(Boundary(position, position - fits_earlier, latest))
            named = self._score(own, chunk, targets, cache)
            replays.append(SpanReplay(span["version"], span["start"], span["end"], named, list(others.values())))
        return replays, boundaries

    def _fits_earlier(
        self,
        directory: Path,
        inputs: Sequence[int],
        output_ids: Sequence[int],
        before: NamedSpan,
        cache: DynamicCache,
        reported: Sequence[float],
        tolerance: float,
    ) -> int:
        """How many of the last tokens of span ``before`` fit the weights that came after it just as well."""
        end = before["end"]
        # The first token of a rollout can't be tried so: its step also computed the prompt.
        longest = end - before["start"] - (before["start"] == 0)
        for count in range(1, longest + 1):
            trial = copy.deepcopy(cache)
            trial.crop(-count)
            scores = self._score(directory, inputs[-count:], output_ids[end - count : end], trial)
            if _fitting(scores, reported[end - count : end], tolerance) < count:
                return count - 1
        return longest

    def _score(self, directory: Path, chunk: Sequence[int], targets: Sequence[int], cache: DynamicCache) -> list[float]:
        """Log-probs of ``targets``, which the last inputs of ``chunk`` predict; the chunk goes into ``cache``."""
        model = self._models[directory]
        token_ids = torch.tensor([list(chunk)])
        output = model(input_ids=token_ids, logits_to_keep=len(targets), **cache_argument(model, cache))
        scores = torch.log_softmax(output.logits[0].float(), dim=-1)
        chosen: list[float] = scores.gather(1, torch.tensor(list(targets))[:, None])[:, 0].tolist()
        return chosen


def _fitting(scores: Sequence[float], reported: Sequence[float], tolerance: float) -> int:
    """How many leading scores agree with the reported ones."""
    for index, (score, stated) in enumerate(zip(scores, reported, strict=False)):
        if abs(score - stated) > tolerance:
            return index
    return min(len(scores), len(reported))
