"""Laws of the Python codec: what is encoded is read back, whatever later versions append."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from rollspan.protocol import codec
from rollspan.protocol import messages as m
from support.wire_strategies import VALUES, batches, messages, requests
from support.wire_views import outputs_view

LATER = st.lists(VALUES, max_size=3)


@given(message=messages())
def test_an_outputs_message_is_read_back(message: m.EngineCoreOutputs) -> None:
    decoded = codec.decode_outputs([codec.encode_outputs(message)])
    assert repr(outputs_view(decoded)) == repr(outputs_view(message))


@given(request=requests())
def test_a_request_is_read_back(request: m.EngineCoreRequest) -> None:
    assert codec.decode_request(codec.encode_request(request)) == request


@given(message=batches(timestamp=st.just(1.0)), envelope=LATER, each=LATER)
def test_elements_of_later_versions_are_skipped_and_counted(
    message: m.EngineCoreOutputs, envelope: list[Any], each: list[Any]
) -> None:
    row = msgpack.unpackb(codec.encode_outputs(message))
    row[1] = [[*output, *[None] * (22 - len(output)), *each] for output in row[1]]
    decoded = codec.decode_outputs([msgpack.packb([*row, *envelope])])
    assert decoded.skipped_fields == len(envelope) + len(each) * len(message.outputs)
    decoded.skipped_fields = 0
    assert repr(outputs_view(decoded)) == repr(outputs_view(message))


@given(message=batches(timestamp=st.just(1.0)), envelope=st.integers(2, 10), each=st.integers(2, 22))
def test_elements_that_an_older_version_lacks_take_their_default(
    message: m.EngineCoreOutputs, envelope: int, each: int
) -> None:
    row = msgpack.unpackb(codec.encode_outputs(message))
    row[1] = [output[:each] for output in row[1]]
    decoded = codec.decode_outputs([msgpack.packb(row[:envelope])])
    assert [output.request_id for output in decoded.outputs] == [output.request_id for output in message.outputs]
    assert [output.new_token_ids for output in decoded.outputs] == [output.new_token_ids for output in message.outputs]
    assert decoded.weight_version == (message.weight_version if envelope > 8 else None)
    assert all(output.admission is None for output in decoded.outputs) or each >= 20
    assert all(output.kv_spans is None for output in decoded.outputs) or each >= 21
