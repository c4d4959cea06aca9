"""Log-probs of one token as the engine packs them: the same on the wire and to a reader as plain arrays."""

from __future__ import annotations

import pickle
import struct

import numpy as np
import pytest

from rollspan.protocol import codec
from rollspan.protocol.messages import EngineCoreOutput, LogprobsLists
from rollspan.protocol.packed_logprobs import join, pack_each
from support.fake_engine import batch

# Each length of an array's data has its own header on the wire; these are on both sides of where it changes.
COLUMNS = (1, 2, 3, 4, 5, 63, 64, 127, 128, 16383, 16384, 65536)


def step(count: int, columns: int) -> LogprobsLists:
    """Log-probs of so many positions, all numbers different; a NaN with a payload and an infinity among them."""
    numbers = np.arange(count * columns, dtype=np.int32).reshape(count, columns)
    logprobs = -numbers.astype(np.float32) / 7
    logprobs[-1, 0] = -np.inf
    logprobs[0, -1] = struct.unpack("<f", b"\x05\x00\xc0\x7f")[0]
    return LogprobsLists(numbers + 5, logprobs, np.arange(count, dtype=np.int32) + 1)


def rows(lists: LogprobsLists) -> list[LogprobsLists]:
    """Each position as arrays of its own."""
    cuts = [slice(row, row + 1) for row in range(len(lists))]
    return [LogprobsLists(lists.token_ids[cut], lists.logprobs[cut], lists.sampled_ranks[cut]) for cut in cuts]


def assert_same(one: LogprobsLists, other: LogprobsLists) -> None:
    for name in ("token_ids", "logprobs", "sampled_ranks"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


def message(lists: list[LogprobsLists]) -> bytes:
    return codec.encode_outputs(batch(*(EngineCoreOutput(str(row), [row], one) for row, one in enumerate(lists))))


@pytest.mark.parametrize("columns", COLUMNS)
def test_packed_log_probs_are_on_the_wire_what_arrays_are(columns: int) -> None:
    lists = step(3, columns)
    assert message([*pack_each(lists)]) == message(rows(lists))


@pytest.mark.parametrize("columns", COLUMNS)
def test_packed_log_probs_read_as_the_arrays_they_were_made_of(columns: int) -> None:
    lists = step(3, columns)
    packed = pack_each(lists)
    assert [len(one) for one in packed] == [1, 1, 1]
    for one, row in zip(packed, rows(lists), strict=True):
        assert_same(one, row)
        assert struct.pack("<f", one.sampled_logprob) == row.logprobs[0, 0].tobytes()
    decoded = codec.decode_outputs([message([*packed])])
    for output, row in zip(decoded.outputs, rows(lists), strict=True):
        assert output.new_logprobs is not None
        assert_same(output.new_logprobs, row)


def test_packing_copies_what_it_packs() -> None:
    lists = step(2, 3)
    packed = pack_each(lists)
    before = message([*packed])
    lists.token_ids[:] = 0
    packed[0].token_ids[:] = 0
    assert message([*packed]) == before


def test_no_positions_are_packed_as_none() -> None:
    empty = LogprobsLists(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
    assert pack_each(empty) == []


def test_joined_positions_keep_their_order_however_they_came() -> None:
    lists = step(4, 3)
    packed, arrays = [*pack_each(lists)], rows(lists)
    for mixed in (packed, arrays, [packed[0], arrays[1], packed[2], arrays[3]], [arrays[0], *packed[1:]]):
        (whole,) = join(mixed)
        assert_same(whole, lists)


def test_positions_of_different_columns_are_not_joined() -> None:
    narrow, wide = pack_each(step(1, 2)), pack_each(step(1, 3))
    for one, other in zip(join([*narrow, *wide]), [*narrow, *wide], strict=True):
        assert_same(one, other)
    assert join([]) == []


def test_a_pickle_of_packed_log_probs_is_plain_arrays() -> None:
    (packed, _) = pack_each(step(2, 3))
    copy = pickle.loads(pickle.dumps(packed))
    assert type(copy) is LogprobsLists
    assert_same(copy, packed)
