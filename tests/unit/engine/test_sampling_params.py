"""SamplingParams: each bad value names its field, whichever way it comes in; and what resolving fills in."""

from __future__ import annotations

from typing import Any

import pytest

from rollspan.errors import RollspanError
from rollspan.sampling_params import RequestOutputKind, SamplingParams
from rollspan.sampling_rules import MAX_INT64

NAN, INFINITY = float("nan"), float("inf")

#: What both the constructor and the JSON object refuse.
WRONG: list[tuple[str, Any]] = [
    *(("n", value) for value in (0, -1, 1025, 1.0, True, "1")),
    *(("temperature", value) for value in (-0.1, 2.1, NAN, INFINITY, True, "1", 10**400, [1])),
    *(("top_p", value) for value in (0, 0.0, -1, 1.0001, NAN, INFINITY, True, "1")),
    *(("top_k", value) for value in (-2, 1.0, True, "1", MAX_INT64 + 1)),
    *(("seed", value) for value in (-2, MAX_INT64 + 1, 1.0, True, "1")),
    *(("max_tokens", value) for value in (0, -1, 1.0, True, "1", MAX_INT64 + 1)),
    *(("min_tokens", value) for value in (-1, 1.0, True, "1")),
    *(("stop_token_ids", value) for value in ("1", 1, {"a": 1}, [1.0], [True], ["1"], [-1], [2**32], [None], [[1]])),
    *(("ignore_eos", value) for value in (0, 1, "true", [])),
    *(("logprobs", value) for value in (-2, 1.0, True, "1", [])),
]
NEVER_NULL = ("n", "temperature", "top_p", "top_k", "min_tokens", "stop_token_ids", "ignore_eos", "output_kind")


def parse(mapping: dict[str, Any], max_logprobs: int = 20) -> tuple[SamplingParams, list[str]]:
    return SamplingParams.parse(mapping, vocab_size=100, max_logprobs=max_logprobs)


def fault(call: Any) -> RollspanError:
    with pytest.raises(RollspanError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_names_its_field_in_the_constructor_and_in_json(name: str, value: Any) -> None:
    for error in (fault(lambda: SamplingParams(**{name: value})), fault(lambda: parse({name: value}))):
        assert error.reason == "invalid_request"
        assert error.param == f"sampling_params.{name}"
        assert error.message.startswith(f"sampling_params.{name} must be ")
        assert ", got " in error.message


@pytest.mark.parametrize("name", NEVER_NULL)
def test_null_is_wrong_in_the_constructor_and_the_default_in_json(name: str) -> None:
    error = fault(lambda: SamplingParams(**{name: None}))
    assert error.param == f"sampling_params.{name}"
    assert parse({name: None})[0] == SamplingParams()


@pytest.mark.parametrize("value", [3, -1, True, "DELTA", 1.0])
def test_an_unknown_output_kind_is_refused(value: Any) -> None:
    error = fault(lambda: SamplingParams(output_kind=value))
    assert error.message.startswith("sampling_params.output_kind must be 0, 1 or 2, got ")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"temperature": 3}, "sampling_params.temperature must be a number from 0 to 2, got 3"),
        ({"top_p": 0}, "sampling_params.top_p must be a number above 0 and at most 1, got 0"),
        ({"n": "x" * 100}, f'sampling_params.n must be an integer from 1 to 1024, got "{"x" * 63}...'),
        (
            {"max_tokens": 4, "min_tokens": 5},
            "sampling_params.min_tokens must be an integer from 0 to max_tokens, got 5",
        ),
        (
            {"stop_token_ids": [1, 100]},
            "sampling_params.stop_token_ids must be a list of at most 1024 integers from 0 to 99, got 100 at index 1",
        ),
        ({"logprobs": 21}, "sampling_params.logprobs must be an integer from -1 to 20, got 21"),
        (
            {"logprobs": -1},
            "sampling_params.logprobs must be an integer from -1 to 20 (-1 needs a vocabulary of at most 20), got -1",
        ),
        ({"detokenize": 1}, "sampling_params.detokenize must be true or false, got 1"),
    ],
)
def test_the_message_says_what_is_allowed_and_what_came(mapping: dict[str, Any], message: str) -> None:
    assert fault(lambda: parse(mapping)).message == message


def test_a_list_of_too_many_stop_tokens_is_refused() -> None:
    assert parse({"stop_token_ids": [5] * 1024})[0].stop_token_ids == (5,) * 1024
    assert fault(lambda: parse({"stop_token_ids": [5] * 1025})).param == "sampling_params.stop_token_ids"


def test_the_first_field_at_fault_in_the_order_of_the_contract_is_named() -> None:
    assert fault(lambda: parse({"top_k": "x", "n": 0, "min_p": 9})).param == "sampling_params.n"
    assert fault(lambda: parse({"stop": "x", "detokenize": 5})).param == "sampling_params.detokenize"


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("stop", ["x"], "null"),
        ("watermarking", True, "null"),
        ("flat_logprobs", True, "false"),
        ("stream_interval", 2, "null"),
        ("thinking_token_budget", 0, "null"),
        ("logprob_token_ids", [1], "null"),
    ],
)
def test_a_field_that_is_not_supported_yet_is_refused_with_its_neutral_value(
    name: str, value: Any, neutral: str
) -> None:
    error = fault(lambda: parse({name: value}))
    assert error.reason == "unsupported_field"
    assert error.param == f"sampling_params.{name}"
    assert f"is not supported yet: leave it out or send {neutral}, got " in error.message


