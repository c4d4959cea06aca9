"""Header values and error answers of the Python frontend."""

from __future__ import annotations

import json

import pytest

from rollspan.errors import ERRORS, RollspanError
from rollspan.frontend.answers import MAX_IGNORED_HEADER, ErrorAnswer, answer_headers, encode_json, internal_error


@pytest.mark.parametrize("reason", ERRORS)
def test_every_reason_has_its_status_type_and_body(reason: str) -> None:
    status, kind = ERRORS[reason]
    answer = ErrorAnswer(RollspanError("words", reason=reason, param="a.b"), request_id="id-1")
    assert answer.status_code == status
    body = json.loads(bytes(answer.body))
    assert body == {"error": {"message": "words", "type": kind, "param": "a.b", "code": status, "reason": reason}}
    assert answer.headers["x-request-id"] == "id-1"
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)


@pytest.mark.parametrize(
    ("names", "value"),
    [
        ((), None),
        (("b", "sampling_params.a"), "b,sampling_params.a"),
        (("a,b", "c d", "é", "~", "a/b"), "a%2Cb,c%20d,%C3%A9,%7E,a%2Fb"),
        pytest.param(("x" * 2000,), None, id="too-long"),
    ],
)
def test_ignored_fields_are_escaped(names: tuple[str, ...], value: str | None) -> None:
    headers = dict(answer_headers(names))
    assert headers.get(b"x-ignored-fields") == (None if value is None else value.encode())


def test_ignored_fields_stop_at_the_limit_between_two_names() -> None:
    names = [f"name-{number:05}" for number in range(1000)]
    value = dict(answer_headers(names))[b"x-ignored-fields"].decode()
    assert len(value) <= MAX_IGNORED_HEADER
    assert value.split(",") == names[: len(value.split(","))]


@pytest.mark.parametrize(
    ("request_id", "value"), [("a b", b"a b"), (" a ", b"%20a%20"), ("é", b"\xc3\xa9"), ("  ", b"%20%20")]
)
def test_request_ids_fit_into_a_header(request_id: str, value: bytes) -> None:
    assert dict(answer_headers((), request_id)) == {b"x-request-id": value}


def test_json_has_no_nan() -> None:
    assert encode_json({"a": [1, "é"]}) == '{"a":[1,"é"]}'.encode()
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_json(float("nan"))


def test_a_bug_of_ours_is_found_in_the_log_by_its_id(caplog: pytest.LogCaptureFixture) -> None:
    error = internal_error(ZeroDivisionError("oops"))
    assert error.reason == "internal_error"
    incident = error.message.split()[-1]
    assert incident in caplog.text
    assert "oops" in caplog.text
