"""The shared vectors of the engine link, run by the Python codec; Rust runs the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollspan.errors import RollspanError
from rollspan.protocol.codec import DecodeError
from rollspan.protocol.framing import FrameKind, FrameReader, FramingError, encode_frame
from support.wire_views import view

CONFORMANCE = Path(__file__).parents[1] / "conformance"
VLLM = json.loads((CONFORMANCE / "vllm_wire.json").read_text(encoding="utf-8"))
LINK = json.loads((CONFORMANCE / "link.json").read_text(encoding="utf-8"))


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=f"{case['kind']}: {case['title']}") for case in cases]


def frames_of(case: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in case["frames"]]


@pytest.mark.parametrize("case", named(VLLM["accepted"] + LINK["accepted"]))
def test_a_message_means_what_its_vector_says(case: dict[str, Any]) -> None:
    assert view(case["kind"], frames_of(case)) == case["meaning"]


@pytest.mark.parametrize("case", named(LINK["refused"]))
def test_a_message_is_refused_for_the_reason_of_its_vector(case: dict[str, Any]) -> None:
    with pytest.raises((DecodeError, RollspanError)) as refusal:
        view(case["kind"], frames_of(case))
    if case["reason"] is not None:
        assert isinstance(refusal.value, DecodeError)
        assert refusal.value.reason == case["reason"]


def test_link_vectors_are_those_of_their_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CONFORMANCE))
    import make_link_vectors

    assert (CONFORMANCE / "link.json").read_text(encoding="utf-8") == make_link_vectors.render()


def test_frames_are_taken_apart_and_put_together_as_the_vectors_say() -> None:
    framing = LINK["framing"]
    stream = bytes.fromhex("".join(case["frame"] for case in framing["accepted"]))
    expected = [(FrameKind(case["kind"]), bytes.fromhex(case["payload"])) for case in framing["accepted"]]
    assert FrameReader(framing["limit"]).feed(stream) == expected
    assert b"".join(encode_frame(kind, payload) for kind, payload in expected) == stream


@pytest.mark.parametrize("frame", LINK["framing"]["refused"])
def test_a_bad_frame_header_is_refused(frame: str) -> None:
    with pytest.raises(FramingError):
        FrameReader(LINK["framing"]["limit"]).feed(bytes.fromhex(frame))
