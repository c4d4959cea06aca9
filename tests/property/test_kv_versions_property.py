"""KvVersionBuilder against a brute-force twin that keeps the stamp of each position as each token saw it."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollspan.spans import KvVersionBuilder

Stamp = tuple[str, int]
Push = tuple[str, int, int, "list[tuple[str, int, int, int]] | None"]
STAMPS = st.tuples(st.sampled_from("AB"), st.integers(0, 1))


def runs(stamps: list[Any]) -> list[tuple[Any, int, int]]:
    """(stamp, start, end) of equal neighbours."""
    found, start = [], 0
    for stamp, group in groupby(stamps):
        end = start + len(list(group))
        found.append((stamp, start, end))
        start = end
    return found


@st.composite
def generations(draw: st.DrawFn) -> tuple[int, list[Push], list[list[Stamp]], list[int]]:
    """Prompt length, engine outputs, the stamps of all positions that each token attended to, where segments begin."""
    prompt = draw(st.integers(1, 5))
    kv = draw(st.lists(STAMPS, min_size=prompt, max_size=prompt))
    pushes: list[Push] = []
    seen: list[list[Stamp]] = []
    starts: list[int] = []
    previous: Stamp | None = None
    for _ in range(draw(st.integers(0, 8))):
        stamp, tokens = draw(STAMPS), draw(st.integers(0, 3))
        changed = bool(seen) and draw(st.booleans())
        if tokens and changed:  # recomputed, by whatever weights
            kv = draw(st.lists(STAMPS, min_size=len(kv) + 1, max_size=len(kv) + 1))
        elif tokens and seen:
            kv = [*kv, stamp]
        told = tokens > 0 and (changed or not seen or draw(st.booleans()))
        spans = [(*value, start, end) for value, start, end in runs(kv)] if told else None
        for number in range(tokens):
            kv = [*kv, stamp] if number else kv
            if not seen or stamp != previous or (told and number == 0):
                starts.append(len(seen))
            seen.append(kv)
            previous = stamp
        pushes.append((*stamp, tokens, spans))
    return prompt, pushes, seen, starts


def built(prompt: int, pushes: list[Push]) -> KvVersionBuilder:
    builder = KvVersionBuilder(prompt)
    for push in pushes:
        builder.push(*push)
    return builder


@given(generation=generations(), data=st.data())
def test_segments_say_what_each_token_attended_to(generation: Any, data: st.DataObject) -> None:
    prompt, pushes, seen, starts = generation
    total = data.draw(st.integers(0, len(seen)))
    segments = built(prompt, pushes).finish(total)
    assert segments is not None
    assert [segment["start"] for segment in segments] == [start for start in starts if start < total]
    assert [segment["end"] for segment in segments] == [*[s["start"] for s in segments[1:]], *[total][: bool(total)]]
    for segment in segments:
        spans = segment["kv"]
        assert all((a["version"], a["commit"]) != (b["version"], b["commit"]) for a, b in pairwise(spans))
        stamps = [(span["version"], span["commit"]) for span in spans for _ in range(span["start"], span["end"])]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        for token in range(segment["start"], segment["end"]):
            assert stamps[: prompt + token] == seen[token]
        assert len(stamps) == prompt + segment["end"] - 1


@given(generation=generations())
def test_how_tokens_are_split_into_outputs_changes_nothing(generation: Any) -> None:
    prompt, pushes, _, _ = generation
    single = [
        (version, commit, 1, spans if number == 0 else None)
        for version, commit, tokens, spans in pushes
        for number in range(tokens)
    ]
    assert built(prompt, single).finish() == built(prompt, pushes).finish()
