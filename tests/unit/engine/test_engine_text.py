"""Bad words, structured outputs and prompt log-probs on a real engine: the embedded model, which adds two numbers."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.harness import Engine, Result
from rollspan import models
from rollspan.protocol.messages import FinishReason

DIRECTORY = models.path("add2-rl")
TOKENIZER = Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))
PROMPT = TOKENIZER.encode("12+34=").ids


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(str(DIRECTORY), kv_cache_memory=1 << 22)


def run(engine: Engine, **params: Any) -> Result:
    return engine.generate([tuple(PROMPT)], **params)[0]


def text(result: Result) -> str:
    return str(TOKENIZER.decode(result.token_ids))


def test_a_bad_word_is_never_written_and_the_rest_is_what_it_would_be(engine: Engine) -> None:
    plain = text(run(engine, max_tokens=4))
    first = plain[:2]
    allowed = run(engine, max_tokens=4, bad_words=[first])
    assert text(allowed)[0] == plain[0]  # only the word as a whole is forbidden
    assert first not in text(allowed)
    for seed in range(20):
        sampled = run(engine, max_tokens=8, bad_words=["1", "23"], temperature=2.0, seed=seed, ignore_eos=True)
        assert not re.search("1|23", text(sampled))


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "[1-3]{4}"}, "[1-3]{4}"),
        ({"choice": ["77", "8", "999"]}, "77|8|999"),
        ({"json": {"type": "integer", "minimum": 100, "maximum": 499}}, "[1-4][0-9][0-9]"),
        ({"grammar": "start: /5+/ /[67]/"}, "5+[67]"),
        ({"grammar": 'root ::= "4" ("2" | "3")'}, "4[23]"),
    ],
)
@pytest.mark.parametrize("eos", [True, False])
def test_a_structured_output_matches_and_ends(
    engine: Engine, structure: dict[str, Any], pattern: str, eos: bool
) -> None:
    for seed in range(8):
        result = run(
            engine, max_tokens=30, structured_outputs=structure, temperature=2.0, seed=seed, ignore_eos=not eos
        )
        assert re.fullmatch(pattern, text(result)) or result.finish_reason is FinishReason.LENGTH, text(result)
        if "5+" not in pattern:
            assert result.finish_reason is FinishReason.STOP


def test_a_structure_survives_preemption_and_neighbours(engine: Engine) -> None:
    block = engine.core._runner.bytes_per_block // 4  # type: ignore[attr-defined]
    crowded = Engine(str(DIRECTORY), block_size=4, max_model_len=32, kv_cache_memory=block * 10, max_num_seqs=4)
    wanted = [{"regex": "[1-3]{9}"}, {"regex": "[4-6]{9}"}, None, {"regex": "[7-9]{9}"}]
    results = [
        crowded.add(f"r{i}", PROMPT, max_tokens=12, structured_outputs=each, temperature=1.5, seed=i, ignore_eos=True)
        for i, each in enumerate(wanted)
    ]
    crowded.run()
    assert crowded.core.scheduler.num_preemptions > 0
    for result, each in zip(results, wanted, strict=True):
        assert each is None or re.fullmatch(each["regex"], text(result))


def test_a_grammar_that_is_wrong_is_refused_with_what_is_wrong_and_disturbs_nobody(engine: Engine) -> None:
    other = engine.add("other", PROMPT, max_tokens=3)
    result = run(engine, structured_outputs={"regex": "[1-"})
    assert result.error is not None
    assert result.error.param == "sampling_params.structured_outputs"
    assert "cannot be used" in result.error.message
    assert "unclosed" in result.error.message
    assert len(other.token_ids) == 3


def test_without_the_library_or_a_tokenizer_the_field_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(DIRECTORY / name, tmp_path)
    engine = Engine(str(tmp_path), kv_cache_memory=1 << 22)
    for field, value in (("structured_outputs", {"regex": "1"}), ("bad_words", ["1"])):
        error = run(engine, **{field: value}).error
        assert error is not None
        assert error.param == f"sampling_params.{field}"
        assert f"sampling_params.{field} needs the model's tokenizer.json" in error.message
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = run(engine, structured_outputs={"regex": "1"}).error
    assert error is not None
    assert "rollspan[structured]" in error.message


@pytest.mark.parametrize("budget", [256, 5])
def test_prompt_logprobs_are_the_models_own_in_any_pieces(budget: int) -> None:
    engine = Engine(str(DIRECTORY), kv_cache_memory=1 << 22, max_num_batched_tokens=budget, max_num_seqs=4)
    prompt = PROMPT * 3
    model = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    engine.add("before", prompt, max_tokens=1)  # its blocks are cached; a prompt that is scored does not use them
    engine.run()
    beside = engine.add("beside", PROMPT, max_tokens=6, ignore_eos=True)
    result = engine.add("scored", prompt, max_tokens=2, prompt_logprobs=2, temperature=0.5, seed=1)
    engine.run()
    scores = result.outputs[0].new_prompt_logprobs
    assert scores is not None
    assert scores.token_ids.shape == (len(prompt) - 1, 3)
    assert scores.token_ids[:, 0].tolist() == prompt[1:]
    expected = logprobs[:-1].gather(1, torch.tensor(scores.token_ids.tolist()))
    torch.testing.assert_close(torch.tensor(scores.logprobs.tolist()), expected, atol=2e-5, rtol=0)
    assert [output.new_prompt_logprobs for output in result.outputs[1:]] == [None]
    assert len(beside.token_ids) == 6
    assert json.dumps(scores.sampled_ranks.tolist())  # plain integers
    ranks = (logprobs[:-1] > expected[:, :1]).sum(dim=-1) + 1
    assert scores.sampled_ranks.tolist() == ranks.tolist()


def test_a_prompt_whose_logits_are_not_finite_fails_by_itself() -> None:
    engine = Engine(str(DIRECTORY), kv_cache_memory=1 << 22, enable_prefix_caching=False)
    [embedding] = engine.parameters("model.embed_tokens.weight")
    embedding.data[PROMPT[1]] = float("nan")
    bad = engine.add("bad", PROMPT, max_tokens=3, prompt_logprobs=0)
    good = engine.add("good", [PROMPT[0]] * 4, max_tokens=3, prompt_logprobs=0, ignore_eos=True)
    engine.run()
    assert bad.error is not None
    assert (bad.error.code, bad.finish_reason) == ("nan_logits", FinishReason.ERROR)
    assert (good.error, len(good.token_ids)) == (None, 3)


@pytest.mark.parametrize(
    "structure",
    [
        {"structural_tag": '{"triggers":["<f"],"structures":[]}'},
        {"structural_tag": '{"triggers":["<f"],"structures":[{"begin":"<g>","schema":{},"end":"</g>"}]}'},
        {"structural_tag": '{"triggers":["<f"],"structures":[{"begin":3,"schema":{},"end":"</g>"}]}'},
        {"json": "[" * 200_000 + "]" * 200_000},
    ],
)
def test_a_structure_that_no_parser_expects_is_refused_and_the_engine_lives(
    engine: Engine, structure: dict[str, Any]
) -> None:
    error = run(engine, structured_outputs=structure).error
    assert error is not None
    assert error.param == "sampling_params.structured_outputs"
    assert len(run(engine, max_tokens=2).token_ids) == 2


def test_a_grammar_that_becomes_too_complex_is_an_error_and_no_complete_output(engine: Engine) -> None:
    grammar = "start: " + " ".join(["x?"] * 400) + "\nx: " + " ".join(["y?"] * 400) + '\ny: "1" | "2" | x'
    result = run(
        engine, max_tokens=8, structured_outputs={"grammar": grammar}, logit_bias={TOKENIZER.token_to_id("1"): 90}
    )
    assert result.error is not None
    assert (result.finish_reason, result.error.code) == (FinishReason.ERROR, "engine_error")
    assert "structured_outputs cannot be followed" in result.error.message


def test_parameters_that_leave_no_token_are_named_as_the_reason(engine: Engine) -> None:
    [eos] = engine.hello.model.eos_token_ids
    error = run(engine, max_tokens=5, min_tokens=2, allowed_token_ids=(eos,)).error
    assert error is not None
    assert (error.code, error.message) == (
        "validation_error",
        "no token is left that the request's parameters allow",
    )


def test_a_prompt_to_be_scored_is_computed_even_where_it_is_cached(engine: Engine) -> None:
    prompt = PROMPT * 9
    engine.generate([tuple(prompt)], max_tokens=1)
    result = engine.generate([tuple(prompt)], max_tokens=1, prompt_logprobs=0, skip_reading_prefix_cache=False)[0]
    scores = result.outputs[0].new_prompt_logprobs
    assert scores is not None
    assert len(scores.token_ids) == len(prompt) - 1


def test_what_cannot_be_derived_from_new_weights_leaves_the_old_ones_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models.path("add2-sft"), tmp_path / "sft")
    engine = Engine(str(DIRECTORY), kv_cache_memory=1 << 22, weights_root=str(tmp_path))
    before = run(engine, max_tokens=4).token_ids

    def fail(_: object) -> None:
        raise MemoryError("no room for the packed copy")

    with monkeypatch.context() as patch:
        patch.setattr(engine.core._runner, "prepare", fail)
        engine.result_of("start_weight_update")
        engine.result_of("update_weights", {"path": "sft"})
        reason, message = engine.failure_of("finish_weight_update", "step-1")
    assert (reason, message) == ("internal_error", "MemoryError: no room for the packed copy")
    assert (engine.result_of("get_weight_version"), engine.result_of("get_weight_commit")) == ("default", 0)
    assert run(engine, max_tokens=4).token_ids == before
    engine.commit("sft", "step-1")
    assert (engine.result_of("get_weight_version"), engine.result_of("get_weight_commit")) == ("step-1", 1)
