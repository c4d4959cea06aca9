"""Architecture by architecture: the engine's greedy tokens are those of transformers' own generate.

However the work is cut into steps, preempted or found in the prefix cache; the prompts are up to 40 tokens long, the
sliding windows 7. models.CONFIGS are in test_engine_parity.py, layout by layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.architectures import COMPAT, PAGED
from engine.conftest import References
from engine.harness import Engine
from engine.models import CONFIGS, TinyModel, decisive_prompts, make_model

TOKENS = 8


def outputs(engine: Engine, expected: References) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(list(expected), max_tokens=TOKENS)]


def cached_tokens(engine: Engine) -> list[int]:
    """Of each request that there was, in order."""
    stats = [result.outputs[0].prefill_stats for result in engine.results.values()]
    return [found["num_cached_tokens"] for found in stats if found is not None]


@pytest.mark.parametrize("kind", list(PAGED))
def test_paged_attention_gives_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, PAGED[kind]())
    expected = decisive_prompts(model, count=5, tokens=TOKENS)
    engine = Engine(str(tmp_path), kv_cache_memory=1 << 20, max_num_batched_tokens=7, max_num_seqs=4)
    assert engine.core.facts()["runner"] != "compat"

    first = [engine.add(f"first-{index}", prompt, max_tokens=TOKENS) for index, prompt in enumerate(expected)]
    for _ in range(9):
        engine.step()
    engine.result_of("pause_generation", "keep", True)  # whoever runs is preempted, and what was cached is gone
    engine.result_of("resume_scheduler")
    engine.run()
    assert [result.token_ids for result in first] == list(expected.values())

    assert outputs(engine, expected) == list(expected.values())
    assert cached_tokens(engine)[len(expected) :] == [(len(prompt) - 1) // 16 * 16 for prompt in expected]


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_conversation_finds_its_beginning_in_the_prefix_cache(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, CONFIGS[kind]())
    engine = Engine(model, block_size=4, num_blocks=64)
    prompt = next(prompt for prompt in decisive_prompts(model, count=9, tokens=TOKENS, seed=1) if len(prompt) >= 16)
    first = engine.generate([prompt], max_tokens=TOKENS)[0].token_ids
    longer = (*prompt, *first, 3, 1, 4)
    expected, _ = model.generate(list(longer), 4)
    assert engine.generate([longer], max_tokens=4)[0].token_ids == expected
    assert cached_tokens(engine)[-1] >= len(prompt)


@pytest.mark.parametrize("kind", list(COMPAT))
def test_the_compat_runner_gives_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    mode, make_config = COMPAT[kind]
    model = TinyModel(tmp_path, make_model(tmp_path, make_config()).model.from_pretrained(tmp_path))
    expected = decisive_prompts(model, count=4, tokens=TOKENS)
    engine = Engine(str(tmp_path), max_num_batched_tokens=7, max_num_seqs=3, block_size=4)
    facts = engine.core.facts()
    assert facts["runner"] == "compat"
    assert facts["runner_reason"].startswith(type(model.model).__name__)
    assert engine.core._runner.mode.name == mode  # type: ignore[attr-defined]
    assert outputs(engine, expected) == list(expected.values())
    assert outputs(engine, expected) == list(expected.values())
    assert not any(cached_tokens(engine))
