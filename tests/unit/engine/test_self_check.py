"""The self-check notices what a runner may get wrong, and says so instead of raising."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.architectures import PAGED
from engine.models import COMMON, CONFIGS, VOCABULARY, make_model
from rollspan.config import EngineConfig
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.errors import RollspanError
from rollspan.runner.input_batch import StepLogits
from rollspan.runner.loader import load_model
from rollspan.runner.model_runner import ModelRunner
from rollspan.runner.self_check import Run, SelfCheck

CPU = torch.device("cpu")
BLOCK_SIZE = 4

WRONG: dict[str, tuple[Callable[[], transformers.PretrainedConfig], dict[str, Any]]] = {
    "the sliding window is lost": (CONFIGS["mistral"], {"sliding_window": 0}),
    "the sliding window is one too long": (CONFIGS["mistral"], {"sliding_window": 8}),
    "the soft cap is lost": (CONFIGS["gemma2"], {"softcap": 0.0}),
    "the sinks are lost": (PAGED["gpt_oss"], {"sinks": None}),
    "the scale is wrong": (CONFIGS["llama"], {"scale": 1.0}),
}


def prepared(path: Path, make_config: Callable[[], transformers.PretrainedConfig]) -> tuple[SelfCheck, ModelRunner]:
    make_model(path, make_config())
    config = EngineConfig(model=str(path), block_size=BLOCK_SIZE)
    model, _ = load_model(config, CPU)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    check = SelfCheck(model, vocab_size=VOCABULARY, block_size=BLOCK_SIZE, device=CPU)
    return check, ModelRunner(model, config, CPU, num_blocks=check.num_blocks, max_model_len=check.longest)


def attending_otherwise(runner: ModelRunner, **changes: Any) -> Run:
    context = runner._context
    attend = context.attend
    names = ("layer", "scale", "sliding_window", "softcap", "sinks")

    def otherwise(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return attend(query, key, value, **{**dict(zip(names, arguments, strict=True)), **changes})

    context.attend = otherwise  # type: ignore[method-assign, assignment]
    return runner.run


@pytest.mark.parametrize("what", list(WRONG))
def test_an_attention_that_differs_is_noticed(what: str, tmp_path: Path) -> None:
    make_config, changes = WRONG[what]
    check, runner = prepared(tmp_path, make_config)
    right = check.compare(runner.run)
    assert right.ok
    assert right.difference < 1e-5
    wrong = check.compare(attending_otherwise(runner, **changes))
    assert not wrong.ok
    assert wrong.fault is not None
    assert "computes other logits than with its own attention" in wrong.fault


def test_a_window_that_is_longer_than_the_usual_sequences_is_checked_with_a_longer_one(tmp_path: Path) -> None:
    check, runner = prepared(
        tmp_path,
        lambda: transformers.MistralConfig(**{**COMMON, "max_position_embeddings": 256}, sliding_window=128),
    )
    assert check.longest > 128
    assert check.compare(runner.run).ok
    assert not check.compare(attending_otherwise(runner, sliding_window=0)).ok


def test_sequences_are_no_longer_than_the_model_allows(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=6, bos_token_id=None, eos_token_id=None
    )
    check, runner = prepared(tmp_path, lambda: config)
    assert check.longest == 6
    assert check.compare(runner.run).ok


def test_wrong_rows_in_the_middle_of_a_piece_are_noticed(tmp_path: Path) -> None:
    check, runner = prepared(tmp_path, CONFIGS["llama"])

    def run(scheduled: Sequence[ScheduledRequest]) -> StepLogits:
        result = runner.run(scheduled)
        result.logits[len(result.sampled) :][3:4] += 1.0
        return result

    assert not check.compare(run).ok


def test_a_runner_that_raises_is_an_outcome(tmp_path: Path) -> None:
    check, _ = prepared(tmp_path, CONFIGS["llama"])

    def run(_: Sequence[ScheduledRequest]) -> StepLogits:
        raise ValueError("no\nsuch thing")

    assert check.compare(run).fault == "cannot run: ValueError: no such thing"


def test_rows_that_are_missing_are_an_outcome(tmp_path: Path) -> None:
    check, runner = prepared(tmp_path, CONFIGS["llama"])

    def run(scheduled: Sequence[ScheduledRequest]) -> StepLogits:
        result = runner.run(scheduled)
        return StepLogits(result.logits[: len(result.sampled)], result.sampled, [])

    assert not check.compare(run).ok


def test_a_model_that_computes_nan_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, CONFIGS["llama"]())
    model, _ = load_model(EngineConfig(model=str(tmp_path)), CPU)
    model.get_parameter("model.norm.weight").fill_(float("nan"))
    with pytest.raises(RollspanError, match="computes logits that are not finite"):
        SelfCheck(model, vocab_size=VOCABULARY, block_size=BLOCK_SIZE, device=CPU)
