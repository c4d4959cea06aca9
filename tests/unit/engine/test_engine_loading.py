"""What the engine loads, and what it refuses: by name, in one readable line, before anything is served."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.conftest import TOKENS, References
from engine.harness import Engine
from engine.models import CONFIGS, VOCABULARY, TinyModel, make_model
from rollspan.errors import RollspanError
from rollspan.runner import loader

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(llama: TinyModel, tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be damaged."""
    return Path(shutil.copytree(llama.path, tmp_path / "checkpoint"))


def refusal(path: Path | str, **config: Any) -> str:
    """The message with which loading is refused; always one line, with the reason that belongs to models."""
    with pytest.raises(RollspanError) as caught:
        Engine(str(path), **config)
    assert caught.value.reason == "weights_invalid"
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600
    return caught.value.message


def configure(checkpoint: Path, **values: Any) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def replace_tensors(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_in_half_precision_loads_and_generates(llama: TinyModel, dtype: str) -> None:
    engine = Engine(llama, dtype=dtype)
    assert engine.hello.model.dtype == dtype
    result = engine.generate([(1, 2, 3)], max_tokens=8)[0]
    assert len(result.token_ids) == 8
    assert result.error is None


def test_a_checkpoint_keeps_its_own_dtype_unless_told_otherwise(llama: TinyModel, tmp_path: Path) -> None:
    copy.deepcopy(llama.model).to(torch.bfloat16).save_pretrained(tmp_path)
    assert Engine(str(tmp_path)).hello.model.dtype == "bfloat16"
    assert Engine(str(tmp_path), dtype="float32").hello.model.dtype == "float32"


def test_a_sharded_checkpoint_loads(
    tmp_path: Path, tiny: Callable[[str], TinyModel], references: Callable[[str], References]
) -> None:
    tiny("qwen2").model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).is_file()
    results = Engine(str(tmp_path)).generate(list(references("qwen2")), max_tokens=TOKENS)
    assert [result.token_ids for result in results] == list(references("qwen2").values())


def test_the_hello_tells_what_is_served(llama: TinyModel) -> None:
    hello = Engine(llama, block_size=4, num_blocks=32, max_logprobs=7, weight_version="first", engine_index=2).hello
    assert (hello.model.name, hello.model.architecture, hello.model.device) == ("llama", "LlamaForCausalLM", "cpu")
    assert hello.model.num_parameters == sum(parameter.numel() for parameter in llama.model.parameters())
    limits = hello.limits
    assert (limits.vocab_size, limits.max_model_len, limits.block_size) == (VOCABULARY, 64, 4)
    assert (limits.num_blocks, limits.max_logprobs, hello.engine_index) == (32, 7, 2)
    assert (hello.weight_version, hello.weight_commit, hello.paused) == ("first", 0, False)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([3, 5], 7, [3, 5]),
        (None, 7, [7]),
        (None, [9, 7], [9, 7]),
        (None, None, []),
        (None, -1, []),
        ([VOCABULARY, 4], 7, [4]),
    ],
)
def test_eos_ids_come_from_the_generation_config_first_and_lie_in_the_vocabulary(
    checkpoint: Path, generation: Any, config: Any, expected: list[int]
) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    configure(checkpoint, eos_token_id=config)
    assert Engine(str(checkpoint)).hello.model.eos_token_ids == expected


def test_a_model_whose_tokens_see_later_ones_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    make_model(tmp_path, config)
    assert "BertLMHeadModel computes other logits than with its own attention" in refusal(tmp_path)


def test_a_model_that_cannot_generate_by_itself_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.xLSTMConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_heads=2, num_hidden_layers=2, num_blocks=2
    )
    make_model(tmp_path, config)
    assert "xLSTMForCausalLM" in refusal(tmp_path)


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert refusal(tmp_path) == "T5Config is an encoder-decoder model; only decoders are supported"


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == f"model '{tmp_path}/nowhere' is no directory with a config.json"
    assert "is no directory with a config.json" in refusal("")


@pytest.mark.parametrize("text", [b"{", b"[]", b"null", b"\xff\x00", b"{}", b"[" * 100_000])
def test_a_broken_config_is_refused(checkpoint: Path, text: bytes) -> None:
    (checkpoint / "config.json").write_bytes(text)
    assert f"model '{checkpoint}' cannot be loaded" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "nonesuch"),
        ("num_attention_heads", 0),
        ("hidden_size", "wide"),
        ("hidden_size", -4),
        ("hidden_act", "nonesuch"),
        ("dtype", "float99"),
        ("eos_token_id", "end"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ],
)
def test_a_config_with_impossible_values_is_refused(checkpoint: Path, field: str, value: object) -> None:
    configure(checkpoint, **{field: value})
    assert f"model '{checkpoint}' cannot be loaded" in refusal(checkpoint)


