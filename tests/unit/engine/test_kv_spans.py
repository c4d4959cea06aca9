"""Which weights computed a request's KV: told with its first token and after each recompute, true to the slot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.harness import Engine, Result
from engine.kv_truth import KvTruth
from engine.models import CONFIGS, MAX_MODEL_LEN, TinyModel, make_model
from rollspan.provenance import Provenance

TOLD = Provenance(return_kv_versions=True)
STALE = Provenance(return_kv_versions=True, allow_stale_prefix=True)
PROMPT = tuple(range(3, 23))  # five blocks of 4
A, B, C = ("A", 0), ("B", 1), ("C", 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Path:
    """A weights root that holds ``first`` (those that engines start with) and ``second``."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(tiny("llama").path, root / "first")
    make_model(root / "second", CONFIGS["llama"](), seed=99)
    return root


@pytest.fixture(params=[False, True], ids=["step by step", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Watched(Engine):
    """An engine with small blocks and budget, under watch; its weights are called A at first."""

    def __init__(self, model: TinyModel, root: Path, asynchronous: bool, **config: Any) -> None:
        config = {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 4, **config}
        super().__init__(model, weights_root=str(root), weight_version="A", async_scheduling=asynchronous, **config)
        self.truth = KvTruth(self)

    def ask(self, name: str, prompt: tuple[int, ...] = PROMPT, *, tokens: int = 6, **params: Any) -> Result:
        return self.add(name, prompt, max_tokens=tokens, **{"provenance": TOLD, **params})

    def computed(self, name: str, positions: int) -> None:
        """Steps until that many positions of a request are in the cache."""
        self.step_until(lambda: self.core.scheduler.requests[name].num_computed_tokens >= positions)

    def said(self, name: str, tokens: int) -> None:
        """Steps until that many tokens of a request have come."""
        self.step_until(lambda: len(self.results[name].token_ids) >= tokens)

    def finish(self) -> None:
        """Runs everything to its end, and checks it against the slots."""
        self.run()
        for name, result in self.results.items():
            assert result.error is None
            self.truth.check(name, result)


@pytest.fixture
def engine(llama: TinyModel, root: Path, asynchronous: bool) -> Watched:
    return Watched(llama, root, asynchronous)


def test_a_prompt_in_pieces_under_one_commit_is_one_span_told_once(engine: Watched) -> None:
    result = engine.ask("r")
    engine.finish()
    assert result.outputs[0].kv_spans == [(*A, 0, 20)]
    assert result.kv_announced == [0]
    assert result.kv_runs() == [[(*A, 0, 25)]]


def test_nobody_is_told_unasked(engine: Watched) -> None:
    result = engine.add("r", PROMPT, max_tokens=6)
    engine.run()
    assert result.kv_announced == []
    assert result.kv_versions() is None


def test_a_commit_in_the_middle_of_a_prompt_splits_its_kv_there(engine: Watched) -> None:
    result = engine.ask("r")
    engine.computed("r", 8)
    computed = engine.core.scheduler.requests["r"].num_computed_tokens
    engine.commit("second", "B")
    engine.finish()
    assert computed < 20
    assert result.outputs[0].kv_spans == [(*A, 0, computed), (*B, computed, 20)]
    assert result.kv_announced == [0]
    assert set(result.stamps) == {B}


def test_kv_that_is_kept_across_a_commit_grows_under_the_new_stamp(engine: Watched) -> None:
    result = engine.ask("r")
    engine.said("r", 2)
    engine.commit("second", "B")
    engine.finish()
    old = result.stamps.count(A)
    assert 2 <= old < 6
    assert result.kv_announced == [0]
    assert result.kv_runs() == [[(*A, 0, 19 + old)], [(*A, 0, 19 + old), (*B, 19 + old, 25)]]


def test_another_label_for_the_same_weights_is_another_stamp(engine: Watched) -> None:
    result = engine.ask("r")
    engine.said("r", 2)
    engine.start_call("set_weight_version", "N")
    engine.finish()
    old = result.stamps.count(A)
    assert result.kv_runs() == [[(*A, 0, 19 + old)], [(*A, 0, 19 + old), ("N", 0, 19 + old, 25)]]


@pytest.mark.parametrize("commit", [False, True])
def test_kv_that_is_cleared_is_told_again_with_the_next_token(engine: Watched, commit: bool) -> None:
    result = engine.ask("r")
    engine.said("r", 2)
    if commit:
        engine.commit("second", "B")
    engine.start_call("reset_prefix_cache", True)
    engine.finish()
    # What was in flight came before it.
    [first, again] = result.kv_announced
    assert first == 0
    assert result.outputs[again].kv_spans == [(*(B if commit else A), 0, 20 + again)]
    assert len(result.kv_runs()) == 2


def test_a_request_that_loses_its_blocks_tells_its_kv_again(llama: TinyModel, root: Path, asynchronous: bool) -> None:
    engine = Watched(llama, root, asynchronous, num_blocks=MAX_MODEL_LEN // 4 + 1, max_num_batched_tokens=32)
    results = [engine.ask(name, tuple(range(i, i + 20)), tokens=40) for i, name in enumerate("ab")]
    engine.step_until(lambda: engine.core.scheduler.num_preemptions)
    engine.commit("second", "B")
    engine.finish()
    assert [len(result.kv_announced) > 1 for result in results] == [False, True]
    again = results[1].kv_announced[-1]
    assert results[1].outputs[again].kv_spans == [(*B, 0, 20 + again)]


def test_what_comes_from_the_prefix_cache_bears_the_stamp_of_its_chain(engine: Watched) -> None:
    engine.ask("one")
    engine.finish()
    engine.start_call("set_weight_version", "N")
    other = engine.ask("two")
    engine.finish()
    assert other.outputs[0].prefill_stats is not None
    assert other.outputs[0].prefill_stats["num_cached_tokens"] == 16
    assert other.outputs[0].kv_spans == [(*A, 0, 16), ("N", 0, 16, 20)]


def cached(result: Result) -> int:
    stats = result.outputs[0].prefill_stats
    assert stats is not None
    return int(stats["num_cached_tokens"])


def test_an_older_commits_prefix_is_taken_by_those_who_allow_it_only(engine: Watched) -> None:
    engine.ask("old")
    engine.finish()
    engine.commit("second", "B")
    stale = engine.ask("stale", provenance=STALE)
    engine.finish()
    assert cached(stale) == 16
    assert stale.outputs[0].kv_spans == [(*A, 0, 16), (*B, 16, 20)]
    fresh = engine.ask("fresh")
    engine.finish()
    assert cached(fresh) == 0  # neither the old blocks nor any that the other has computed behind them
    assert fresh.outputs[0].kv_spans == [(*B, 0, 20)]
    again = engine.ask("again", provenance=STALE)
    engine.finish()
    assert again.outputs[0].kv_spans == [(*B, 0, 20)]  # what is current comes first


def test_the_newest_of_the_older_commits_comes_first(engine: Watched) -> None:
    for path, label in (("second", "B"), ("first", "C")):
        engine.ask(f"under {label}", PROMPT if label == "B" else PROMPT[:8])
        engine.finish()
        engine.commit(path, label)
    stale = engine.ask("stale", provenance=STALE)
    engine.finish()
    assert stale.outputs[0].kv_spans == [(*B, 0, 8), (*C, 8, 20)]  # of that commit no more than it has


@pytest.mark.parametrize("what", ["another salt", "a cleared cache", "no reading", "log-probs of the prompt"])
def test_stale_prefixes_are_not_found_under(engine: Watched, what: str) -> None:
    engine.ask("old")
    engine.finish()
    engine.commit("second", "B")
    params: dict[str, Any] = {
        "another salt": {"cache_salt": "s"},
        "no reading": {"skip_reading_prefix_cache": True},
        "log-probs of the prompt": {"prompt_logprobs": 0},
    }.get(what, {})
    if what == "a cleared cache":
        engine.result_of("reset_prefix_cache")
    stale = engine.ask("stale", provenance=STALE, **params)
    engine.finish()
    assert cached(stale) == 0
    assert stale.outputs[0].kv_spans == [(*B, 0, 20)]


def test_every_one_of_n_outputs_tells_its_own(engine: Watched) -> None:
    results = [engine.ask(f"{index}_r", tokens=3 + index) for index in range(3)]
    engine.said("0_r", 1)
    engine.commit("second", "B")
    engine.finish()
    assert all(result.kv_announced == [0] for result in results)
    assert {cached(result) for result in results} == {0, 16}


def test_who_scored_the_prompt_is_told_with_its_log_probs(engine: Watched) -> None:
    result = engine.add("r", PROMPT, max_tokens=2, prompt_logprobs=0)
    engine.computed("r", 8)
    computed = engine.core.scheduler.requests["r"].num_computed_tokens
    engine.commit("second", "B")
    engine.run()
    assert computed < 19
    first, second = result.outputs
    # The row of position p scores token p + 1.
    assert first.prompt_spans == [(*A, 1, computed + 1), (*B, computed + 1, 20)]
    assert first.new_prompt_logprobs is not None
    assert len(first.new_prompt_logprobs.token_ids) == 19
    assert second.prompt_spans is None


def test_a_prompt_of_one_token_is_scored_by_nobody(engine: Watched) -> None:
    result = engine.add("r", (5,), max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert result.outputs[0].prompt_spans is None
    assert result.outputs[0].new_prompt_logprobs is None
