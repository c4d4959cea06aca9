"""Masks, biases and penalties: each against what it is defined to do, alone and together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from rollspan.engine.request import Request
from rollspan.protocol.messages import EngineCoreRequest, LogprobsLists
from rollspan.sampler.sampler import Sampler, Samples
from rollspan.sampling_params import SamplingParams

VOCABULARY = 40


def request(prompt: list[int], output: list[int], *, seed: int = 0, **params: Any) -> Request:
    made = Request(
        EngineCoreRequest("r", prompt, SamplingParams(logprobs=VOCABULARY, **params)),
        admission=("default", 0),
        arrival=0,
        seed=seed,
    )
    made.token_ids += output
    return made


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def distribution(samples: Samples, row: int = 0) -> np.ndarray:
    """Reported log-probs by token id."""
    lists = samples.logprobs[row]
    assert isinstance(lists, LogprobsLists)
    found = np.empty(VOCABULARY, np.float32)
    found[lists.token_ids[0, 1:]] = lists.logprobs[0, 1:]
    return found


def sample(logits: torch.Tensor, *requests: Request, raw: bool = False, mask: torch.Tensor | None = None) -> Samples:
    before = logits.clone()
    samples = Sampler(raw_logprobs=raw).sample(logits, requests, mask)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)  # left as they are
    return samples


def logprobs(logits: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.double(), dim=-1).numpy()


def test_allowed_tokens_are_the_only_ones_that_stay() -> None:
    logits = rows(2)
    allowed = request([1], [], allowed_token_ids=(3, 7, 7, 30))
    samples = sample(logits, allowed, request([1], []))
    masked = torch.full((VOCABULARY,), -torch.inf)
    masked[[3, 7, 30]] = logits[0, [3, 7, 30]]
    np.testing.assert_allclose(distribution(samples), logprobs(masked), atol=2e-5)
    np.testing.assert_allclose(distribution(samples, 1), logprobs(logits[1]), atol=2e-5)


def test_a_bias_is_added_to_its_tokens() -> None:
    logits = rows(1)
    biased = logits[0].clone()
    biased[[2, 39]] += torch.tensor([5.0, -100.0])
    samples = sample(logits, request([1], [], logit_bias={2: 5.0, 39: -100.0}))
    np.testing.assert_allclose(distribution(samples), logprobs(biased), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("output", "masked"),
    [([], {5}), ([8], {5, 9}), ([7, 8], {5, 9, 4}), ([8, 7], {5}), ([3, 7, 8], {5, 9, 4}), ([1, 2], {5})],
)
def test_bad_words_lose_their_last_token_where_the_output_ends_with_their_beginning(
    output: list[int], masked: set[int]
) -> None:
    words = ((5,), (8, 9), (7, 8, 4), (6, 7, 8, 30))
    # The prompt ends as a word begins; that does not count.
    samples = sample(rows(1), request([7, 8], output, bad_words_token_ids=words))
    assert set(np.flatnonzero(np.isneginf(distribution(samples))).tolist()) == masked


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.5}, {"repetition_penalty": 0.5}])
def test_the_repetition_penalty_counts_prompt_and_output_once(params: dict[str, float]) -> None:
    logits = rows(1, seed=3)
    want = logits[0].clone()
    for token in {1, 2, 9, 11}:
        factor = params["repetition_penalty"]
        want[token] = want[token] / factor if want[token] > 0 else want[token] * factor
    samples = sample(logits, request([1, 2, 2], [9, 11, 9], **params))
    np.testing.assert_allclose(distribution(samples), logprobs(want), atol=2e-5)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = rows(1, seed=3)
    want = logits[0].clone()
    for token, count in Counter([9, 11, 9, 9]).items():
        want[token] = want[token] - 0.3 * count - 1.25
    samples = sample(logits, request([1, 2, 2], [9, 11, 9, 9], frequency_penalty=0.3, presence_penalty=1.25))
    np.testing.assert_allclose(distribution(samples), logprobs(want), atol=2e-5)


def everything(logits: torch.Tensor) -> torch.Tensor:
    """What the parameters of the next test do to one row, step by step."""
    want = torch.full((VOCABULARY,), -torch.inf)
    allowed = list(range(0, VOCABULARY, 2))
    want[allowed] = logits[allowed]
    want[4] = -torch.inf  # the bad word (9, 4) after an output that ends in 9
    want[6] = -torch.inf  # a stop token, as min_tokens is not reached
    want[[4, 8]] += 2.0  # the bias leaves a masked token masked
    for token in {8, 10, 9}:
        want[token] = want[token] / 1.3 if want[token] > 0 else want[token] * 1.3
    want[10] -= 0.5 * 2 + 0.25
    want = want / 0.8
    share = torch.softmax(want, -1)
    want[share < 0.01 * share.max()] = -torch.inf
    kept = want.topk(8).indices
    top = torch.full((VOCABULARY,), -torch.inf)
    top[kept] = want[kept]
    ordered, order = torch.softmax(top, -1).sort(descending=True)
    top[order[ordered.cumsum(-1) - ordered >= 0.9]] = -torch.inf
    return top


def test_everything_together_is_applied_in_vllms_order() -> None:
    logits = rows(3, seed=12)
    busy = request(
        [8],
        [10, 10, 9],
        allowed_token_ids=tuple(range(0, VOCABULARY, 2)),
        bad_words_token_ids=((9, 4),),
        min_tokens=4,
        all_stop_token_ids=(6,),
        logit_bias={4: 2.0, 8: 2.0},
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        temperature=0.8,
        min_p=0.01,
        top_k=8,
        top_p=0.9,
    )
    samples = sample(logits, request([1], []), busy, request([1], [], temperature=0.0))
    want = logprobs(everything(logits[1]))
    assert 1 < np.isfinite(want).sum() < 8
    np.testing.assert_allclose(distribution(samples, 1), want, atol=2e-5)
    for row in (0, 2):
        np.testing.assert_allclose(distribution(samples, row), logprobs(logits[row]), atol=2e-5)


def test_greedy_requests_take_the_best_of_what_is_left() -> None:
    logits = rows(1)
    first, second = logits[0].topk(2).indices.tolist()
    banned = request([1], [], temperature=0.0, logit_bias={first: -100.0})
    assert sample(logits, banned).token_ids == [second]


def test_raw_logprobs_know_nothing_of_edits() -> None:
    logits = rows(1)
    edited = request([1], [2], allowed_token_ids=(5, 6), frequency_penalty=1.0, temperature=0.3)
    samples = sample(logits, edited, raw=True)
    assert samples.token_ids[0] in (5, 6)
    np.testing.assert_allclose(distribution(samples), logprobs(logits[0]), atol=2e-5)


def packed(mask: torch.Tensor) -> torch.Tensor:
    """The mask as int32 words, lowest bit first."""
    words = -(-mask.shape[1] // 32)
    bits = np.zeros((len(mask), words * 32), np.uint8)
    bits[:, : mask.shape[1]] = mask.numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("form", ["bool", "packed"])
def test_a_mask_of_allowed_tokens_comes_first(form: str) -> None:
    logits = rows(3)
    mask = torch.ones(3, VOCABULARY, dtype=torch.bool)
    mask[1, 10:] = False
    given = packed(mask) if form == "packed" else mask
    if form == "packed":
        given[[0, 2]] = -1  # no rule for these rows
    requests = request([1], []), request([1], [], allowed_token_ids=(1, 9, 20)), request([1], [], logit_bias={3: 1.0})
    samples = sample(logits, *requests, mask=given)
    assert np.flatnonzero(np.isfinite(distribution(samples, 1))).tolist() == [1, 9]
    np.testing.assert_allclose(distribution(samples, 0), logprobs(logits[0]), atol=2e-5)
    biased = logits[2].clone()
    biased[3] += 1
    np.testing.assert_allclose(distribution(samples, 2), logprobs(biased), atol=2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (1, 2)},
        {"bad_words_token_ids": ((5,),)},
        {"min_tokens": 3, "all_stop_token_ids": (5,)},
        {"logit_bias": {5: -100.0}},
        {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0},
    ],
)
def test_a_logit_that_is_not_finite_is_found_even_where_it_is_edited(value: float, params: dict[str, Any]) -> None:
    logits = rows(2)
    logits[0, 5] = value
    assert sample(logits, request([5], [5], **params), request([1], [])).valid == [False, True]
    mask = torch.ones(2, VOCABULARY, dtype=torch.bool)
    mask[0, 5] = False
    assert sample(logits, request([5], [5], **params), request([1], []), mask=mask).valid == [False, True]


def test_half_precision_logits_are_edited_in_single_precision() -> None:
    logits = rows(4).to(torch.bfloat16)
    requests = [request([1], [2, 3, 3], frequency_penalty=0.01, seed=seed) for seed in range(4)]
    half, single = sample(logits, *requests), sample(logits.float(), *requests)
    assert half.token_ids == single.token_ids
    for row in range(4):
        np.testing.assert_array_equal(distribution(half, row), distribution(single, row))


def test_prompt_logprobs_are_the_models_own_with_ranks() -> None:
    logits = rows(5)
    sampler = Sampler(raw_logprobs=False)
    found = sampler.prompt_logprobs(logits, [3, 0, 39, 7, 7], 4)
    assert (found.token_ids.dtype, found.logprobs.dtype, found.sampled_ranks.dtype) == ("int32", "float32", "int32")
    for row, target in enumerate([3, 0, 39, 7, 7]):
        want = logprobs(logits[row])
        assert found.token_ids[row].tolist() == [target, *logits[row].topk(4).indices.tolist()]
        np.testing.assert_allclose(found.logprobs[row], want[found.token_ids[row]], atol=2e-5)
        assert found.sampled_ranks[row] == 1 + (want > want[target]).sum()
    assert sampler.prompt_logprobs(logits, [1] * 5, -1).token_ids.shape == (5, 1 + VOCABULARY)
    assert sampler.prompt_logprobs(logits, [1] * 5, 0).token_ids.shape == (5, 1)
