"""Updates under the names of checkpoints, where transformers merges tensors on load: experts, mostly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from engine.architectures import COMPAT, PAGED
from engine.harness import Engine
from engine.models import CONFIGS, decisive_prompts, make_model
from rollspan.config import EngineConfig
from rollspan.runner.loader import load_model
from rollspan.weights.checkpoint_names import CheckpointNames
from support.gate import Gate

WEIGHTS = "model.safetensors"
ALL: dict[str, Callable[[], PretrainedConfig]] = {
    **CONFIGS,
    **PAGED,
    **{kind: make_config for kind, (_, make_config) in COMPAT.items()},
}
#: Their checkpoints have other tensors than the models.
MERGED = {
    *("deepseek_v3", "glm4_moe", "gpt_neox", "granitemoe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe"),
    *("qwen3_moe", "granitemoehybrid", "jamba", "lfm2_moe", "minimax", "nemotron_h", "qwen3_next"),
}


@pytest.mark.parametrize("kind", [*sorted(MERGED), "llama", "qwen3", "gpt2", "phi3", "bloom", "mamba", "rwkv"])
def test_a_checkpoint_becomes_the_parameters_that_transformers_makes_of_it(kind: str, tmp_path: Path) -> None:
    make_model(tmp_path, ALL[kind]())
    model, _ = load_model(EngineConfig(model=str(tmp_path)), torch.device("cpu"))
    checkpoint = load_file(tmp_path / WEIGHTS)
    names = CheckpointNames(model)
    known = model.state_dict()
    assert (kind in MERGED) == any(name not in known for name in checkpoint)
    assert all(names.target(name) for name in checkpoint)
    found = names.convert(checkpoint)
    tied = {known[name].data_ptr() for name in found}
    assert all(tensor.data_ptr() in tied for tensor in known.values())
    for name, tensor in found.items():
        assert torch.equal(tensor.to(known[name].dtype), known[name]), name


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    make_model(tmp_path / "old", PAGED["qwen3_moe"]())
    make_model(tmp_path / "new", PAGED["qwen3_moe"](), seed=9, max_shard_size="20KB")
    return Engine(str(tmp_path / "old"), weights_root=str(tmp_path), kv_cache_memory=1 << 20)


def test_an_update_under_the_names_of_a_checkpoint_is_used(engine: Engine, tmp_path: Path) -> None:
    expected = decisive_prompts(make_model(tmp_path / "same", PAGED["qwen3_moe"](), seed=9), count=3, tokens=6)
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "new"})
    engine.result_of("finish_weight_update", "v2")
    assert [result.token_ids for result in engine.generate(list(expected), max_tokens=6)] == list(expected.values())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.gate.weight"])
def test_an_update_that_lacks_a_tensor_is_refused_and_the_old_weights_stay(
    engine: Engine, tmp_path: Path, name: str
) -> None:
    prompt = (5, 3, 8, 1)
    before = engine.generate([prompt], max_tokens=6)[0].token_ids
    make_model(tmp_path / "lacking", PAGED["qwen3_moe"](), seed=9)
    tensors = load_file(tmp_path / "lacking" / WEIGHTS)
    del tensors[name]
    save_file(tensors, tmp_path / "lacking" / WEIGHTS, metadata={"format": "pt"})
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "lacking"})
    reason, message = engine.failure_of("finish_weight_update", "v2")
    assert reason == "weights_invalid"
    assert "mlp.experts.gate_up_proj" in message or name in message
    assert engine.result_of("get_weight_version") == "default"
    assert engine.generate([prompt], max_tokens=6)[0].token_ids == before


@pytest.mark.parametrize("number", ["4", "77", "00"])
def test_experts_under_other_numbers_are_refused(engine: Engine, gate: Gate, tmp_path: Path, number: str) -> None:
    tensors = load_file(tmp_path / "old" / WEIGHTS)
    for part in ("gate_proj", "up_proj", "down_proj"):
        place = "model.layers.0.mlp.experts.{}." + part + ".weight"
        tensors[place.format(number)] = tensors.pop(place.format(1))
    gate.send(tensors)
    gate.end()
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"backend": "gate"})
    reason, message = engine.failure_of("finish_weight_update", "v2")
    assert reason == "weights_invalid"
    assert "must be numbered from 0 on" in message


def test_a_tensor_under_two_names_is_refused(engine: Engine, gate: Gate, tmp_path: Path) -> None:
    tensors = load_file(tmp_path / "old" / WEIGHTS)
    gate.send({**tensors, "norm.weight": tensors["model.norm.weight"] * 2})  # as of the model without its head
    gate.end()
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"backend": "gate"})
    reason, message = engine.failure_of("finish_weight_update")
    assert reason == "weights_invalid"
    assert "'model.norm.weight' came by its own name and by" in message


def test_a_delta_of_what_came_in_parts_is_refused(engine: Engine, gate: Gate, tmp_path: Path) -> None:
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "new"})
    name = "model.layers.0.mlp.experts.down_proj"
    gate.send({f"{name}.indices": torch.tensor([0]), f"{name}.values": torch.tensor([9.0])})
    gate.end()
    engine.result_of("update_weights", {"backend": "gate", "delta": {"base_commit": 0}})
    reason, message = engine.failure_of("finish_weight_update", None, {"partial": False})
    assert reason == "weights_invalid"
    assert f"'{name}' came by its own name and by" in message