@pytest.mark.parametrize(
    "mapping",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": None},
        {"stop": [], "bad_words": [], "logit_bias": {}, "extra_args": {}, "watermarking": False, "stream_interval": 1},
        {"stop": "", "detokenize": True, "skip_special_tokens": False, "routed_experts": None},
    ],
)
def test_neutral_values_and_fields_about_text_change_nothing(mapping: dict[str, Any]) -> None:
    assert parse(mapping) == (SamplingParams(), [])


def test_biases_are_read_from_the_strings_that_json_has_for_keys() -> None:
    params, _ = parse({"logit_bias": {"7": -100, "0": 0.5}})
    assert params.logit_bias == {7: -100.0, 0: 0.5}
    assert SamplingParams(logit_bias={7: 1}).logit_bias == {7: 1.0}
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_a_schema_becomes_its_text_with_its_properties_in_order() -> None:
    params, ignored = parse(
        {"structured_outputs": {"json": {"b": "ü", "a": [1, None]}, "regex": None, "_backend": "x"}}
    )
    assert params.structured_outputs == {"json": '{"b":"ü","a":[1,null]}'}
    assert ignored == ["structured_outputs._backend"]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
        ({"allowed_token_ids": (100,)}, "allowed_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"logit_bias": {100: 1}}, "logit_bias"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_does_not_fit_the_model_is_named(params: dict[str, Any], name: str) -> None:
    error = fault(lambda: SamplingParams(**params).check_model(vocab_size=100, max_logprobs=5))
    assert (error.reason, error.param) == ("invalid_request", f"sampling_params.{name}")


def test_unknown_keys_are_named_in_order_and_have_no_effect() -> None:
    assert parse({"zeta": 1, "alpha": {"x": 1}, "top_k": 3}) == (SamplingParams(top_k=3), ["alpha", "zeta"])


def test_minus_one_is_no_seed_and_the_bounds_are_allowed() -> None:
    assert SamplingParams(seed=-1).seed is None
    params, _ = parse(
        {"n": 1024, "temperature": 2, "top_p": 1, "top_k": -1, "seed": MAX_INT64, "max_tokens": MAX_INT64}
    )
    assert (params.n, params.temperature, params.top_p, params.seed) == (1024, 2.0, 1.0, MAX_INT64)
    assert parse({"logprobs": -1}, max_logprobs=100)[0].logprobs == -1


@pytest.mark.parametrize(
    ("params", "eos", "expected"),
    [
        ({}, [7, 8], {"max_tokens": 90, "eos_token_id": 7, "stop_token_ids": (8,), "all_stop_token_ids": (7, 8)}),
        ({}, [], {"eos_token_id": None, "stop_token_ids": (), "all_stop_token_ids": ()}),
        ({"ignore_eos": True, "stop_token_ids": [3]}, [7, 8], {"eos_token_id": None, "stop_token_ids": (3,)}),
        ({"stop_token_ids": [8, 3]}, [7, 8], {"stop_token_ids": (8, 3), "all_stop_token_ids": (3, 7, 8)}),
        ({"max_tokens": 5}, [], {"max_tokens": 5}),
        ({"max_tokens": 500}, [], {"max_tokens": 90}),
    ],
)
def test_resolving_fills_in_what_depends_on_model_and_prompt(
    params: dict[str, Any], eos: list[int], expected: dict[str, Any]
) -> None:
    resolved = SamplingParams(**params).resolve(prompt_length=10, max_model_len=100, eos_token_ids=eos)
    assert {name: getattr(resolved, name) for name in expected} == expected


def test_resolving_refuses_more_min_tokens_than_there_is_room() -> None:
    error = fault(lambda: SamplingParams(min_tokens=91).resolve(prompt_length=10, max_model_len=100, eos_token_ids=[]))
    assert error.param == "sampling_params.min_tokens"


def test_parameters_are_read_back_from_the_wire() -> None:
    resolved = SamplingParams(temperature=0.5, stop_token_ids=[3], output_kind=RequestOutputKind.FINAL_ONLY).resolve(
        prompt_length=10, max_model_len=100, eos_token_ids=[7]
    )
    assert SamplingParams.from_wire(resolved.to_wire()) == resolved
    assert SamplingParams(max_tokens=16).to_wire() == {}


def test_an_engine_clamps_what_is_longer_than_its_room() -> None:
    assert SamplingParams(max_tokens=9, min_tokens=8).clamp(5) == SamplingParams(max_tokens=5, min_tokens=5)
    assert SamplingParams().clamp(5).max_tokens == 5
    assert SamplingParams(max_tokens=4).clamp(5).max_tokens == 4


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1, False)])
def test_a_temperature_of_zero_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy
