"""The sampler against a plain reference: choices, distribution, log-probs, ranks, seeds, rows that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollspan.engine.request import Request
from rollspan.kernels.sampling import uniforms
from rollspan.protocol.messages import EngineCoreRequest, LogprobsLists
from rollspan.sampler.sampler import Sampler, Samples
from rollspan.sampling_params import SamplingParams

VOCABULARY = 12


def request(*, seed: int = 0, outputs: int = 0, **params: Any) -> Request:
    """A request that has sampled ``outputs`` tokens."""
    message = EngineCoreRequest("r", [1, 2], SamplingParams(**params))
    made = Request(message, admission=("default", 0), arrival=0, seed=seed)
    made.token_ids += [0] * outputs
    return made


def sample(logits: torch.Tensor, requests: list[Request], *, raw: bool = False) -> Samples:
    return Sampler(raw_logprobs=raw).sample(logits, requests)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def lists(samples: Samples, row: int = 0) -> LogprobsLists:
    found = samples.logprobs[row]
    assert found is not None
    return found


def many(logits: torch.Tensor, count: int = 4000, **params: Any) -> list[int]:
    """Tokens of ``count`` requests with different seeds, all on one row of logits."""
    requests = [request(seed=seed, **params) for seed in range(count)]
    return sample(logits.expand(count, -1), requests).token_ids


def test_uniforms_are_splitmix64_of_seed_and_position() -> None:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    # The generator's published first output for seed 0 is mix(golden).
    assert mix(golden) == 0xE220A8397B1DCDAF
    cases = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 10**6), (12345, 67890)]
    expected = [(mix((mix((s + golden) % 2**64) + (p + 1) * golden) % 2**64) >> 11) / 2**53 for s, p in cases]
    assert uniforms([s for s, _ in cases], [p for _, p in cases]).tolist() == expected


def test_uniforms_have_values_that_never_change() -> None:
    assert uniforms([0, 7], [0, 3]).tolist() == [0.6524484863740322, 0.6042348053683145]


def test_uniforms_fill_the_unit_interval_evenly_for_neighbouring_seeds_and_positions() -> None:
    for draws in (uniforms(range(20_000), [5] * 20_000), uniforms([9] * 20_000, range(20_000))):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts = np.histogram(draws, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, 0.1 %


def test_greedy_takes_the_most_probable_token_whatever_the_seed() -> None:
    logits = rows(50)
    expected = logits.argmax(dim=-1).tolist()
    for seed in (0, 1):
        assert sample(logits, [request(seed=seed, temperature=0.0)] * 50).token_ids == expected


def test_greedy_ignores_top_k_and_top_p() -> None:
    logits = rows(20)
    plain = sample(logits, [request(temperature=0.0, logprobs=2)] * 20)
    limited = sample(logits, [request(temperature=0.0, top_k=1, top_p=0.1, logprobs=2)] * 20)
    assert limited.token_ids == plain.token_ids
    np.testing.assert_array_equal(lists(limited).logprobs, lists(plain).logprobs)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_are_distributed_as_the_softmax_at_the_temperature(temperature: float) -> None:
    logits = rows(1, seed=3)
    expected = torch.softmax(logits[0].double() / temperature, dim=-1).numpy() * 4000
    counts = np.bincount(many(logits, temperature=temperature), minlength=VOCABULARY)
    likely = expected > 5
    deviation = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert deviation < 31.3  # chi-square, 11 degrees of freedom, 0.1 %


def test_top_k_keeps_the_k_most_probable_tokens() -> None:
    logits = rows(1, seed=4)
    for k in (1, 3, 7):
        assert set(many(logits, top_k=k, temperature=2.0)) == set(logits[0].topk(k).indices.tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]])
    for top_p, kept in ((0.39, 1), (0.5, 2), (0.75, 3), (0.9, 4), (0.999, 5), (1e-9, 1)):
        assert set(many(probabilities.log(), top_p=top_p)) == set(range(kept)), top_p


def test_top_p_counts_after_top_k_and_temperature() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    # Of the two best, the first has 4/7; squared (temperature 0.5) 16/25.
    assert set(many(probabilities.log(), top_k=2, top_p=0.6)) == {0, 1}
    assert set(many(probabilities.log(), top_k=2, top_p=0.6, temperature=0.5)) == {0}


@pytest.mark.parametrize("top_k", [0, -1, VOCABULARY, 10**9])
def test_values_that_switch_top_k_off_change_nothing(top_k: int) -> None:
    logits = rows(1)
    assert many(logits, 300, top_k=top_k) == many(logits, 300)


def test_a_batch_may_mix_all_kinds_of_requests_and_each_gets_what_it_would_get_alone() -> None:
    logits = rows(7, seed=8)
    requests = [
        request(temperature=0.0, logprobs=3),
        request(seed=1, temperature=0.3),
        request(seed=2, top_k=2, logprobs=0),
        request(seed=3, top_p=0.4, logprobs=2),
        request(seed=4, top_k=4, top_p=0.9, temperature=1.7, outputs=9),
        request(seed=5, min_tokens=2, all_stop_token_ids=(0, 1, 2, 3), logprobs=5),
        request(seed=2**63 - 1, logprobs=-1),
    ]
    together = sample(logits, requests)
    for row, one in enumerate(requests):
        alone = sample(logits[row : row + 1], [one])
        assert alone.token_ids[0] == together.token_ids[row]
        expected, found = alone.logprobs[0], together.logprobs[row]
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            np.testing.assert_array_equal(found.token_ids, expected.token_ids)
            np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-6)
            np.testing.assert_array_equal(found.sampled_ranks, expected.sampled_ranks)


def test_the_order_of_the_batch_changes_no_sample() -> None:
    logits = rows(40, seed=6)
    requests = [request(seed=seed, outputs=seed % 5, top_k=seed % 7, top_p=1 - seed % 3 / 4) for seed in range(40)]
    forward = sample(logits, requests).token_ids
    backward = sample(logits.flip(0), requests[::-1]).token_ids
    assert backward[::-1] == forward


def test_a_seed_gives_the_same_token_at_the_same_position_and_others_elsewhere() -> None:
    logits = rows(1).expand(64, -1)
    positions = [request(seed=3, outputs=position) for position in range(64)]
    assert sample(logits, positions).token_ids == sample(logits, positions).token_ids
    assert len(set(sample(logits, positions).token_ids)) > 3
    assert len(set(sample(logits, [request(seed=seed) for seed in range(64)]).token_ids)) > 3


def test_min_tokens_masks_eos_and_stop_tokens_until_enough_are_out() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 4], logits[0, 5], logits[0, 6] = 9.0, 8.0, 7.0
    params = {"temperature": 0.0, "min_tokens": 2, "all_stop_token_ids": (4, 5)}
    picked = [sample(logits, [request(outputs=outputs, **params)]).token_ids[0] for outputs in range(4)]
    assert picked == [6, 6, 4, 4]


def test_stop_tokens_outside_the_vocabulary_mask_nothing_and_harm_nobody() -> None:
    logits = rows(2)
    odd = request(temperature=0.0, min_tokens=1, all_stop_token_ids=(VOCABULARY, 2**32 - 1))
    assert sample(logits, [odd, request(temperature=0.0)]).token_ids == logits.argmax(dim=-1).tolist()


def test_processed_logprobs_are_those_of_the_distribution_that_was_sampled_from() -> None:
    logits = rows(1, seed=5)
    samples = sample(logits, [request(temperature=0.5, top_k=4, logprobs=6, seed=1)])
    scaled = logits[0].double() / 0.5
    kept = scaled.topk(4)
    expected = torch.log_softmax(kept.values, dim=-1)
    found = lists(samples)
    assert found.token_ids.dtype == np.int32
    assert found.logprobs.dtype == np.float32
    assert found.token_ids[0, 1:5].tolist() == kept.indices.tolist()
    np.testing.assert_allclose(found.logprobs[0, 1:5], expected.numpy(), rtol=1e-5)
    assert np.isneginf(found.logprobs[0, 5:]).all()
    place = kept.indices.tolist().index(samples.token_ids[0])
    assert found.sampled_ranks.tolist() == [place + 1]
    assert found.token_ids[0, 0] == samples.token_ids[0]
    assert found.logprobs[0, 0] == found.logprobs[0, 1 + place]


def test_raw_logprobs_are_the_models_own() -> None:
    logits = rows(3, seed=7)
    requests = [request(temperature=t, top_k=3, logprobs=VOCABULARY, seed=2) for t in (0.0, 0.5, 1.5)]
    samples = sample(logits, requests, raw=True)
    assert samples.token_ids == sample(logits, requests).token_ids
    for row in range(3):
        expected = torch.log_softmax(logits[row].double(), dim=-1)
        found = lists(samples, row)
        order = expected.argsort(descending=True)
        assert found.token_ids[0, 1:].tolist() == order.tolist()
        np.testing.assert_allclose(found.logprobs[0, 1:], expected[order].numpy(), rtol=1e-5)
        assert found.sampled_ranks[0] == order.tolist().index(samples.token_ids[row]) + 1


@pytest.mark.parametrize(("wanted", "columns"), [(0, 1), (1, 2), (5, 6), (VOCABULARY, 13), (-1, 13), (10**6, 13)])
def test_logprobs_k_gives_the_sampled_token_and_the_top_k(wanted: int, columns: int) -> None:
    found = lists(sample(rows(1), [request(logprobs=wanted)]))
    assert found.token_ids.shape == found.logprobs.shape == (1, columns)
    assert found.sampled_ranks.shape == (1,)


def test_no_logprobs_are_given_unless_asked_for() -> None:
    assert sample(rows(2), [request(), request(logprobs=0)]).logprobs[0] is None


def test_equally_probable_tokens_share_a_rank() -> None:
    samples = sample(torch.zeros(1, VOCABULARY), [request(logprobs=0, seed=11)])
    assert lists(samples).sampled_ranks.tolist() == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_invalid_and_leaves_the_others_alone(value: float) -> None:
    logits = rows(3)
    clean = sample(logits, [request(seed=4, logprobs=2)] * 3)
    logits[1, 5] = value
    samples = sample(logits, [request(seed=4, logprobs=2)] * 3)
    assert samples.valid == [True, False, True]
    for row in (0, 2):
        assert samples.token_ids[row] == clean.token_ids[row]
        np.testing.assert_array_equal(lists(samples, row).logprobs, lists(clean, row).logprobs)


def test_a_row_without_any_possible_token_is_invalid() -> None:
    logits = rows(2)
    logits[0] = float("-inf")
    assert sample(logits, [request(temperature=0.0)] * 2).valid == [False, True]


def test_impossible_tokens_are_never_drawn() -> None:
    logits = rows(1)
    logits[0, ::2] = float("-inf")
    assert set(many(logits, 2000, temperature=2.0)) == {1, 3, 5, 7, 9, 11}


def test_logits_that_the_temperature_makes_infinite_are_invalid_rather_than_wrong() -> None:
    logits = torch.full((2, VOCABULARY), 1.0)
    logits[0] = 1e36
    assert sample(logits, [request(temperature=1e-4)] * 2).valid == [False, True]


def test_a_request_whose_every_token_is_masked_is_invalid() -> None:
    masked = request(min_tokens=1, all_stop_token_ids=tuple(range(VOCABULARY)))
    assert sample(rows(2), [masked, request()]).valid == [False, True]


def test_half_precision_logits_are_sampled_in_single_precision() -> None:
    logits = rows(8).to(torch.bfloat16)
    requests = [request(seed=seed, logprobs=1) for seed in range(8)]
    half, single = sample(logits, requests), sample(logits.float(), requests)
    assert half.token_ids == single.token_ids
    np.testing.assert_array_equal(lists(half).logprobs, lists(single).logprobs)


def test_a_step_that_samples_nothing_gives_nothing() -> None:
    assert sample(torch.empty(0, VOCABULARY), []) == Samples([], [], [])
