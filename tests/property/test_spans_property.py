"""SpanBuilder against a brute-force twin: one list entry a token, grouped afterwards."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollspan.spans import SpanBuilder

Push = tuple["str | None", "int | None", int]

PUSHES = st.lists(
    st.tuples(
        st.none() | st.sampled_from(["A", "B", "", "ü" * 3]),
        st.none() | st.integers(0, 3),
        st.integers(0, 4),
    ),
    max_size=30,
)


def brute_force(stamps: list[Any], start: int, end: int, key: str) -> list[dict[str, Any]] | None:
    if start == end:
        return []
    if all(stamp is None for stamp in stamps):
        return None
    spans, position = [], start
    for stamp, group in groupby(stamps[start:end]):
        length = len(list(group))
        spans.append({key: stamp, "start": position, "end": position + length})
        position += length
    return spans


def build(pushes: list[Push]) -> tuple[SpanBuilder, list[str | None], list[int | None]]:
    builder, versions, commits = SpanBuilder(), [], []
    for version, commit, tokens in pushes:
        builder.push(version, commit, tokens)
        versions += [version] * tokens
        commits += [commit] * tokens
    return builder, versions, commits


@given(pushes=PUSHES, data=st.data())
def test_any_slice_equals_the_brute_force_grouping(pushes: list[Push], data: st.DataObject) -> None:
    builder, versions, commits = build(pushes)
    start = data.draw(st.integers(0, len(versions)))
    end = data.draw(st.integers(start, len(versions)))
    got = builder.between(start, end)
    assert got == (brute_force(versions, start, end, "version"), brute_force(commits, start, end, "commit"))


@given(pushes=PUSHES, data=st.data())
def test_a_trimmed_list_covers_every_returned_token_once_and_never_repeats_a_neighbour(
    pushes: list[Push], data: st.DataObject
) -> None:
    builder, versions, _ = build(pushes)
    total = data.draw(st.integers(0, len(versions)))
    lists: tuple[list[Any] | None, list[Any] | None] = builder.finish(total)
    for key, spans in zip(("version", "commit"), lists, strict=True):
        if spans is None:
            continue
        covered = [index for span in spans for index in range(span["start"], span["end"])]
        assert covered == list(range(total))
        assert all(left[key] != right[key] for left, right in pairwise(spans))


@given(pushes=PUSHES)
def test_how_tokens_are_split_into_outputs_changes_nothing(pushes: list[Push]) -> None:
    whole, _, _ = build(pushes)
    single, _, _ = build([(version, commit, 1) for version, commit, tokens in pushes for _ in range(tokens)])
    assert whole.finish() == single.finish()


@given(pushes=PUSHES, more=PUSHES)
def test_reading_spans_in_mid_generation_changes_nothing(pushes: list[Push], more: list[Push]) -> None:
    builder, _, _ = build(pushes)
    builder.finish()
    builder.between(0, builder.tokens // 2)
    for push in more:
        builder.push(*push)
    undisturbed, _, _ = build(pushes + more)
    assert builder.finish() == undisturbed.finish()
