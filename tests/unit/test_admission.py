"""Checks of requests against the engine's limits, and their split into engine requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollspan.admission import admit, check_request_id
from rollspan.errors import RollspanError
from rollspan.sampling_params import SamplingParams
from support.fake_engine import HELLO


def test_one_sequence_is_one_request_whose_internal_id_starts_with_the_external_one() -> None:
    admitted = admit([1, 2], SamplingParams(seed=5), HELLO, request_id="mine")
    (request,) = admitted.engine_requests
    assert admitted.request_id == "mine"
    assert request.external_req_id == "mine"
    assert request.request_id.startswith("mine-")
    assert len(request.request_id) == len("mine-") + 8
    assert request.sampling_params.seed == 5


def test_n_sequences_are_n_requests_with_seeds_that_count_up_within_63_bits() -> None:
    admitted = admit([1], SamplingParams(n=3, seed=2**63 - 2), HELLO)
    assert len(admitted.request_id) == 32
    internal = admitted.engine_requests[0].request_id.removeprefix("0_")
    assert [request.request_id for request in admitted.engine_requests] == [f"{index}_{internal}" for index in range(3)]
    assert [request.sampling_params.seed for request in admitted.engine_requests] == [2**63 - 2, 2**63 - 1, 0]
    assert all(request.sampling_params.n == 1 for request in admitted.engine_requests)


def test_parameters_are_resolved_against_the_model() -> None:
    (request,) = admit([1] * 4, SamplingParams(), HELLO).engine_requests
    assert request.sampling_params.max_tokens == 60
    assert request.sampling_params.eos_token_id == 99
    assert 98 in request.sampling_params.stop_token_ids


@pytest.mark.parametrize("prompt", [(1, 2), {"prompt_token_ids": [1, 2]}, np.array([1, 2])])
def test_prompts_may_be_tuples_mappings_and_arrays(prompt: Any) -> None:
    assert admit(prompt, SamplingParams(), HELLO).prompt_token_ids == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "token_ids must be a non-empty list of integers from 0 to 99, got []"),
        ([5, -1], "token_ids must be a non-empty list of integers from 0 to 99, got -1 at index 1"),
        ([100], "token_ids must be a non-empty list of integers from 0 to 99, got 100 at index 0"),
        ([1.5], "token_ids must be a non-empty list of integers from 0 to 99, got 1.5 at index 0"),
        ([True], "token_ids must be a non-empty list of integers from 0 to 99, got true at index 0"),
        ("text", 'token_ids must be a non-empty list of integers from 0 to 99, got "text"'),
        ({}, "token_ids must be a non-empty list of integers from 0 to 99, got null"),
    ],
)
def test_a_bad_prompt_is_refused_naming_the_element(prompt: Any, message: str) -> None:
    with pytest.raises(RollspanError) as caught:
        admit(prompt, SamplingParams(), HELLO)
    assert (caught.value.message, caught.value.reason, caught.value.param) == (message, "invalid_request", "token_ids")


def test_a_prompt_must_leave_room_for_one_token() -> None:
    (request,) = admit([1] * 63, SamplingParams(max_tokens=9), HELLO).engine_requests
    assert request.sampling_params.max_tokens == 1
    with pytest.raises(RollspanError, match="at most 63 tokens") as caught:
        admit([1] * 64, SamplingParams(), HELLO)
    assert caught.value.reason == "prompt_too_long"


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a\x85b", 5])
def test_request_ids_that_could_break_a_log_line_are_refused(name: Any) -> None:
    with pytest.raises(RollspanError, match="request_id must be a string of 1 to 256 characters"):
        check_request_id(name)


@pytest.mark.parametrize(("field", "value"), [("priority", 2**31), ("priority", True), ("cache_salt", "")])
def test_other_arguments_are_checked(field: str, value: Any) -> None:
    with pytest.raises(RollspanError, match=field) as caught:
        admit([1], SamplingParams(), HELLO, **{field: value})
    assert caught.value.param == field


def test_stop_ids_and_log_probs_are_held_against_the_model() -> None:
    with pytest.raises(RollspanError, match="stop_token_ids"):
        admit([1], SamplingParams(stop_token_ids=(100,)), HELLO)
    with pytest.raises(RollspanError, match="logprobs"):
        admit([1], SamplingParams(logprobs=6), HELLO)
