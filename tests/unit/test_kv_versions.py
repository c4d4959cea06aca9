"""KvVersionBuilder on the shared vectors (Rust runs the same file), and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollspan.spans import KvVersionBuilder

VECTORS = json.loads((Path(__file__).parents[1] / "conformance" / "kv_versions.json").read_text(encoding="utf-8"))


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["title"]) for case in cases]


def built(case: dict[str, Any]) -> KvVersionBuilder:
    builder = KvVersionBuilder(case["prompt_length"])
    for push in case["pushes"]:
        builder.push(*push)
    return builder


@pytest.mark.parametrize("case", named(VECTORS["cases"]))
def test_kv_versions_of(case: dict[str, Any]) -> None:
    builder = built(case)
    assert builder.finish(case.get("total")) == case["kv_versions"]
    assert builder.finish(case.get("total")) == case["kv_versions"]  # reading changes nothing


@pytest.mark.parametrize("case", named(VECTORS["refused"]))
def test_spans_that_do_not_cover_what_came_before_are_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="KV spans"):
        built(case)


@pytest.mark.parametrize("total", [-1, 3])
def test_no_more_tokens_are_described_than_came(total: int) -> None:
    builder = built({"prompt_length": 1, "pushes": [["A", 0, 2, [["A", 0, 0, 1]]]]})
    with pytest.raises(ValueError, match="2 were recorded"):
        builder.finish(total)


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        KvVersionBuilder(1).push("A", 0, -1)
