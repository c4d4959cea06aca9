"""Which experts computed each token: as the routers of a plain forward pass choose, however the work was cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.architectures import COMPAT, PAGED
from engine.harness import Engine, Result
from engine.models import CONFIGS, TinyModel, decisive_prompts, make_model
from rollspan.errors import RollspanError

TOKENS = 6
KINDS = ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "phimoe"]
SMALL: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 4, "kv_cache_memory": 1 << 20}


def start(path: Path, **config: Any) -> Engine:
    return Engine(str(path), enable_return_routed_experts=True, **{**SMALL, **config})


def choices(model: TinyModel, token_ids: list[int]) -> list[npt.NDArray[np.int64]]:
    """Per layer with experts the best of ``[tokens, experts]`` logits, in ascending order: ``[tokens, top_k]``."""
    config = model.model.config
    top_k = config.num_experts_per_tok
    with torch.inference_mode():
        output = model.model(torch.tensor([token_ids]), use_cache=False, output_router_logits=True)
    return [logits.topk(top_k).indices.sort().values.numpy() for logits in output.router_logits]


def check(model: TinyModel, prompt: tuple[int, ...], result: Result, first: int = 0) -> None:
    found = result.outputs[-1].routed_experts
    assert found is not None
    expected = choices(model, [*prompt, *result.token_ids[:-1]])  # nothing was computed from the last token
    layers = model.model.config.num_hidden_layers
    dense = layers - len(expected)
    assert found.dtype == np.int16
    assert found.shape == (len(prompt) + len(result.token_ids) - 1 - first, layers, expected[0].shape[1])
    assert not found[:, :dense].any()
    for layer, wanted in enumerate(expected, start=dense):
        np.testing.assert_array_equal(np.sort(found[:, layer], axis=1), wanted[first:])
    assert all(output.routed_experts is None for output in result.outputs[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_those_of_a_plain_forward(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, PAGED[kind]())
    engine = start(tmp_path)
    prompts = list(decisive_prompts(model, count=4, tokens=TOKENS))
    for _ in range(2):  # the second time most of it comes from the prefix cache
        for prompt, result in zip(
            prompts, engine.generate(prompts, max_tokens=TOKENS, routed_experts=True), strict=True
        ):
            check(model, prompt, result)


@pytest.mark.parametrize("kind", ["lfm2_moe", "qwen3_next"])
def test_the_compat_runner_tells_them_as_well(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, COMPAT[kind][1]())
    engine = start(tmp_path)
    prompts = list(decisive_prompts(model, count=4, tokens=TOKENS))
    for prompt, result in zip(prompts, engine.generate(prompts, max_tokens=TOKENS, routed_experts=True), strict=True):
        check(model, prompt, result)


@pytest.fixture
def moe(tmp_path: Path) -> TinyModel:
    return make_model(tmp_path, PAGED["qwen3_moe"]())


def test_experts_are_recorded_again_after_a_preemption(moe: TinyModel) -> None:
    engine = start(moe.path, enable_prefix_caching=False)
    prompts = list(decisive_prompts(moe, count=4, tokens=TOKENS))
    results = [engine.add(f"r{i}", p, max_tokens=TOKENS, routed_experts=True) for i, p in enumerate(prompts)]
    for _ in range(8):
        engine.step()
    engine.result_of("pause_generation", "keep", True)
    engine.result_of("resume_scheduler")
    engine.run()
    for prompt, result in zip(prompts, results, strict=True):
        check(moe, prompt, result)


def test_the_beginning_of_the_prompt_can_be_left_out(moe: TinyModel) -> None:
    prompt = tuple(range(1, 12))
    engine = start(moe.path)
    asked: dict[str, Any] = {"max_tokens": TOKENS, "routed_experts": True, "routed_experts_prompt_start": 5}
    check(moe, prompt, engine.generate([prompt], **asked)[0], first=5)


@pytest.mark.parametrize(("asked", "given"), [({}, True), ({"routed_experts": False}, False)])
def test_who_does_not_ask_gets_them_and_who_declines_does_not(
    moe: TinyModel, asked: dict[str, Any], given: bool
) -> None:
    last = start(moe.path).generate([(1, 2, 3)], max_tokens=2, **asked)[0].outputs[-1]
    assert (last.routed_experts is not None) == given


def test_an_engine_without_the_capability_refuses_by_name(moe: TinyModel) -> None:
    result = Engine(str(moe.path), **SMALL).generate([(1, 2, 3)], max_tokens=2, routed_experts=True)[0]
    assert result.error is not None
    assert "--enable-return-routed-experts" in result.error.message


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (CONFIGS["llama"], "LlamaForCausalLM has no routers to experts"),
        (PAGED["jetmoe"], "JetMoeForCausalLM does not tell which experts its routers choose"),
        (COMPAT["llama4"][1], "Llama4ForCausalLM does not tell which experts its routers choose"),
    ],
)
def test_a_model_that_cannot_tell_is_refused_by_name(make_config: Any, message: str, tmp_path: Path) -> None:
    make_model(tmp_path, make_config())
    with pytest.raises(RollspanError, match=message) as caught:
        start(tmp_path)
    assert caught.value.param == "enable_return_routed_experts"


def test_a_beginning_beyond_the_prompt_is_refused_and_the_engine_lives(moe: TinyModel) -> None:
    engine = start(moe.path)
    result = engine.generate([(1, 2, 3)], max_tokens=2, routed_experts_prompt_start=50)[0]
    assert result.error is not None
    assert "routed_experts_prompt_start must be an integer from 0 to 3, got 50" in result.error.message
    assert len(engine.generate([(1, 2, 3)], max_tokens=2, ignore_eos=True)[0].token_ids) == 2
