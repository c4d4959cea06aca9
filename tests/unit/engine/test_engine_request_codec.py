"""EngineCoreRequest as the engine reads it: what of a well-formed message is refused by name, and what is malformed."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from rollspan.protocol import codec
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.sampling_params import RequestOutputKind, SamplingParams

REQUEST_ID, PROMPT, PARAMS, ARRIVAL, SALT, CLIENT, WAVE, PRIORITY = 0, 1, 3, 5, 7, 11, 12, 13
RESUMABLE, ABORT_IMMEDIATELY = 15, 19


def row() -> list[Any]:
    """A request as its 22 elements."""
    request = EngineCoreRequest("r1", [1, 2], SamplingParams(max_tokens=4))
    elements = msgpack.unpackb(codec.encode_request(request))
    assert len(elements) == 22
    return list(elements)


def decode(elements: list[Any]) -> EngineCoreRequest:
    return codec.decode_request(msgpack.packb(elements))


def with_params(**params: Any) -> EngineCoreRequest:
    elements = row()
    elements[PARAMS] = params
    return decode(elements)


@pytest.mark.parametrize("length", [9, 10, 12, 14, 17, 21, 22])
def test_trailing_elements_that_are_missing_take_their_default(length: int) -> None:
    request = decode(row()[:length])
    assert (request.request_id, request.prompt_token_ids) == ("r1", [1, 2])
    assert (request.client_index, request.priority, request.external_req_id) == (0, 0, None)


def test_elements_behind_the_last_known_one_are_skipped() -> None:
    assert decode([*row(), None, "later", {"a": [None]}]) == decode(row())


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (REQUEST_ID, None),
        (PROMPT, "text"),
        (PROMPT, [True]),
        (PROMPT, [1.0]),
        (PARAMS, [1]),
        (PARAMS, {1: 2}),
        (ARRIVAL, "now"),
        (SALT, 5),
        (CLIENT, None),
        (CLIENT, -1),
        (WAVE, None),
        (WAVE, "first"),
        (PRIORITY, 1.5),
        (PRIORITY, 2**63),
        (RESUMABLE, None),
        (RESUMABLE, 1),
        (ABORT_IMMEDIATELY, None),
    ],
)
def test_an_element_of_a_wrong_type_or_range_makes_the_message_malformed(index: int, value: object) -> None:
    elements = row()
    elements[index] = value
    with pytest.raises(codec.DecodeError):
        decode(elements)


@pytest.mark.parametrize(
    ("index", "value", "name"),
    [
        (2, [{"modality": "image"}], "mm_features"),
        (4, {"task": "embed"}, "pooling_params"),
        (6, {"lora_name": "x"}, "lora_request"),
        (9, [1], "prompt_embeds"),
        (RESUMABLE, True, "resumable"),
        (ABORT_IMMEDIATELY, True, "abort_immediately"),
        (PROMPT, None, "prompt_token_ids"),
        (PARAMS, None, "sampling_params"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_for_that_request_by_name(index: int, value: object, name: str) -> None:
    elements = row()
    elements[index] = value
    with pytest.raises(codec.RequestRefusedError, match=name) as caught:
        decode(elements)
    assert (caught.value.request_id, caught.value.param) == ("r1", name)


def test_an_empty_map_of_parameters_is_the_wires_defaults() -> None:
    params = with_params().sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)
    assert (params.seed, params.min_tokens, params.logprobs, params.ignore_eos) == (None, 0, None, False)
    assert (params.eos_token_id, params.stop_token_ids, params.all_stop_token_ids) == (None, (), ())


def test_every_parameter_is_read_from_the_map() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=9,
        seed=2**63 - 1,
        max_tokens=50,
        min_tokens=3,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=-1,
        output_kind=RequestOutputKind.DELTA,
        eos_token_id=7,
        all_stop_token_ids=(4, 5, 7),
        min_p=0.25,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        prompt_logprobs=0,
        logit_bias={7: -100, 2**32 - 1: 0.5},
        allowed_token_ids=(7, 8),
        bad_words=("größe", " x"),
        bad_words_token_ids=((1, 2), (3,)),
        structured_outputs={"json": {"type": "object"}, "whitespace_pattern": " *"},
        skip_reading_prefix_cache=False,
        routed_experts=True,
        routed_experts_prompt_start=9,
    )
    request = EngineCoreRequest("r1", [1], params, 1.5, "salt", 3, 2, -4, "ext", "session")
    assert codec.decode_request(codec.encode_request(request)) == request


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": {"a": 1}}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": -2}, "logprobs"),
        ({"output_kind": 3}, "output_kind"),
        ({"output_kind": []}, "output_kind"),
        ({"output_kind": True}, "output_kind"),
        ({"_eos_token_id": -1}, "_eos_token_id"),
        ({"_eos_token_id": "x"}, "_eos_token_id"),
        ({"_all_stop_token_ids": ["x"]}, "_all_stop_token_ids"),
        ({"_all_stop_token_ids": 7}, "_all_stop_token_ids"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": None}, "frequency_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"min_p": 1.1}, "min_p"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"allowed_token_ids": [2**32]}, "allowed_token_ids"),
        ({"bad_words": "x"}, "bad_words"),
        ({"_bad_words_token_ids": [[]]}, "_bad_words_token_ids"),
        ({"_bad_words_token_ids": [["x"]]}, "_bad_words_token_ids"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"skip_reading_prefix_cache": "x"}, "skip_reading_prefix_cache"),
        ({"routed_experts": 1}, "routed_experts"),
        ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start"),
        ({"stop": ["x"]}, "stop"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)
def test_a_parameter_that_is_wrong_or_not_supported_is_refused_for_that_request_by_name(
    params: dict[str, Any], name: str
) -> None:
    with pytest.raises(codec.RequestRefusedError, match=rf"^sampling_params\.{name} ") as caught:
        with_params(**params)
    assert (caught.value.request_id, caught.value.param) == ("r1", f"sampling_params.{name}")


def test_parameters_that_change_nothing_are_accepted() -> None:
    neutral = {"presence_penalty": 0.0, "repetition_penalty": 1.0, "bad_words": [], "watermarking": True, "later": [1]}
    assert with_params(**neutral).sampling_params == with_params().sampling_params
