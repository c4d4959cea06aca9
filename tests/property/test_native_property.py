"""The extension module against its twins in Python: every vector, generated messages, and spans of any slice."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollspan.protocol import codec
from rollspan.protocol import messages as m
from rollspan.spans import SpanBuilder
from rollspan.version import __version__
from support.wire_strategies import LABELS, messages
from support.wire_views import outputs_view

native = pytest.importorskip("rollspan._native", reason="the extension module is not built")

CONFORMANCE = Path(__file__).parents[1] / "conformance"
FILES = [json.loads((CONFORMANCE / name).read_text(encoding="utf-8")) for name in ("vllm_wire.json", "link.json")]


def cases(part: str) -> list[Any]:
    found = [case for file in FILES for case in file.get(part, ()) if case["kind"] == "outputs"]
    return [pytest.param([bytes.fromhex(frame) for frame in case["frames"]], id=case["title"]) for case in found]


def test_the_module_has_the_version_of_the_package() -> None:
    assert native.__version__ == __version__


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse(Path(native.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert {*classes, *functions, "__version__"} == set(native.__all__)
    for name, node in classes.items():
        methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name != "__new__"}
        assert methods == {item for item in vars(getattr(native, name)) if not item.startswith("_")}


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
