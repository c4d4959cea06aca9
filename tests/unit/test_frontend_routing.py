"""Which engine a request goes to: the shared vectors, and the laws of rendezvous hashing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollspan.frontend.routing import least_loaded, session_engine

VECTORS = json.loads((Path(__file__).parents[1] / "conformance" / "routing.json").read_text(encoding="utf-8"))
ENGINES = st.sets(st.integers(0, 20), min_size=2, max_size=8)


@pytest.mark.parametrize("case", VECTORS["sessions"])
def test_a_session_goes_to_the_engine_of_its_vector(case: dict[str, Any]) -> None:
    assert session_engine(case["session_id"], case["engines"]) == case["engine"]


@pytest.mark.parametrize("case", VECTORS["least_loaded"])
def test_load_is_spread_as_its_vector_says(case: dict[str, Any]) -> None:
    open_requests = {int(index): count for index, count in case["open_requests"].items()}
    assert least_loaded(open_requests, case["after"]) == case["engine"]


@given(st.text(max_size=40), ENGINES, st.data())
def test_a_session_stays_where_it_is_when_another_engine_goes(
    session_id: str, engines: set[int], data: st.DataObject
) -> None:
    chosen = session_engine(session_id, sorted(engines))
    gone = data.draw(st.sampled_from(sorted(engines - {chosen})))
    assert session_engine(session_id, sorted(engines - {gone})) == chosen


def test_sessions_are_spread_evenly() -> None:
    counts = Counter(session_engine(f"session-{number}", range(4)) for number in range(4000))
    assert all(850 < counts[index] < 1150 for index in range(4)), counts


def test_equal_engines_take_turns() -> None:
    open_requests, last, order = {0: 0, 1: 0, 2: 0}, -1, []
    for _ in range(6):
        last = least_loaded(open_requests, last)
        order.append(last)
    assert order == [0, 1, 2, 0, 1, 2]
