"""Re-scores rollouts under checkpoints: what each token's log-prob must have been, if its spans tell the truth.

Keys and values are those of the weights that computed them: a rollout is processed segment by segment through one
cache, each position under the weights that are said to have computed it. The token that a step samples is the next
step's input, so output token ``i`` enters the cache under the weights that sampled token ``i + 1``.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from rollspan.models.network import cache_argument

#: Log-probs of the targets of ``logits`` (float32 ``[n, vocabulary]``), which stand at output index ``start`` on.
Distribution = Callable[[torch.Tensor, int], list[float]]
#: (weights, start, end): the KV at positions start to end - 1 of prompt and output was computed by these weights.
KvRun = tuple[Hashable, int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Output tokens ``start`` to ``end - 1``, sampled by ``weights``.

    Attributes:
        kv: whose KV the first of them attended to, contiguous from position 0 on, without the position of its own
            input. None: whatever is in the cache from the segments before, and for the first one its own.
    """

    weights: Hashable
    start: int
    end: int
    kv: tuple[KvRun, ...] | None = None


@dataclass(frozen=True, slots=True)
class SegmentReplay:
    """One segment scored again.

    Attributes:
        named: log-probs of its tokens under the weights that the segment names.
        others: the same tokens on the same history under those of the segments before and after it, where they differ.
    """

    segment: Segment
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


class Checkpoints:
    """Models by name, loaded with plain ``transformers`` when they are needed.

    Args:
        directories: name -> directory; several names may name one directory.
        dtype: of the weights; None for the checkpoint's own.
        most: so many models are kept in memory, those used last.
    """

    def __init__(
        self, directories: Mapping[Hashable, Path], *, dtype: torch.dtype | None = torch.float32, most: int = 4
    ) -> None:
        self._directories = {name: Path(directory) for name, directory in directories.items()}
        self._dtype = dtype
        self._most = most
        self._models: OrderedDict[Path, Any] = OrderedDict()

    def model(self, name: Hashable) -> Any:
        """The model of that name, in evaluation mode.

        Raises:
            KeyError: no checkpoint goes by that name.
            OSError: its directory is no checkpoint.
        """
        directory = self._directories[name]
        if directory not in self._models:
            while len(self._models) >= self._most:
                self._models.popitem(last=False)
            logging.disable_progress_bar()
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=self._dtype or "auto", local_files_only=True, trust_remote_code=False
            )
            self._models[directory] = model.eval()
        self._models.move_to_end(directory)
        return self._models[directory]

    def same(self, one: Hashable, other: Hashable) -> bool:
        """Whether both names name one directory."""
        return self._directories[one] == self._directories[other]


