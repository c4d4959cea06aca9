"""The replay scorer against rollouts made token by token with weights that change at known moments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rollspan import models
from rollspan.models import task
from rollspan.models.network import cache_argument
from rollspan.verify.replay import Checkpoints, Replayer, Segment

TOLERANCE = 1e-3
PROMPT = task.Problem(12, 34).prompt_ids
CHECKPOINTS = {"a": models.path("add2-sft"), "b": models.path("add2-rl"), "a-again": models.path("add2-sft")}


@pytest.fixture(scope="module")
def replayer() -> Replayer:
    return Replayer(Checkpoints(CHECKPOINTS))


@pytest.fixture(scope="module")
def networks() -> dict[str, Any]:
    return {label: AutoModelForCausalLM.from_pretrained(directory) for label, directory in CHECKPOINTS.items()}


@torch.no_grad()
def generate(networks: dict[str, Any], schedule: Sequence[str], seed: int) -> tuple[list[int], list[float]]:
    """A rollout one token at a time; token ``i`` is sampled by ``schedule[i]``, which computes the input too."""
    generator = random.Random(seed)
    cache = DynamicCache()
    pending = PROMPT
    tokens, logprobs = [], []
    for label in schedule:
        network = networks[label]
        logits = network(input_ids=torch.tensor([pending]), **cache_argument(network, cache)).logits[0, -1]
        scores = torch.log_softmax(logits, dim=-1).tolist()
        token = generator.choices(range(len(scores)), [2.718281828**score for score in scores])[0]
        tokens.append(token)
        logprobs.append(scores[token])
        pending = [token]
    return tokens, logprobs


def spans_of(schedule: Sequence[str]) -> list[Segment]:
    spans: list[Segment] = []
    for index, label in enumerate(schedule):
        if spans and spans[-1].weights == label:
            spans[-1] = Segment(label, spans[-1].start, index + 1)
        else:
            spans.append(Segment(label, index, index + 1))
    return spans


@pytest.mark.parametrize(
    "schedule",
    [
        ["a"] * 40,
        ["a"] * 30 + ["b"] * 30 + ["a-again"] * 30,
        ["a"] + ["b"] * 20,
        ["a"] * 20 + ["b"],
        ["a"] * 10 + ["b"] + ["a-again"] * 10,
    ],
    ids=["no change", "twice", "after the first token", "before the last token", "for one token"],
)
def test_true_spans_are_confirmed_and_boundaries_found(
    replayer: Replayer, networks: dict[str, Any], schedule: list[str]
) -> None:
    for seed in range(3):
        tokens, logprobs = generate(networks, schedule, seed)
        spans = spans_of(schedule)
        replays, boundaries = replayer.replay(PROMPT, tokens, spans, logprobs, TOLERANCE)
        scores = [score for replay in replays for score in replay.named]
        assert scores == pytest.approx(logprobs, abs=TOLERANCE)
        assert [boundary.position for boundary in boundaries] == [span.start for span in spans[1:]]
        assert all(boundary.earliest <= boundary.position <= boundary.latest for boundary in boundaries)


@pytest.mark.parametrize("shift", [-3, -1, 1, 3])
def test_a_shifted_boundary_is_found_out(replayer: Replayer, networks: dict[str, Any], shift: int) -> None:
    wrong = 0
    for seed in range(8):
        tokens, logprobs = generate(networks, ["a"] * 30 + ["b"] * 30, seed)
        lie = spans_of(["a"] * (30 + shift) + ["b"] * (30 - shift))
        replays, boundaries = replayer.replay(PROMPT, tokens, lie, logprobs, TOLERANCE)
        scores = [score for replay in replays for score in replay.named]
        fits = all(abs(score - stated) <= TOLERANCE for score, stated in zip(scores, logprobs, strict=True))
        # Where both checkpoints explain a token, the shift can't show; then the range of the boundary says so.
        assert not fits or boundaries[0].earliest <= 30 <= boundaries[0].latest
        wrong += not fits
    assert wrong >= 5


def test_swapped_versions_are_found_out(replayer: Replayer, networks: dict[str, Any]) -> None:
    tokens, logprobs = generate(networks, ["a"] * 30 + ["b"] * 30, seed=0)
    replays, _ = replayer.replay(PROMPT, tokens, spans_of(["b"] * 30 + ["a"] * 30), logprobs, TOLERANCE)
    for replay in replays:
        stated = logprobs[replay.segment.start : replay.segment.end]
        misses = sum(abs(score - value) > TOLERANCE for score, value in zip(replay.named, stated, strict=True))
        assert misses > 15


@pytest.mark.parametrize("spans", [[], [("a", 0, 2)], [("a", 1, 3)], [("a", 0, 1), ("b", 2, 3)]])
def test_spans_that_leave_tokens_out_are_refused(replayer: Replayer, spans: list[tuple[str, int, int]]) -> None:
    named = [Segment(*span) for span in spans]
    with pytest.raises(ValueError, match="don't cover 3 output tokens"):
        replayer.replay(PROMPT, [3, 4, 5], named, [0.0] * 3, TOLERANCE)


def test_an_unknown_label_is_refused(replayer: Replayer) -> None:
    with pytest.raises(KeyError, match="c"):
        replayer.replay(PROMPT, [3], [Segment("c", 0, 1)], [0.0], TOLERANCE)
