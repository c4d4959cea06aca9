"""Byte ranges hold exactly the bytes that were added and not removed since."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollspan.errors import RollspanError
from rollspan.frontend.byte_ranges import ByteRanges, parse_content_range

SPANS = st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30))


@given(st.lists(SPANS, max_size=12), st.integers(0, 32))
def test_ranges_are_the_set_of_their_bytes(changes: list[tuple[bool, int, int]], total: int) -> None:
    ranges = ByteRanges()
    expected: set[int] = set()
    for added, start, end in changes:
        if added:
            ranges.add(start, end)
            expected |= set(range(start, end))
        else:
            ranges.remove(start, end)
            expected -= set(range(start, end))
    spans = ranges.to_list()
    assert [byte for start, end in spans for byte in range(start, end)] == sorted(expected)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(spans)), "they touch"
    assert bool(ranges) == bool(expected)
    lacking = [byte for byte in range(total) if byte not in expected]
    missing = ranges.missing(total)
    if not lacking:
        assert missing is None
    else:
        assert missing is not None
        assert missing[0] == lacking[0]
        assert set(range(*missing)) <= set(lacking)
        assert missing[1] == total or missing[1] in expected


def test_a_content_range_is_read_half_open() -> None:
    assert parse_content_range("bytes 0-0/1") == (0, 1, 1)
    assert parse_content_range(" bytes 10-19/20 ") == (10, 20, 20)


@pytest.mark.parametrize(
    "text",
    ["", "bytes 0-1", "bytes 0-1/*", "bytes 1-0/5", "bytes 0-5/5", "bytes a-b/c", "0-1/2", f"bytes 0-1/{10**16}"],
)
def test_what_is_no_range_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(RollspanError) as refusal:
        parse_content_range(text)
    assert (refusal.value.reason, refusal.value.param) == ("invalid_request", "Content-Range")
