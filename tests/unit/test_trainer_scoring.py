"""Log-probs of given tokens, and what the environment has to say for them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from engine.models import CONFIGS
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollspan import numerics, trainer


@pytest.fixture
def model() -> PreTrainedModel:
    trainer.register()
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation=trainer.NAME)
    return made.eval()


def test_scores_are_the_log_softmax_of_each_tokens_predecessor(model: PreTrainedModel) -> None:
    sequences = [[5, 9, 33, 2, 71], [8, 8]]
    found = trainer.score(model, sequences, temperature=0.7)
    for ids, scores in zip(sequences, found, strict=True):
        tokens = torch.tensor([ids])
        expected = torch.log_softmax(model(input_ids=tokens).logits[0, :-1] / 0.7, dim=-1)
        torch.testing.assert_close(scores, expected.gather(1, tokens[0, 1:, None])[:, 0], atol=1e-5, rtol=0)
        assert scores.dtype == torch.float32


def test_scores_have_gradients(model: PreTrainedModel) -> None:
    trainer.score(model, [[5, 9, 33]])[0].sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_sequence_of_one_token_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="a sequence of 1 tokens has nothing to score"):
        trainer.score(model, [[5]])


def test_another_attention_is_refused(model: PreTrainedModel) -> None:
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"runs with attention 'eager'.*attn_implementation='rollspan'"):
        trainer.score(model, [[5, 6]])


def test_a_strict_mode_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    assert trainer.environment() == {"MKL_CBWR": "AVX2,STRICT"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2", "avx512f"}, {"MKL_CBWR": "AVX512,STRICT"}),
        ({"avx2"}, {"MKL_CBWR": "AVX2,STRICT"}),
        (set(), {}),
    ],
)
def test_the_mode_follows_the_cpu_and_replaces_one_that_is_not_strict(
    flags: set[str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setattr(numerics, "_cpu_flags", lambda: flags)
    assert numerics.environment() == expected


def test_the_module_prints_the_variables_for_a_shell() -> None:
    environment = {**os.environ, "MKL_CBWR": "AVX2,STRICT"}
    command = [sys.executable, "-m", "rollspan.trainer"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "export MKL_CBWR=AVX2,STRICT\n"


def test_the_environment_is_known_without_torch() -> None:
    code = "import sys, rollspan.numerics, rollspan.launcher; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
