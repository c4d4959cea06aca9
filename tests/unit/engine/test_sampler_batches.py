"""What the sampler remembers between steps never shows: any history of the batch gives what a new sampler gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollspan.engine.request import Request
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.sampler.sampler import Sampler, Samples
from rollspan.sampling_params import SamplingParams

VOCABULARY = 24

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "logprobs": 2},
    {"top_k": 3, "top_p": 0.8, "logprobs": 0},
    {"min_p": 0.1, "temperature": 1.4},
    {"min_tokens": 2, "all_stop_token_ids": (1, 2, 3), "logprobs": -1},
    {"min_tokens": 3, "all_stop_token_ids": (4,), "frequency_penalty": 0.5, "logprobs": 3},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"repetition_penalty": 0.8, "logprobs": 1},
    {"frequency_penalty": -0.7, "presence_penalty": -0.2},
    {"logit_bias": {3: 2.5, 9: -4.0}, "allowed_token_ids": (1, 3, 5, 9, 11)},
    {"bad_words_token_ids": ((5,), (3, 3), (1, 2, 3)), "allowed_token_ids": (1, 2, 3, 5)},
    {"bad_words_token_ids": ((3, 1),), "logit_bias": {3: 4.0, 1: 4.0}, "frequency_penalty": 0.1},
]


def make(kind: int, number: int) -> Request:
    message = EngineCoreRequest(f"r{number}", [1 + number % 5, 2, 2], SamplingParams(**KINDS[kind]))
    return Request(message, admission=("default", 0), arrival=number, seed=number * 7)


def same(a: Samples, b: Samples) -> None:
    assert (a.token_ids, a.valid) == (b.token_ids, b.valid)
    for one, other in zip(a.logprobs, b.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_ids.tobytes() == other.token_ids.tobytes()
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
            assert one.sampled_ranks.tobytes() == other.sampled_ranks.tobytes()


Step = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, len(KINDS) - 1)),
    st.tuples(st.just("finish"), st.integers(0, 20)),
    st.tuples(st.just("preempt"), st.integers(0, 20)),
    st.tuples(st.just("resume"), st.integers(0, 20)),
    st.tuples(st.just("shuffle"), st.integers(0, 20)),
    st.tuples(st.just("fail"), st.just(0)),
    st.tuples(st.just("steady"), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(first=st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=6), steps=st.lists(Step, max_size=25))
def test_any_history_gives_what_a_new_sampler_gives(first: list[int], steps: list[tuple[str, int]]) -> None:
    sampler = Sampler(raw_logprobs=False)
    generator = torch.Generator().manual_seed(len(steps))
    running = [make(kind, number) for number, kind in enumerate(first)]
    paused: list[Request] = []
    arrivals = len(running)
    for action, value in [("steady", 0), *steps]:
        if action == "arrive":
            running.append(make(value, arrivals))
            arrivals += 1
        elif action in ("finish", "preempt") and running:
            gone = running.pop(value % len(running))
            if action == "preempt":
                paused.append(gone)
        elif action == "resume" and paused:
            running.append(paused.pop(value % len(paused)))
        elif action == "shuffle" and running:
            running = running[value % len(running) :] + running[: value % len(running)]
        logits = torch.randn(len(running), VOCABULARY, generator=generator) * 2
        samples = sampler.sample(logits, running)
        same(samples, Sampler(raw_logprobs=False).sample(logits, list(running)))
        if action == "fail":  # the step's tokens were never taken over
            continue
        for request, token in zip(running, samples.token_ids, strict=True):
            request.token_ids.append(token)


def test_tokens_that_did_not_come_from_the_sampler_are_noticed() -> None:
    sampler = Sampler(raw_logprobs=False)
    requests = [make(6, 0), make(8, 1), make(11, 2)]
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    sampler.sample(logits, requests)
    for request in requests:
        request.token_ids += [3, 1, 3]
    same(sampler.sample(logits, requests), Sampler(raw_logprobs=False).sample(logits, requests))


def test_another_vocabulary_starts_afresh() -> None:
    sampler = Sampler(raw_logprobs=False)
    requests = [make(4, 0), make(5, 1)]
    for width in (VOCABULARY, VOCABULARY + 3):
        logits = torch.randn(2, width, generator=torch.Generator().manual_seed(2))
        samples = sampler.sample(logits, requests)
        same(samples, Sampler(raw_logprobs=False).sample(logits, requests))
        lists = samples.logprobs[0]
        assert lists is not None
        assert lists.token_ids.shape == (1, 1 + width)


@pytest.mark.parametrize("exact", [False, True])
def test_backends_and_modes_choose_the_same_tokens(exact: bool) -> None:
    requests = [make(number % len(KINDS), number) for number in range(60)]
    logits = torch.randn(60, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    twin = Sampler(raw_logprobs=False, backend="torch").sample(logits, requests)
    other = Sampler(raw_logprobs=False, exact_logprobs=exact).sample(logits, requests)
    assert other.token_ids == twin.token_ids
    for one, two in zip(twin.logprobs, other.logprobs, strict=True):
        if one is not None and two is not None:
            np.testing.assert_array_equal(one.token_ids, two.token_ids)
            np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=2e-5)
