"""What outputs say of their KV is enough to compute them again: with plain transformers, weights by weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from engine.models import CONFIGS, TinyModel, make_model
from rollspan import LLM, Provenance, RequestOutput, RequestOutputKind, SamplingParams
from rollspan.models.network import cache_argument
from rollspan.outputs import CompletionOutput

PROMPT = list(range(3, 25))
TOLERANCE = 1e-4


class Lab:
    """An engine whose weights go first, second, first, ... and the same weights in transformers."""

    def __init__(self, llm: LLM, models: tuple[TinyModel, TinyModel]) -> None:
        self.llm = llm
        self._models = models
        self._finals: dict[str, RequestOutput] = {}

    def ask(self, name: str, *, stale: bool = False, **params: Any) -> None:
        sampling = SamplingParams(
            **{"max_tokens": 10, "temperature": 1.0, "seed": 7, "logprobs": 0, **params},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        provenance = Provenance(return_kv_versions=True, allow_stale_prefix=stale)
        self.llm.add_request(PROMPT, sampling, name, provenance=provenance)

    def steps(self, count: int) -> None:
        for _ in range(count):
            for output in self.llm.step():
                self._finals[output.request_id] = output

    def commit(self, *, clear_cache: bool = False) -> None:
        """The other weights, between two steps."""
        self.llm.pause_generation("keep", clear_cache)
        commit = self.llm.get_weight_commit() + 1
        self.llm.start_weight_update()
        self.llm.update_weights({"path": ("first", "second")[commit % 2]})
        self.llm.finish_weight_update(f"v{commit}")
        self.llm.resume_generation()

    def final(self, name: str) -> RequestOutput:
        while name not in self._finals:
            self.steps(1)
        return self._finals[name]

    def rows(self, token_ids: list[int], kv: list[Any]) -> torch.Tensor:
        """Log-probs ``[positions, vocabulary]`` with each position computed by the weights that ``kv`` names."""
        cache, rows = DynamicCache(), []
        for span in kv:
            assert span["version"] == (f"v{span['commit']}" if span["commit"] else "default")
            model = self._models[span["commit"] % 2].model
            ids = torch.tensor([token_ids[span["start"] : span["end"]]])
            with torch.inference_mode():
                rows.append(model(input_ids=ids, **cache_argument(model, cache)).logits[0])
        return torch.cat(rows).log_softmax(-1)

    def check(self, choice: CompletionOutput) -> list[list[int]]:
        """Asserts that the log-probs are those of the KV that is told; returns its commits, segment by segment."""
        assert choice.kv_versions is not None
        assert choice.logprobs is not None
        assert [token for segment in choice.kv_versions for token in range(segment["start"], segment["end"])] == list(
            range(len(choice.token_ids))
        )
        for segment in choice.kv_versions:
            rows = self.rows(PROMPT + choice.token_ids, segment["kv"])
            for index in range(segment["start"], segment["end"]):
                token = choice.token_ids[index]
                told = choice.logprobs[index][token].logprob
                assert told == pytest.approx(float(rows[len(PROMPT) + index - 1, token]), abs=TOLERANCE)
        return [[int(span["commit"] or 0) for span in segment["kv"]] for segment in choice.kv_versions]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], TinyModel]) -> tuple[TinyModel, TinyModel]:
    return tiny("llama"), make_model(tmp_path_factory.mktemp("second") / "llama", CONFIGS["llama"](), seed=99)


@pytest.fixture(params=[False, True], ids=["step by step", "asynchronous"])
def lab(request: pytest.FixtureRequest, models: tuple[TinyModel, TinyModel], tmp_path: Path) -> Iterator[Lab]:
    for name, model in zip(("first", "second"), models, strict=True):
        shutil.copytree(model.path, tmp_path / name)
    config: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 4, "num_threads": 1}
    with LLM(
        models[0].path,
        weights_root=str(tmp_path),
        kv_cache_memory=models[0].bytes_per_token * 4 * 100,
        async_scheduling=request.param,
        **config,
    ) as llm:
        yield Lab(llm, models)


def test_kv_kept_across_commits(lab: Lab) -> None:
    lab.ask("r", max_tokens=20)
    for _ in range(3):
        lab.steps(6)
        lab.commit()
    [choice] = lab.final("r").outputs
    # The first commit comes behind the prompt's third piece, or with the asynchronous engine's some steps later.
    assert lab.check(choice) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_a_commit_in_the_middle_of_the_prompt_and_one_that_clears_the_cache(lab: Lab) -> None:
    lab.ask("r", prompt_logprobs=0)
    lab.steps(1)
    lab.commit()
    lab.steps(5)
    lab.commit(clear_cache=True)
    output = lab.final("r")
    assert lab.check(output.outputs[0]) == [[0, 1], [2]]
    assert output.prompt_logprobs is not None
    assert output.prompt_weight_spans is not None
    assert output.outputs[0].kv_versions is not None
    # Position p, computed by the same weights as its KV, scores token p + 1.
    last = len(PROMPT) - 1
    kv: list[Any] = [{**s, "end": min(s["end"], last)} for s in output.outputs[0].kv_versions[0]["kv"]]
    assert output.prompt_weight_spans == [{**s, "start": s["start"] + 1, "end": s["end"] + 1} for s in kv]
    rows = lab.rows(PROMPT, kv)
    assert len(rows) == last
    for index, position in enumerate(output.prompt_logprobs[1:], 1):
        assert position is not None
        told = position[PROMPT[index]].logprob
        assert told == pytest.approx(float(rows[index - 1, PROMPT[index]]), abs=TOLERANCE)


def test_a_stale_prefix_under_new_weights(lab: Lab) -> None:
    lab.ask("old", max_tokens=1)
    lab.final("old")
    lab.commit()
    lab.ask("stale", stale=True)
    output = lab.final("stale")
    assert output.num_cached_tokens == 20
    assert lab.check(output.outputs[0]) == [[0, 1]]


def test_each_of_n_outputs(lab: Lab) -> None:
    lab.ask("r", n=3)
    lab.steps(5)
    lab.commit()
    choices = lab.final("r").outputs
    assert len({tuple(choice.token_ids) for choice in choices}) > 1
    for choice in choices:
        assert lab.check(choice)[-1] == [0, 1]


def test_what_is_told_is_not_just_anything(lab: Lab) -> None:
    """The check itself: with the other weights' KV the log-probs are others."""
    lab.ask("r")
    lab.steps(5)
    lab.commit()
    [choice] = lab.final("r").outputs
    assert choice.kv_versions is not None
    first, second = choice.kv_versions[-1]["kv"]
    second["start"] = first["end"] = first["end"] - 1
    with pytest.raises(AssertionError):
        lab.check(choice)
