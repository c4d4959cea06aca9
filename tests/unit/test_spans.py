"""The cases of span tracking, one by one."""

from __future__ import annotations

import pytest

from rollspan.spans import SpanBuilder


def versions_of(*pushes: tuple[str | None, int], total: int | None = None) -> list[tuple[str | None, int, int]] | None:
    builder = SpanBuilder()
    for label, tokens in pushes:
        builder.push(label, None, tokens)
    spans, _ = builder.finish(total)
    return None if spans is None else [(span["version"], span["start"], span["end"]) for span in spans]


@pytest.mark.parametrize(
    ("pushes", "expected"),
    [
        pytest.param([], [], id="no tokens gives an empty list"),
        pytest.param([("A", 0)], [], id="a label without tokens gives an empty list"),
        pytest.param([(None, 3)], None, id="an engine that reports no labels gives no list"),
        pytest.param(
            [("A", 1), ("B", 2), ("A", 1)], [("A", 0, 1), ("B", 1, 3), ("A", 3, 4)], id="A B A is three spans"
        ),
        pytest.param([("A", 1), ("B", 0), ("A", 1)], [("A", 0, 2)], id="an output without tokens opens no span"),
        pytest.param([("A", 1), (None, 0)], [("A", 0, 1)], id="an unlabelled abort changes nothing"),
        pytest.param([(None, 1), ("A", 1)], [(None, 0, 1), ("A", 1, 2)], id="unlabelled first token is no hole"),
        pytest.param([("A", 1), (None, 1)], [("A", 0, 1), (None, 1, 2)], id="unlabelled token is not credited to A"),
        pytest.param([("", 2)], [("", 0, 2)], id="an empty label is a label"),
    ],
)
def test_span_list_of(pushes: list[tuple[str | None, int]], expected: object) -> None:
    assert versions_of(*pushes) == expected


def test_trimming_inside_a_multi_token_step_ends_the_last_span_there() -> None:
    assert versions_of(("A", 1), ("B", 5), total=3) == [("A", 0, 1), ("B", 1, 3)]


def test_trimming_away_the_only_stamped_tokens_leaves_a_null_span_not_a_null_list() -> None:
    assert versions_of((None, 1), ("A", 1), total=1) == [(None, 0, 1)]


def test_trimming_to_nothing_gives_an_empty_list() -> None:
    assert versions_of(("A", 2), total=0) == []


def test_commits_split_where_labels_do_not() -> None:
    builder = SpanBuilder()
    builder.push("default", 0, 2)
    builder.push("default", 1, 1)
    assert builder.finish() == (
        [{"version": "default", "start": 0, "end": 3}],
        [{"commit": 0, "start": 0, "end": 2}, {"commit": 1, "start": 2, "end": 3}],
    )


def test_relabelling_splits_versions_and_not_commits() -> None:
    builder = SpanBuilder()
    builder.push("a", 4, 1)
    builder.push("b", 4, 1)
    versions, commits = builder.finish()
    assert versions is not None
    assert len(versions) == 2
    assert commits == [{"commit": 4, "start": 0, "end": 2}]


def test_a_slice_counts_from_the_start_of_the_output() -> None:
    builder = SpanBuilder()
    builder.push("A", 0, 4)
    builder.push("B", 1, 4)
    assert builder.between(3, 6)[0] == [{"version": "A", "start": 3, "end": 4}, {"version": "B", "start": 4, "end": 6}]


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (2, 1), (0, 3)])
def test_a_slice_outside_what_was_recorded_is_refused(start: int, end: int) -> None:
    builder = SpanBuilder()
    builder.push("A", 0, 2)
    with pytest.raises(ValueError, match="recorded"):
        builder.between(start, end)


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        SpanBuilder().push("A", 0, -1)
