"""Whatever arrives on the engine link is read or refused, never anything else; and frames stay whole."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollspan.protocol import codec
from rollspan.protocol import messages as m
from rollspan.protocol.framing import FrameKind, FrameReader, FramingError, encode_frame
from rollspan.sampling_params import SamplingParams
from support.fake_engine import HELLO, logprobs
from support.wire_strategies import VALUES

Decoder = Callable[[bytes], Any]

OUTPUT = m.EngineCoreOutput(
    "r1",
    [42],
    new_logprobs=logprobs([(42, -0.5, 1), (7, -1.5, 2)]),
    finish_reason=m.FinishReason.ERROR,
    prefill_stats={"num_prompt_tokens": 3},
    error=m.EngineError("nan_logits", "not finite"),
    admission=("A", 1),
)
REQUEST = m.EngineCoreRequest("r1", [1, 2], SamplingParams(max_tokens=4, stop_token_ids=(3,), all_stop_token_ids=(3,)))
REPLY = m.UtilityOutput(7, result={"weight_version": "A", "weight_commit": 1})

#: Every kind of message: an example as plain data, and its decoder.
MESSAGES: dict[str, tuple[bytes, Decoder]] = {
    "request": (codec.encode_request(REQUEST), codec.decode_request),
    "abort": (codec.encode_abort(["r1", "r2"]), codec.decode_abort),
    "utility call": (codec.encode_utility_call(m.UtilityCall(0, 1, "f", ["x", True])), codec.decode_utility_call),
    "client hello": (codec.encode_client_hello(m.ClientHello("test")), codec.decode_client_hello),
    "engine hello": (codec.encode_engine_hello(HELLO), codec.decode_engine_hello),
    "dead": (codec.encode_dead(m.DeadNotice("engine_dead", "gone")), codec.decode_dead),
    "batch": (
        codec.encode_outputs(m.EngineCoreOutputs(outputs=[OUTPUT], scheduler_stats={"a": 1}, weight_version="A")),
        lambda payload: codec.decode_outputs([payload]),
    ),
    "reply": (
        codec.encode_outputs(m.EngineCoreOutputs(utility_output=REPLY)),
        lambda payload: codec.decode_outputs([payload]),
    ),
}
NESTED: Any = 1
for _ in range(70):
    NESTED = [NESTED]
#: Values that are refused wherever they stand.
POISON = {
    "nested deeper than 64": NESTED,
    "a pickle": msgpack.ExtType(1, b"x"),
    "MessagePack's timestamp": msgpack.Timestamp(1, 2),
    "a map with a timestamp as its key": {msgpack.Timestamp(1, 2): 1},
}


def unpack(payload: bytes) -> Any:
    return msgpack.unpackb(payload, strict_map_key=False)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a structure, its root included, and one past the end of each array."""
    yield path
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from paths(item, (*path, index))
        yield (*path, len(value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*path, key))
        yield (*path, "a_later_key")


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    value = copy.copy(value)
    if isinstance(value, list) and path[0] == len(value):
        value.append(None)
    old = value.get(path[0]) if isinstance(value, dict) else value[path[0]]
    value[path[0]] = replaced(old, path[1:], new)
    return value


@pytest.mark.parametrize("kind", list(MESSAGES))
@pytest.mark.parametrize("poison", list(POISON))
def test_what_is_never_allowed_is_refused_wherever_it_stands(kind: str, poison: str) -> None:
    payload, decode = MESSAGES[kind]
    structure = unpack(payload)
    for path in paths(structure):
        bad = msgpack.packb(replaced(structure, path, POISON[poison]))
        with pytest.raises(codec.DecodeError):
            print(path, decode(bad))  # noqa: T201 (says where, when it fails)


@given(data=st.data(), kind=st.sampled_from(list(MESSAGES)))
def test_a_message_with_any_value_at_any_place_is_read_or_refused(data: st.DataObject, kind: str) -> None:
    payload, decode = MESSAGES[kind]
    structure = unpack(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(paths(structure))))
        structure = replaced(structure, path, data.draw(VALUES | st.binary(max_size=8)))
    with contextlib.suppress(codec.DecodeError, codec.RequestRefusedError):
        decode(msgpack.packb(structure))


@given(payload=st.binary(max_size=64), kind=st.sampled_from(list(MESSAGES)))
def test_any_bytes_are_read_or_refused(payload: bytes, kind: str) -> None:
    with contextlib.suppress(codec.DecodeError, codec.RequestRefusedError):
        MESSAGES[kind][1](payload)


@given(data=st.data(), kind=st.sampled_from(list(MESSAGES)))
def test_a_message_that_is_cut_short_is_refused(data: st.DataObject, kind: str) -> None:
    payload, decode = MESSAGES[kind]
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(codec.DecodeError):
        decode(payload[:cut])


FRAMES = st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=300)), max_size=6)


@given(frames=FRAMES, data=st.data())
def test_frames_come_out_whole_and_in_order_however_the_bytes_are_cut(
    frames: list[tuple[FrameKind, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(kind, payload) for kind, payload in frames)
    reader, found, position = FrameReader(), [], 0
    while position < len(stream):
        size = data.draw(st.integers(1, len(stream) - position))
        found += reader.feed(stream[position : position + size])
        position += size
    assert found == frames
    assert reader.pending == 0


@given(frames=FRAMES, rest=st.binary(max_size=3))
def test_an_incomplete_frame_waits_for_its_rest(frames: list[tuple[FrameKind, bytes]], rest: bytes) -> None:
    stream = b"".join(encode_frame(kind, payload) for kind, payload in frames) + rest
    reader = FrameReader()
    assert reader.feed(stream) == frames
    assert reader.pending == len(rest)


@given(kind=st.integers(0, 255).filter(lambda kind: kind not in set(FrameKind)), payload=st.binary(max_size=8))
def test_an_unknown_kind_of_frame_is_refused_by_its_number(kind: int, payload: bytes) -> None:
    with pytest.raises(FramingError, match=f"unknown frame kind {kind:#04x}"):
        FrameReader().feed((len(payload) + 1).to_bytes(4, "big") + bytes([kind]) + payload)


@given(limit=st.integers(1, 2**20), over=st.integers(1, 2**20))
def test_a_frame_over_the_limit_or_empty_is_refused_from_its_header(limit: int, over: int) -> None:
    for size in (0, limit + over):
        with pytest.raises(FramingError, match=f"a frame of {size} bytes is outside 1 to {limit}"):
            FrameReader(limit).feed(size.to_bytes(4, "big"))


@given(size=st.integers(1, 200))
def test_a_frame_of_exactly_the_limit_is_read(size: int) -> None:
    frame = encode_frame(FrameKind.ABORT, b"x" * (size - 1))
    assert FrameReader(size).feed(frame) == [(FrameKind.ABORT, b"x" * (size - 1))]
