"""EngineConfig, the table of errors, labels: each bad value names its field, each error has a status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollspan.config import EngineConfig
from rollspan.errors import ERRORS, RollspanError, check_label, shown, wrong_value

WRONG: list[tuple[str, Any]] = [
    *(("model", value) for value in (None, 5, ["x"])),
    *(("served_model_name", value) for value in (5, "")),
    *(("dtype", value) for value in ("float64", "", None, 5, [])),
    *(("device", value) for value in ("tpu", "cuda:", "cuda:x", "cuda:-1", "", None, 5)),
    *(("max_model_len", value) for value in (1, 0, -1, 1.5, "64", True)),
    *(("max_num_seqs", value) for value in (0, -1, 1.0, None, "1", True)),
    *(("max_num_batched_tokens", value) for value in (0, 255, -1, 2048.0)),
    *(("block_size", value) for value in (0, -1, 1.0, None, True)),
    *(("kv_cache_memory", value) for value in (0, -1, 1.0, "1GB", True)),
    *(("max_logprobs", value) for value in (-1, 1.0, None, True)),
    *(("logprobs_mode", value) for value in ("", "both", None, 5)),
    *(("weight_version", value) for value in ("", "a\nb", "x" * 257, True, 1.5)),
    *(("weights_root", value) for value in (5, ["x"])),
    *(("weight_update_timeout", value) for value in (0, -1.0, 1e10, float("inf"), float("nan"), "1", None, True)),
    *(("num_threads", value) for value in (0, -1, 1.0, "1", True)),
    *(("seed", value) for value in (-1, 2**63, 1.0, "1", True)),
    *(("engine_index", value) for value in (-1, 1.0, None, True)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(RollspanError) as caught:
        EngineConfig(**{name: value})
    error = caught.value
    assert error.reason == ("invalid_label" if name == "weight_version" else "invalid_request")
    assert error.param == name
    assert error.message.startswith(f"{name} must be ")


def test_a_batch_must_hold_a_token_of_every_sequence() -> None:
    with pytest.raises(RollspanError, match=r"^max_num_batched_tokens must be at least max_num_seqs \(10\), got 9$"):
        EngineConfig(max_num_seqs=10, max_num_batched_tokens=9)


def test_a_configuration_is_read_back_from_its_json() -> None:
    config = EngineConfig(
        model="x",
        served_model_name="name",
        dtype="bfloat16",
        device="cuda:1",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=30,
        block_size=4,
        kv_cache_memory=10**9,
        max_logprobs=5,
        logprobs_mode="raw",
        weight_version="step-1",
        weights_root="/weights",
        num_threads=2,
        seed=3,
        engine_index=1,
    )
    assert EngineConfig.from_json(config.to_json()) == config
    assert EngineConfig.from_json("{}") == EngineConfig()


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", "null", "5", '{"nonesuch": 1}', '{"model": "x", "model_": 1}'])
def test_text_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(RollspanError, match=r"^engine configuration: ") as caught:
        EngineConfig.from_json(text)
    assert caught.value.reason == "invalid_request"


def test_a_wrong_value_in_the_json_names_its_field() -> None:
    with pytest.raises(RollspanError, match=r"^block_size must be an integer of at least 1, got 0$"):
        EngineConfig.from_json(json.dumps({"block_size": 0}))


def test_every_reason_has_a_status_and_a_type_and_makes_a_body() -> None:
    for reason, (status, kind) in ERRORS.items():
        error = RollspanError("text", reason=reason, param="a.b")
        assert (error.status, error.type) == (status, kind)
        assert error.body() == {
            "error": {"message": "text", "type": kind, "param": "a.b", "code": status, "reason": reason}
        }
    assert RollspanError("text", reason="nonesuch").reason == "internal_error"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ([1, "ü"], '[1,"ü"]'),
        ("x" * 62, '"' + "x" * 62 + '"'),
        ("x" * 63, '"' + "x" * 63 + "..."),
        (object(), "object"),
        (b"x", "bytes"),
        pytest.param(10**5000, "int", id="huge"),
    ],
)
def test_values_are_shown_as_compact_json_cut_to_64_characters(value: object, text: str) -> None:
    assert shown(value) == text


def test_the_message_of_a_list_element_says_where() -> None:
    assert wrong_value("a", "x", -1, 3).message == "a must be x, got -1 at index 3"


@pytest.mark.parametrize(
    ("value", "label"), [("a", "a"), ("é" * 128, "é" * 128), (0, "0"), (-7, "-7"), (2**70, str(2**70))]
)
def test_a_label_is_a_short_printable_string_or_an_integer(value: object, label: str) -> None:
    assert check_label(value) == label


NO_LABELS = ["", "x" * 257, "é" * 129, "a\0", "\x1f", "\x7f", "\x80", "\x9f", "\ud800", None, True, 1.0, b"a", ["a"]]


@pytest.mark.parametrize("value", [*NO_LABELS, pytest.param(10**5000, id="huge")])
def test_what_is_no_label_is_refused_naming_the_field(value: object) -> None:
    with pytest.raises(RollspanError, match=r"^new_version must be a string of 1 to 256 bytes") as caught:
        check_label(value, "new_version")
    assert (caught.value.reason, caught.value.param) == ("invalid_label", "new_version")
