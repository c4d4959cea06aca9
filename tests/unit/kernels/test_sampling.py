"""Both samplers against plain double precision, and what they promise beyond it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling_reference import expected
from rollspan.kernels import sampling_native
from rollspan.kernels.sampling import Rows, SampleResult, make_rows, sample, score

NATIVE = sampling_native.takes(torch.zeros(1, 1))
BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not NATIVE, reason="the extension module is not installed")),
]


def random_rows(count: int, vocabulary: int, seed: int, **fixed: Any) -> Rows:
    """Rows with all kinds of parameters, mixed."""
    rng = np.random.default_rng(seed)
    kinds: dict[str, Any] = {
        "seed": rng.integers(0, 2**63, count),
        "position": rng.integers(0, 1000, count),
        "temperature": rng.choice([0, 0.5, 1, 1, 1.7], count),
        "top_k": rng.choice([0, 0, 1, 3, 50, 700, vocabulary], count),
        "top_p": rng.choice([1, 1, 0.9, 0.5, 0.99, 1e-6], count),
        "min_p": rng.choice([0, 0, 0.1, 0.01], count),
        "num_top": np.minimum(rng.choice([-1, 0, 1, 5, 20, vocabulary], count), vocabulary),
    }
    return make_rows(count, **{**kinds, **fixed})


def random_logits(count: int, vocabulary: int, seed: int, *, scale: float = 3.0, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale
    return (logits * 4).round() / 4 if ties else logits


def check(result: SampleResult, logits: torch.Tensor, rows: Rows) -> int:
    """Compares with the reference; returns how many rows could be compared."""
    compared = 0
    for index, row in enumerate(rows):
        assert result.valid[index]
        plain = logits[index].float().numpy()
        want = expected(plain, row)
        if not want.certain:
            continue
        compared += 1
        assert result.token_ids[index] == want.token
        if row["num_top"] < 0:
            continue
        order = np.lexsort((np.arange(len(plain)), -plain))[: row["num_top"]]
        ids = result.ids[index, : 1 + len(order)]
        np.testing.assert_array_equal(ids, [want.token, *order])
        np.testing.assert_allclose(result.logprobs[index, : len(ids)], want.logprobs[ids], rtol=0, atol=2e-5)
        assert result.ranks[index] == 1 + (plain > plain[want.token]).sum()
    return compared


parameters = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 2**40),
        "temperature": st.sampled_from([0.0, 0.25, 1.0, 2.0]),
        "top_k": st.integers(-1, 40),
        "top_p": st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
        "num_top": st.integers(-1, 30),
    }
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.integers(-80, 80), min_size=1, max_size=400), row=parameters)
def test_any_row_gives_what_double_precision_gives(backend: str, data: list[int], row: dict[str, Any]) -> None:
    logits = torch.tensor([data], dtype=torch.float32) / 8
    rows = make_rows(1, **row)
    rows["num_top"] = min(rows["num_top"][0], len(data))
    check(sample(logits, rows, backend=backend), logits, rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocabulary", [1, 7, 16, 255, 256, 257, 1000, 5003])
def test_batches_of_mixed_rows_give_what_double_precision_gives(backend: str, vocabulary: int) -> None:
    compared = 0
    for scale, ties in ((1.0, True), (3.0, False), (9.0, True)):
        logits = random_logits(96, vocabulary, vocabulary, scale=scale, ties=ties)
        rows = random_rows(96, vocabulary, vocabulary + 1)
        compared += check(sample(logits, rows, backend=backend), logits, rows)
    assert compared > 250


@pytest.mark.skipif(not NATIVE, reason="the extension module is not installed")
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_both_samplers_agree_over_thousands_of_draws(raw: bool, scale: float) -> None:
    logits = random_logits(3000, 2048, 5, scale=scale)
    rows = random_rows(3000, 2048, 6, num_top=2)
    native = sample(logits, rows, raw_logprobs=raw, backend="native")
    torch_ = sample(logits, rows, raw_logprobs=raw, backend="torch")
    same = native.token_ids == torch_.token_ids
    assert (~same).sum() <= 1  # a draw within 1e-6 of a boundary
    np.testing.assert_array_equal(native.ranks[same], torch_.ranks[same])
    np.testing.assert_array_equal(native.ids[same], torch_.ids[same])
    np.testing.assert_allclose(native.logprobs[same], torch_.logprobs[same], rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_samples_are_distributed_as_the_reported_logprobs(backend: str, parameters: dict[str, float]) -> None:
    logits = random_logits(1, 12, 3, scale=2.0)
    rows = make_rows(4000, seed=range(4000), num_top=12, **parameters)
    result = sample(logits.expand(4000, -1), rows, backend=backend)
    share = np.zeros(12)
    share[result.ids[0, 1:]] = np.exp(result.logprobs[0, 1:])
    counts = np.bincount(result.token_ids, minlength=12)
    assert counts[share == 0].sum() == 0
    assert share.sum() == pytest.approx(1, abs=1e-5)
    likely = share * 4000 > 5
    deviation = ((counts - share * 4000)[likely] ** 2 / (share * 4000)[likely]).sum()
    assert deviation < 31.3  # chi-square, 11 degrees of freedom, 0.1 %


@pytest.mark.parametrize("backend", BACKENDS)
def test_raw_logprobs_are_about_the_models_logits_whatever_is_sampled_from(backend: str) -> None:
    logits = random_logits(40, 300, 1)
    rows = random_rows(40, 300, 2, num_top=4)
    index = np.array([0, 3, 17, 39])
    changed = random_logits(4, 300, 9)
    result = sample(logits, rows, edited=(index, changed), raw_logprobs=True, backend=backend)
    scores = logits.clone()
    scores[index] = changed
    assert result.token_ids.tolist() == sample(scores, rows, backend=backend).token_ids.tolist()
    logprobs = torch.log_softmax(logits.double(), dim=-1).numpy()
    for row in range(40):
        np.testing.assert_allclose(result.logprobs[row], logprobs[row, result.ids[row]], rtol=0, atol=2e-5)
        assert result.ranks[row] == 1 + (logits[row] > logits[row, result.token_ids[row]]).sum()
        assert result.ids[row, 1:].tolist() == logits[row].topk(4).indices.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_exactly(backend: str, dtype: torch.dtype) -> None:
    logits = random_logits(64, 1030, 4).to(dtype)
    rows = random_rows(64, 1030, 5, num_top=3)
    half, single = (sample(x, rows, backend=backend) for x in (logits, logits.float()))
    assert half.outcomes.tobytes() == single.outcomes.tobytes()
    assert half.logprobs.tobytes() == single.logprobs.tobytes()
    assert half.ids.tobytes() == single.ids.tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 15, 16, 250, 256, 299])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_one_bad_logit_anywhere_is_invalid_and_alone_in_that(
    backend: str, value: float, place: int, temperature: float
) -> None:
    logits = random_logits(3, 300, 7)
    rows = make_rows(3, seed=[1, 2, 3], temperature=temperature, num_top=1)
    clean = sample(logits, rows, backend=backend)
    logits[1, place] = value
    result = sample(logits, rows, backend=backend)
    assert result.valid.tolist() == [True, False, True]
    for row in (0, 2):
        assert result.outcomes[row] == clean.outcomes[row]
        assert result.logprobs[row].tobytes() == clean.logprobs[row].tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_impossible_tokens_are_never_drawn_and_come_last(backend: str) -> None:
    logits = torch.full((500, 600), -torch.inf)
    logits[:, [7, 300, 599]] = torch.tensor([1.0, 2.0, 1.0])
    result = sample(logits, make_rows(500, seed=range(500), top_k=5, top_p=0.999999, num_top=6), backend=backend)
    assert set(result.token_ids.tolist()) == {7, 300, 599}
    assert result.ids[0, 1:].tolist() == [300, 7, 599, 0, 1, 2]
    assert np.isneginf(result.logprobs[0, 4:]).all()
    assert sample(torch.full((1, 600), -torch.inf), make_rows(1), backend=backend).valid.tolist() == [False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_at_the_boundary_all_stay_in_top_k_and_those_of_the_lowest_ids_in_top_p(backend: str) -> None:
    logits = torch.zeros(2000, 700)
    logits[:, 650] = 1.0
    kept = sample(logits, make_rows(2000, seed=range(2000), top_k=2, num_top=0), backend=backend)
    assert len(set(kept.token_ids.tolist())) > 500
    assert kept.logprobs[0, 0] == pytest.approx(-np.log(699 + np.e) + (kept.token_ids[0] == 650), abs=1e-5)
    share = (np.e + 2.5) / (699 + np.e)
    nucleus = sample(logits, make_rows(2000, seed=range(2000), top_p=share, num_top=0), backend=backend)
    assert set(nucleus.token_ids.tolist()) == {650, 0, 1, 2}


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_the_logprobs_of_given_tokens(backend: str) -> None:
    logits = random_logits(30, 1000, 8)
    targets = np.arange(30) * 31
    result = score(logits, targets, 3, backend=backend)
    logprobs = torch.log_softmax(logits.double(), dim=-1).numpy()
    for row, target in enumerate(targets.tolist()):
        assert result.ids[row].tolist() == [target, *logits[row].topk(3).indices.tolist()]
        np.testing.assert_allclose(result.logprobs[row], logprobs[row, result.ids[row]], rtol=0, atol=2e-5)
        assert result.ranks[row] == 1 + (logits[row] > logits[row, target]).sum()
    logits[4, 999] = torch.nan
    spoiled = score(logits, targets, 3, backend=backend)
    assert np.flatnonzero(~spoiled.valid).tolist() == [4]
    assert np.isnan(spoiled.logprobs[4]).all()
    assert spoiled.logprobs[5].tobytes() == result.logprobs[5].tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_logprobs_are_those_of_torch_to_the_bit(backend: str) -> None:
    logits = random_logits(64, 5000, 2)
    rows = random_rows(64, 5000, 3, top_k=0, top_p=1, min_p=0, num_top=2)
    temperature = torch.from_numpy(np.where(rows["temperature"] == 0, np.float32(1), rows["temperature"]))
    for raw, want in ((False, torch.log_softmax(logits / temperature[:, None], -1)), (True, logits.log_softmax(-1))):
        result = sample(logits, rows, exact_logprobs=True, raw_logprobs=raw, backend=backend)
        assert result.logprobs.tobytes() == want.gather(1, torch.from_numpy(result.ids).long()).numpy().tobytes()
        assert (result.outcomes == sample(logits, rows, raw_logprobs=raw, backend=backend).outcomes).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_logprobs_of_truncated_rows_are_finite_for_what_was_chosen(backend: str) -> None:
    logits = random_logits(300, 500, 2, ties=True)
    rows = random_rows(300, 500, 3, num_top=2)
    result = sample(logits, rows, exact_logprobs=True, backend=backend)
    np.testing.assert_allclose(result.logprobs, sample(logits, rows, backend=backend).logprobs, rtol=0, atol=2e-5)
    assert np.isfinite(result.logprobs[:, 0]).all()


def test_the_native_sampler_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="native"):
        sample(torch.zeros(1, 4, dtype=torch.float64), make_rows(1), backend="native")
    assert sample(torch.zeros(1, 4, dtype=torch.float64), make_rows(1)).valid.tolist() == [True]