def test_code_that_comes_with_a_checkpoint_is_refused_without_asking(
    checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    configure(checkpoint, model_type="nonesuch", auto_map={"AutoConfig": "code.Config"})
    (checkpoint / "code.py").write_text("raise SystemExit('executed')")
    assert "custom code" in refusal(checkpoint)
    assert "[y/N]" not in capfd.readouterr().out


@pytest.mark.parametrize("data", [b"", b"junk", b"\xff" * 64])
def test_broken_safetensors_are_refused(checkpoint: Path, data: bytes) -> None:
    (checkpoint / WEIGHTS).write_bytes(data)
    assert "SafetensorError" in refusal(checkpoint)


def test_truncated_safetensors_are_refused(checkpoint: Path) -> None:
    data = (checkpoint / WEIGHTS).read_bytes()
    (checkpoint / WEIGHTS).write_bytes(data[:-1])
    assert "SafetensorError" in refusal(checkpoint)


def test_weights_as_pickles_are_refused(checkpoint: Path) -> None:
    torch.save(load_file(checkpoint / WEIGHTS), checkpoint / "pytorch_model.bin")
    (checkpoint / WEIGHTS).unlink()
    assert "no file named model.safetensors" in refusal(checkpoint)


def test_a_missing_shard_is_refused(checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": "gone.safetensors"}}))
    assert "gone.safetensors" in refusal(checkpoint)


def test_missing_tensors_are_refused_by_name(checkpoint: Path) -> None:
    replace_tensors(checkpoint, lambda tensors: tensors.pop("model.norm.weight"))
    assert refusal(checkpoint) == f"model '{checkpoint}' has missing tensors: model.norm.weight"


def test_tensors_of_a_wrong_shape_are_refused_by_name(checkpoint: Path) -> None:
    replace_tensors(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))
    expected = f"model '{checkpoint}' has tensors of a wrong shape: model.norm.weight [31] instead of [32]"
    assert refusal(checkpoint) == expected


def test_weights_that_are_not_finite_are_refused(checkpoint: Path) -> None:
    replace_tensors(checkpoint, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    assert refusal(checkpoint) == "LlamaForCausalLM computes logits that are not finite: its weights may be damaged"


@pytest.mark.parametrize(
    ("config", "param", "message"),
    [
        ({"max_model_len": 65}, "max_model_len", "max_model_len must be at most the model's 64, got 65"),
        ({"num_blocks": 3}, "kv_cache_memory", "give more with --kv-cache-memory or lower --max-model-len"),
    ],
)
def test_a_configuration_that_the_model_cannot_serve_names_the_field(
    llama: TinyModel, config: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RollspanError) as caught:
        Engine(llama, **config)
    assert message in caught.value.message
    assert caught.value.param == param


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_does_not_exist_is_refused(llama: TinyModel) -> None:
    with pytest.raises(RollspanError, match="device cuda:3 does not exist on this machine"):
        Engine(llama, device="cuda:3")


def test_all_tiny_models_of_these_tests_load(tiny: Callable[[str], TinyModel]) -> None:
    architectures = {Engine(tiny(kind)).hello.model.architecture for kind in CONFIGS}
    assert len(architectures) == len(CONFIGS)


def test_a_long_load_is_reported_once_a_second_and_a_short_one_not_at_all(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(loader.time, "monotonic", lambda: now)
    (checkpoint / WEIGHTS).write_bytes(b"")
    os.truncate(checkpoint / WEIGHTS, 5_000_000_000)
    caplog.set_level("INFO", logger="rollspan.engine")
    with loader.Progress(checkpoint) as progress:
        for _ in progress.over(range(3), "read"):
            now += 0.5
        assert not caplog.records
        for _ in progress.over(range(8), "copied"):
            now += 0.5
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 12 % of 5.0 GB copied, 2 s",
        "loading weights: 37 % of 5.0 GB copied, 3 s",
        "loading weights: 62 % of 5.0 GB copied, 4 s",
        "loading weights: 87 % of 5.0 GB copied, 5 s",
    ]
