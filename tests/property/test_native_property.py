"""The extension module against its twins in Python: every vector, generated messages, and spans of any slice."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollspan.protocol import codec
from rollspan.protocol import messages as m
from rollspan.spans import SpanBuilder
from rollspan.version import __version__
from support.wire_views import outputs_view

native = pytest.importorskip("rollspan._native", reason="the extension module is not built")

CONFORMANCE = Path(__file__).parents[1] / "conformance"
FILES = [json.loads((CONFORMANCE / name).read_text(encoding="utf-8")) for name in ("vllm_wire.json", "link.json")]
LABELS = st.none() | st.sampled_from(["A", "B", "", "größe"])
COMMITS = st.none() | st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=4)


def cases(part: str) -> list[Any]:
    found = [case for file in FILES for case in file.get(part, ()) if case["kind"] == "outputs"]
    return [pytest.param([bytes.fromhex(frame) for frame in case["frames"]], id=case["title"]) for case in found]


@st.composite
def logprobs(draw: st.DrawFn, positions: int) -> m.LogprobsLists:
    width = draw(st.integers(1, 4))
    values = draw(st.lists(st.floats(width=32), min_size=positions * width, max_size=positions * width))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=positions * width, max_size=positions * width))
    ranks = draw(st.lists(st.integers(0, 2**31 - 1), min_size=positions, max_size=positions))
    return m.LogprobsLists(
        np.array(ids, "<i4").reshape(positions, width),
        np.array(values, "<f4").reshape(positions, width),
        np.array(ranks, "<i4"),
    )


@st.composite
def outputs(draw: st.DrawFn) -> m.EngineCoreOutput:
    tokens = draw(TOKENS)
    return m.EngineCoreOutput(
        request_id=draw(st.text(max_size=8)),
        new_token_ids=tokens,
        new_logprobs=draw(st.none() | logprobs(len(tokens))) if tokens else None,
        finish_reason=draw(st.none() | st.sampled_from(m.FinishReason)),
        stop_reason=draw(st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=4)),
        prefill_stats=draw(st.none() | st.just({"num_prompt_tokens": 3, "num_cached_tokens": 1})),
        error=draw(st.none() | st.builds(m.EngineError, st.text(max_size=4), st.text(max_size=4), st.booleans())),
        admission=draw(st.none() | st.tuples(st.text(max_size=4), st.integers(0, 2**64 - 1))),
    )


@st.composite
def messages(draw: st.DrawFn) -> m.EngineCoreOutputs:
    head = {
        "engine_index": draw(st.integers(0, 3)),
        "timestamp": draw(st.floats(1, 1e9)),
        "weight_version": draw(LABELS),
        "weight_commit": draw(COMMITS),
    }
    family = draw(st.sampled_from(["batch", "utility", "wave_complete", "start_wave"]))
    if family == "batch":
        stats = st.none() | st.just({"num_running_reqs": 2, "num_waiting_reqs": 1, "kv_cache_usage": 0.5})
        finished = draw(st.none() | st.lists(st.text(max_size=4), max_size=2))
        rows = draw(st.lists(outputs(), min_size=1, max_size=4))
        return m.EngineCoreOutputs(outputs=rows, scheduler_stats=draw(stats), finished_requests=finished, **head)
    if family == "utility":
        values = st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        ).filter(lambda value: "inf" not in repr(value))
        call_id = draw(st.integers(0, 2**64 - 1))
        reply = m.UtilityOutput(call_id, result=draw(values))
        if draw(st.booleans()):
            reply = m.UtilityOutput(
                call_id, failure=draw(st.text(max_size=4)), reason=draw(st.none() | st.text(max_size=4))
            )
        return m.EngineCoreOutputs(utility_output=reply, **head)
    return m.EngineCoreOutputs(**{family: draw(st.integers(0, 2**40))}, **head)


def test_the_module_has_the_version_of_the_package() -> None:
    assert native.__version__ == __version__


@pytest.mark.parametrize("frames", cases("accepted"))
def test_both_decoders_read_the_same_from_a_vector(frames: list[bytes]) -> None:
    assert outputs_view(native.decode_outputs(frames)) == outputs_view(codec.decode_outputs(frames))


@pytest.mark.parametrize("frames", cases("refused"))
def test_both_decoders_refuse_a_vector(frames: list[bytes]) -> None:
    with pytest.raises(codec.DecodeError):
        native.decode_outputs(frames)
    with pytest.raises(codec.DecodeError):
        codec.decode_outputs(frames)


@given(message=messages())
def test_both_decoders_read_the_same_from_any_message(message: m.EngineCoreOutputs) -> None:
    payload = codec.encode_outputs(message)
    expected, got = codec.decode_outputs([payload]), native.decode_outputs([payload])
    assert repr(outputs_view(got)) == repr(outputs_view(expected))


@given(data=st.data())
def test_a_damaged_message_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(codec.encode_outputs(data.draw(messages())))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    for decode in (native.decode_outputs, codec.decode_outputs):
        with contextlib.suppress(codec.DecodeError):
            decode([bytes(whole)])


@given(
    pushes=st.lists(st.tuples(LABELS, st.none() | st.integers(0, 3), st.integers(0, 4)), max_size=30), data=st.data()
)
def test_both_span_builders_give_the_same_spans_of_any_slice(
    pushes: list[tuple[str | None, int | None, int]], data: st.DataObject
) -> None:
    expected, got = SpanBuilder(), native.SpanBuilder()
    for push in pushes:
        expected.push(*push)
        got.push(*push)
    assert got.tokens == expected.tokens
    assert got.finish() == expected.finish()
    start = data.draw(st.integers(0, expected.tokens))
    end = data.draw(st.integers(start, expected.tokens))
    assert got.between(start, end) == expected.between(start, end)
    assert got.finish(end) == expected.finish(end)


def test_both_span_builders_refuse_what_was_not_recorded() -> None:
    for builder in (SpanBuilder(), native.SpanBuilder()):
        builder.push("A", 0, 2)
        for refused in (lambda b: b.push("A", 0, -1), lambda b: b.finish(3), lambda b: b.between(2, 1)):
            with pytest.raises(ValueError, match="tokens"):
                refused(builder)
