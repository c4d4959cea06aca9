"""The engine's greedy tokens are those of transformers' own generate, however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.conftest import TOKENS, References
from engine.harness import Engine
from engine.models import CONFIGS, MAX_MODEL_LEN, TinyModel

#: A cache that holds one request and a half: running several preempts all the time.
CROWDED = {"block_size": 4, "num_blocks": MAX_MODEL_LEN // 4 + 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "in chunks of five tokens": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "one token a step": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "with blocks of one token": {"block_size": 1, "num_blocks": 600},
    "preempted": CROWDED,
    "asynchronous": {"async_scheduling": True, "max_num_batched_tokens": 9, "max_num_seqs": 5},
    "asynchronous and preempted": {**CROWDED, "async_scheduling": True},
    "preempted and in chunks": {**CROWDED, "max_num_batched_tokens": 7, "max_num_seqs": 5},
}


@pytest.fixture(params=list(CONFIGS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_greedy_tokens_equal_those_of_transformers(
    kind: str, layout: str, tiny: Callable[[str], TinyModel], references: Callable[[str], References]
) -> None:
    engine = Engine(tiny(kind), **LAYOUTS[layout])
    expected = references(kind)
    results = engine.generate(list(expected), max_tokens=TOKENS)
    assert [result.token_ids for result in results] == list(expected.values())


def test_requests_that_arrive_one_by_one_get_the_same_tokens(
    kind: str, tiny: Callable[[str], TinyModel], references: Callable[[str], References]
) -> None:
    engine = Engine(tiny(kind))
    results = []
    for index, prompt in enumerate(references(kind)):
        results.append(engine.add(f"r{index}", prompt, max_tokens=TOKENS))
        engine.step()
    engine.run()
    assert [result.token_ids for result in results] == list(references(kind).values())


def test_tokens_stay_the_same_when_the_cache_is_cleared_in_mid_generation(
    kind: str, tiny: Callable[[str], TinyModel], references: Callable[[str], References]
) -> None:
    engine = Engine(tiny(kind), max_num_batched_tokens=32, max_num_seqs=6)
    results = [engine.add(f"r{i}", prompt, max_tokens=TOKENS) for i, prompt in enumerate(references(kind))]
    while engine.core.has_work():
        engine.step()
        engine.result_of("pause_generation", "keep", True)
        engine.result_of("resume_scheduler")
    assert [result.token_ids for result in results] == list(references(kind).values())