class Replayer:
    """Scores rollouts again, one at a time."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    @torch.no_grad()
    def replay(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        segments: Sequence[Segment],
        reported: Sequence[float],
        tolerance: float,
        distribution: Distribution | None = None,
    ) -> tuple[list[SegmentReplay], list[Boundary]]:
        """Scores ``output_ids`` again, and sees how well ``reported`` log-probs pin the boundaries between segments.

        Args:
            prompt_ids: at least one token.
            output_ids: n tokens.
            segments: cover them.
            reported: n log-probs, natural logarithm.
            tolerance: two log-probs that are closer than this are the same.
            distribution: what the tokens were sampled from; the model's own by default.

        Raises:
            KeyError: a segment names weights that no checkpoint goes by.
            ValueError: the segments don't cover the output.
        """
        ends = [0, *(segment.end for segment in segments)]
        if [segment.start for segment in segments] != ends[:-1] or ends[-1] != len(output_ids) or ends != sorted(ends):
            raise ValueError(f"spans {_listed(segments)} don't cover {len(output_ids)} output tokens")
        if len(reported) != len(output_ids):
            raise ValueError(f"{len(reported)} log-probs for {len(output_ids)} output tokens")
        for segment in segments:
            self._checkpoints.model(segment.weights)
        tokens = [*prompt_ids, *output_ids]
        history = _History(self._checkpoints, tokens)
        scorer = _Scorer(self._checkpoints, tokens, len(prompt_ids), distribution or _own(output_ids))
        replays: list[SegmentReplay] = []
        boundaries: list[Boundary] = []
        for number, segment in enumerate(segments):
            first = len(prompt_ids) - 1 + segment.start  # position of the first token's input
            held = history.held if segment.kv is None else segment.kv
            history.bring(held or ((segment.weights, 0, first),), first)
            cache = history.cache
            neighbours = [*segments[max(number - 1, 0) : number], *segments[number + 1 : number + 2]]
            rivals: list[Hashable] = []
            for near in neighbours:
                if not any(self._checkpoints.same(near.weights, known) for known in (segment.weights, *rivals)):
                    rivals.append(near.weights)
            others = [scorer.score(rival, segment.start, segment.end, copy.deepcopy(cache)) for rival in rivals]
            before = segments[number - 1] if number else None
            if before is not None and not self._checkpoints.same(before.weights, segment.weights):
                old = [scores for rival, scores in zip(rivals, others, strict=True) if rival == before.weights]
                late = _fitting(old[0], reported[segment.start :], tolerance)
                early = 0
                if segment.kv is None or segment.kv == before.kv:  # else the KV changed there as well
                    early = scorer.fits_earlier(segment.weights, before, cache, reported, tolerance)
                boundaries.append(Boundary(segment.start, segment.start - early, segment.start + late))
            named = scorer.score(segment.weights, segment.start, segment.end, cache)
            history.grown(segment.weights, len(prompt_ids) - 1 + segment.end)
            replays.append(SegmentReplay(segment, named, others))
        return replays, boundaries


class _History:
    """A cache, and which weights computed each position of it."""

    def __init__(self, checkpoints: Checkpoints, tokens: Sequence[int]) -> None:
        self._checkpoints = checkpoints
        self._tokens = tokens
        self._owners: list[Hashable] = []
        self.cache = DynamicCache()

    @property
    def held(self) -> tuple[KvRun, ...]:
        """What the cache holds."""
        return tuple(_runs(self._owners))

    def bring(self, wanted: Iterable[KvRun], length: int) -> None:
        """Makes the cache hold ``wanted`` up to ``length`` positions: computes what differs, and what follows it."""
        owners = [weights for weights, start, end in wanted for _ in range(start, end)][:length]
        pairs = enumerate(zip(self._owners, owners, strict=False))
        common = next((place for place, (have, want) in pairs if have != want), min(len(self._owners), len(owners)))
        if common == 0:
            self.cache = DynamicCache()
        elif common < len(self._owners):
            self.cache.crop(common - len(self._owners))  # transformers takes no other form
        for weights, start, end in _runs(owners):
            start = max(start, common)
            if start < end:
                _forward(self._checkpoints.model(weights), self._tokens[start:end], 1, self.cache)
        self._owners = owners

    def grown(self, weights: Hashable, length: int) -> None:
        """The cache was extended to ``length`` positions with these weights."""
        self._owners += [weights] * (length - len(self._owners))


class _Scorer:
    """Log-probs of output tokens on a given history."""

    def __init__(
        self, checkpoints: Checkpoints, tokens: Sequence[int], num_prompt_tokens: int, distribution: Distribution
    ) -> None:
        self._checkpoints = checkpoints
        self._tokens = tokens
        self._shift = num_prompt_tokens - 1
        self._distribution = distribution

    def score(self, weights: Hashable, start: int, end: int, cache: DynamicCache) -> list[float]:
        """Of output tokens ``start`` to ``end - 1``; their inputs go into ``cache``, which ends before them."""
        if start == end:
            return []
        inputs = self._tokens[self._shift + start : self._shift + end]
        return self._distribution(_forward(self._checkpoints.model(weights), inputs, end - start, cache), start)

    def fits_earlier(
        self, weights: Hashable, before: Segment, cache: DynamicCache, reported: Sequence[float], tolerance: float
    ) -> int:
        """How many of the last tokens of ``before`` fit the weights that came after it just as well."""
        # The first token of a rollout can't be tried so: its step also computed the prompt.
        longest = before.end - before.start - (before.start == 0)
        for count in range(1, longest + 1):
            trial = copy.deepcopy(cache)
            trial.crop(-count)
            scores = self.score(weights, before.end - count, before.end, trial)
            if _fitting(scores, reported[before.end - count : before.end], tolerance) < count:
                return count - 1
        return longest


def _forward(model: Any, token_ids: Sequence[int], count: int, cache: DynamicCache) -> torch.Tensor:
    """Logits (float32 ``[count, vocabulary]``) of the last ``count`` of the tokens, which go into ``cache``."""
    output = model(input_ids=torch.tensor([list(token_ids)]), logits_to_keep=count, **cache_argument(model, cache))
    return output.logits[0].float()  # type: ignore[no-any-return]


def _own(output_ids: Sequence[int]) -> Distribution:
    def distribution(logits: torch.Tensor, start: int) -> list[float]:
        targets = torch.tensor(list(output_ids[start : start + len(logits)]))
        chosen: list[float] = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0].tolist()
        return chosen

    return distribution


def _runs(owners: Sequence[Hashable]) -> list[KvRun]:
    runs: list[KvRun] = []
    for position, weights in enumerate(owners):
        if runs and runs[-1][0] == weights:
            runs[-1] = (weights, runs[-1][1], position + 1)
        else:
            runs.append((weights, position, position + 1))
    return runs


def _listed(segments: Sequence[Segment]) -> list[tuple[Hashable, int, int]]:
    return [(segment.weights, segment.start, segment.end) for segment in segments]


def _fitting(scores: Sequence[float], reported: Sequence[float], tolerance: float) -> int:
    """How many leading scores agree with the reported ones."""
    for index, (score, stated) in enumerate(zip(scores, reported, strict=False)):
        if not abs(score - stated) <= tolerance:
            return index
    return min(len(scores), len(reported))
