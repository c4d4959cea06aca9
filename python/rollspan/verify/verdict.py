"""Verifier: one rollout to one verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rollspan.errors import RollspanError
from rollspan.runner.loader import eos_token_ids
from rollspan.sampling_params import SamplingParams
from rollspan.verify.distribution import ProcessedDistribution
from rollspan.verify.recording import Rollout
from rollspan.verify.replay import Boundary, Replayer, Segment, SegmentReplay
from rollspan.verify.sources import Sources

#: Largest |difference of log-probs| that passes when nothing is asked for. An engine and a plain forward pass compute
#: the same numbers in another order: about 1e-5 apart in float32, 1e-2 in bfloat16 (see ``benchmarks/drift.py``).
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

#: Log-probs are finite; this far away is as far as a difference is told.
IMPOSSIBLE = 9999.0


@dataclass(frozen=True)
class SpanVerdict:
    """How well the named weights explain one run of tokens.

    ``rival_margin``: by how much larger the largest difference is under the best of the neighbouring spans' weights;
    None without a neighbour.
    """

    version: str | None
    commit: int | None
    start: int
    end: int
    max_abs_error: float
    mean_abs_error: float
    rival_margin: float | None


@dataclass(frozen=True)
class Verdict:
    """What became of one rollout.

    Attributes:
        place: where it was recorded.
        holds: every span is true, as far as its log-probs can tell.
        problem: why not, or None.
        kv: where the history of the KV came from: ``recorded``; else ``kept`` or ``recomputed`` across updates,
            whichever explains the log-probs.
        tokens: output tokens.
    """

    place: str
    holds: bool
    problem: str | None = None
    kv: str = "recorded"
    tokens: int = 0
    spans: list[SpanVerdict] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)

    @property
    def max_abs_error(self) -> float:
        """Over all tokens; 0 where none was scored."""
        return max((span.max_abs_error for span in self.spans), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """As a JSON object; a boundary is proved where the log-probs leave one place for it."""
        found = dataclasses.asdict(self)
        for entry in found["boundaries"]:
            entry["proved"] = entry["earliest"] == entry["latest"]
        return found


class Verifier:
    """Scores rollouts again.

    Args:
        sources: the checkpoints.
        raw_logprobs: the server ran with ``--logprobs-mode raw``.
        tolerance: None for :data:`TOLERANCES` of the checkpoint's dtype.
    """

    def __init__(self, sources: Sources, *, raw_logprobs: bool, tolerance: float | None) -> None:
        self._sources = sources
        self._raw_logprobs = raw_logprobs
        self._tolerance = tolerance
        self._replayer = Replayer(sources.checkpoints)

    def verify(self, rollout: Rollout) -> Verdict:
        """The verdict on one rollout; never raises for what was recorded."""
        if not rollout.output_ids:
            return Verdict(rollout.place, holds=True)
        try:
            find = self._finder(rollout)
            recorded = [
                Segment(
                    find(segment.stamp),
                    segment.start,
                    segment.end,
                    None if segment.kv is None else tuple((find(stamp), a, b) for stamp, a, b in segment.kv),
                )
                for segment in rollout.segments
            ]
            distribution = self._distribution(rollout, find(rollout.segments[0].stamp))
        except (LookupError, RollspanError, OSError) as error:
            text = error.args[0] if error.args else str(error)
            return Verdict(rollout.place, holds=False, problem=str(text), tokens=len(rollout.output_ids))
        if recorded[0].kv is not None or len(recorded) == 1:
            return self._judge(rollout, recorded, distribution, "recorded" if recorded[0].kv is not None else "kept")
        kept = self._judge(rollout, recorded, distribution, "kept")
        if kept.holds:
            return kept
        shift = len(rollout.prompt_ids) - 1
        renewed = [dataclasses.replace(s, kv=((s.weights, 0, shift + s.start),)) for s in recorded]
        recomputed = self._judge(rollout, renewed, distribution, "recomputed")
        return recomputed if recomputed.holds else kept

    def _finder(self, rollout: Rollout) -> Callable[[Any], Path]:
        found: dict[Any, Path] = {}

        def find(stamp: Any) -> Path:
            if stamp not in found:
                found[stamp] = self._sources.find(stamp, rollout.engine_index)
            return found[stamp]

        return find

    def _distribution(self, rollout: Rollout, directory: Path) -> ProcessedDistribution | None:
        if self._raw_logprobs:
            return None
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        size = int(config.get_text_config().vocab_size)
        params, _ = SamplingParams.parse(dict(rollout.sampling_params), vocab_size=size, max_logprobs=size)
        for name in ("structured_outputs", "bad_words"):
            if getattr(params, name):
                raise RollspanError(
                    f"request.sampling_params.{name} changes what was sampled from in ways that are not recorded: "
                    "such rollouts can be verified with --logprobs-mode raw only",
                    reason="unsupported_field",
                )
        length = len(rollout.prompt_ids)
        params = dataclasses.replace(params, n=1).resolve(
            prompt_length=length,
            max_model_len=length + max(len(rollout.output_ids), params.max_tokens or 0, params.min_tokens, 1),
            eos_token_ids=eos_token_ids(directory, config, size),
        )
        return ProcessedDistribution(params, rollout.prompt_ids, rollout.output_ids)

    def _judge(
        self, rollout: Rollout, segments: list[Segment], distribution: ProcessedDistribution | None, kv: str
    ) -> Verdict:
        model = self._sources.checkpoints.model(segments[0].weights)
        tolerance = TOLERANCES.get(model.dtype, 1e-3) if self._tolerance is None else self._tolerance
        try:
            replays, boundaries = self._replayer.replay(
                rollout.prompt_ids, rollout.output_ids, segments, rollout.logprobs, tolerance, distribution
            )
        except (ValueError, IndexError, RuntimeError) as error:  # ids that the model does not have, and the like
            text = f"cannot be scored: {type(error).__name__}: {error}"
            return Verdict(rollout.place, holds=False, problem=text, kv=kv, tokens=len(rollout.output_ids))
        spans = [
            _span_verdict(replay, stamped.stamp, rollout.logprobs)
            for replay, stamped in zip(replays, rollout.segments, strict=True)
        ]
        worst = max(spans, key=lambda span: span.max_abs_error)
        holds = worst.max_abs_error <= tolerance
        problem = (
            None
            if holds
            else (
                f"tokens {worst.start} to {worst.end - 1} are not of {worst.version!r} (commit {worst.commit}): "
                f"log-probs differ by up to {worst.max_abs_error:.2g}, allowed {tolerance:g}"
            )
        )
        return Verdict(rollout.place, holds, problem, kv, len(rollout.output_ids), spans, boundaries)


def _span_verdict(replay: SegmentReplay, stamp: tuple[str | None, int | None], reported: list[float]) -> SpanVerdict:
    segment = replay.segment
    stated = reported[segment.start : segment.end]
    own = _differences(replay.named, stated)
    rivals = [max(_differences(scores, stated)) for scores in replay.others]
    margin = min(rivals) - max(own) if rivals else None
    return SpanVerdict(*stamp, segment.start, segment.end, max(own), sum(own) / len(own), margin)


def _differences(scores: list[float], stated: list[float]) -> list[float]:
    """Absolute differences; that to a token which is impossible under the weights counts as :data:`IMPOSSIBLE`."""
    found = (abs(score - value) for score, value in zip(scores, stated, strict=True))
    return [difference if difference < IMPOSSIBLE else IMPOSSIBLE for difference in found]
