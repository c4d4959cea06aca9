"""Strict JSON: what the Python frontend takes and refuses is what a reader without extensions takes and refuses."""

from __future__ import annotations

import json
import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollspan.errors import RollspanError
from rollspan.frontend.strict_json import MAX_DEPTH, parse_json, parse_object


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"NaN", "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b"1e999", "number out of range"),
        pytest.param(b"1" + b"0" * 400, "number out of range", id="too-large"),
        pytest.param(b"1" * 5000, "number out of range", id="long"),
        (b'"\\udfff"', "lone surrogate"),
        (b'{"\\ud800": 1}', "lone surrogate"),
        (b'"\xc3"', "not UTF-8 at byte 1"),
        pytest.param(b"[" * 1_000_000, "recursion limit exceeded", id="very-deep"),
        pytest.param(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "recursion limit exceeded", id="too-deep"),
        (b"", ""),
        (b"[1,]", ""),
        (b'"a\nb"', ""),
        ('{"a": 1}'.encode("utf-16"), ""),
    ],
)
def test_what_is_no_json_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(RollspanError) as caught:
        parse_json(body)
    assert caught.value.reason == "invalid_json"
    assert caught.value.message.startswith("request body is not valid JSON: ")
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"9223372036854775808", 2**63),
        (b"18446744073709551615", 2**64 - 1),
        (b"18446744073709551616", 18446744073709551616.0),
        (b"-9223372036854775808", -(2**63)),
        (b"-9223372036854775809", -9223372036854775809.0),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b" \t\r\n1 ", 1),
    ],
)
def test_odd_json_is_read_like_everywhere(body: bytes, value: object) -> None:
    parsed = parse_json(body)
    assert parsed == value
    assert type(parsed) is type(value)


def test_minus_zero_is_a_float() -> None:
    assert math.copysign(1, parse_json(b"-0")) == -1.0
    assert isinstance(parse_json(b"-0"), float)
    assert parse_json(b"[-0.5, -01e0]".replace(b"01e0", b"0e0")) == [-0.5, 0.0]


def test_nesting_is_allowed_up_to_the_limit() -> None:
    body = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert json.dumps(parse_json(body)) == body.decode()
    wide = b"[" + b",".join([b"[]"] * 500) + b"]"
    assert len(parse_json(wide)) == 500
    assert parse_json(json.dumps("[" * 500).encode()) == "[" * 500


@pytest.mark.parametrize("body", [b"null", b"1", b"[]", b'"{}"'])
def test_only_objects_are_bodies(body: bytes) -> None:
    with pytest.raises(RollspanError) as caught:
        parse_object(body)
    assert caught.value.reason == "invalid_request"


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=20,
)


@given(JSON_VALUES, st.booleans())
def test_every_json_value_survives(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text.encode()) == json.loads(text)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_read_or_refused(body: bytes) -> None:
    with suppress(RollspanError):
        parse_json(body)
