"""An engine that was updated is one that has loaded those weights: every token and log-prob to the bit, in every way.

Half of the models have tied embeddings and bfloat16 weights, which the engine keeps repacked for its matrix products
besides, where the CPU has some for them; the copies have to change with the weights and not a step earlier or later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollspan.digest import weight_digest
from rollspan.kernels.linear import packs
from rollspan.llm import LLM
from rollspan.sampling_params import SamplingParams

FILE = "model.safetensors"
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
_random = random.Random(7)
PROMPTS = [[_random.randrange(96) for _ in range(length)] for length in (40, 3, 17, *[5] * 21)]
Tensors = dict[str, torch.Tensor]
Said = list[tuple[list[int], list[float]]]


@dataclass
class Ground:
    """Checkpoints ``a``, ``b`` and ``mixed`` (``b`` with the attention of ``a``), and what engines of them say."""

    root: Path
    tensors: dict[str, Tensors]
    said: dict[str, Said]

    def save(self, name: str, tensors: Tensors) -> str:
        """A directory of tensors under the root."""
        (self.root / name).mkdir(exist_ok=True)
        save_file(tensors, self.root / name / FILE)
        return name


def say(llm: LLM) -> Said:
    """What it says to one prompt alone, and to many at once: products of few rows and of many are different code."""
    outputs = [*llm.generate(PROMPTS[:1], GREEDY), *llm.generate(PROMPTS, GREEDY)]
    said = []
    for output in outputs:
        (sequence,) = output.outputs
        assert sequence.logprobs is not None
        chosen = [entry[token].logprob for entry, token in zip(sequence.logprobs, sequence.token_ids, strict=True)]
        said.append((list(sequence.token_ids), chosen))
    return said


def load(ground: Ground, name: str) -> LLM:
    return LLM(ground.root / name, weights_root=str(ground.root), kv_cache_memory=1 << 24, num_threads=1)


def attention(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".self_attn." in name}


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def ground(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """Everything of one dtype."""
    dtype: str = request.param
    made = Ground(tmp_path_factory.mktemp(dtype), {}, {})
    config = transformers.Qwen2Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=dtype == "bfloat16",
        bos_token_id=None,
        eos_token_id=None,
        dtype=dtype,
    )
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for parameter in model.parameters():  # biases begin as zeros, which would prove nothing of them
            torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(made.root / name)
        made.tensors[name] = load_file(made.root / name / FILE)
    made.tensors["mixed"] = made.tensors["b"] | attention(made.tensors["a"])
    made.save("mixed", made.tensors["mixed"])
    config.save_pretrained(made.root / "mixed")
    for name in made.tensors:
        with load(made, name) as llm:
            made.said[name] = say(llm)
    assert made.said["a"] != made.said["b"] != made.said["mixed"]
    return made


@pytest.fixture(scope="module")
def shared(ground: Ground) -> Iterator[LLM]:
    with load(ground, "a") as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM, ground: Ground) -> LLM:
    """Has the weights of ``a``, by an update."""
    staged(shared, ground, "a")
    assert say(shared) == ground.said["a"]
    return shared


def staged(llm: LLM, ground: Ground, name: str, **options: Any) -> None:
    llm.start_weight_update()
    llm.update_weights({"path": name})
    llm.finish_weight_update(name, digest=weight_digest(ground.tensors[name]), **options)


def prepared(llm: LLM, ground: Ground, name: str) -> None:
    """Verified and repacked first, generation goes on, then the swap."""
    llm.start_weight_update()
    llm.update_weights({"path": name})
    assert llm.prepare_weight_update() == weight_digest(ground.tensors[name])
    assert say(llm) == ground.said["a"]
    llm.finish_weight_update(name)


def in_pieces(llm: LLM, ground: Ground, name: str) -> None:
    """Prepared when half of it was there, and again with the other half."""
    tensors = ground.tensors[name]
    names = sorted(tensors)
    llm.start_weight_update()
    for start in (0, 1):
        llm.update_weights({"path": ground.save(f"half-{start}", {key: tensors[key] for key in names[start::2]})})
        llm.prepare_weight_update(partial=True)
    assert say(llm) == ground.said["a"]
    llm.finish_weight_update(name)


def in_place(llm: LLM, ground: Ground, name: str) -> None:
    llm.pause_generation("keep")
    llm.start_weight_update("in_place")
    llm.update_weights({"path": name})
    llm.finish_weight_update(name, digest=weight_digest(ground.tensors[name]))
    llm.resume_generation()


def by_delta(llm: LLM, ground: Ground, name: str) -> None:
    """The elements that differ."""
    pairs: Tensors = {}
    for key, tensor in ground.tensors[name].items():
        new, old = tensor.flatten(), ground.tensors["a"][key].flatten()
        pairs[f"{key}.indices"] = where = (new != old).nonzero().flatten()
        pairs[f"{key}.values"] = new[where]
    llm.start_weight_update()
    llm.update_weights({"path": ground.save("delta", pairs), "delta": {"base_digest": llm.get_weight_digest()}})
    llm.finish_weight_update(name, digest=weight_digest(ground.tensors[name]))


def after_a_failure(llm: LLM, ground: Ground, name: str) -> None:
    """Others are prepared and dropped before."""
    llm.start_weight_update()
    llm.update_weights({"path": "mixed"})
    llm.prepare_weight_update()
    assert llm.abort_weight_update()
    assert say(llm) == ground.said["a"]
    staged(llm, ground, name)


def asleep(llm: LLM, ground: Ground, name: str) -> None:
    """The weights are dropped, and come before the cache is back."""
    llm.sleep(2)
    llm.wake_up(["weights"])
    staged(llm, ground, name)
    llm.wake_up()


WAYS: list[Callable[[LLM, Ground, str], None]] = [
    staged,
    prepared,
    in_pieces,
    in_place,
    by_delta,
    after_a_failure,
    asleep,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whole_weights(llm: LLM, ground: Ground, way: Callable[[LLM, Ground, str], None]) -> None:
    way(llm, ground, "b")
    assert say(llm) == ground.said["b"]


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_part_of_the_weights(llm: LLM, ground: Ground, mode: str) -> None:
    staged(llm, ground, "b")
    llm.pause_generation("keep")
    llm.start_weight_update(mode)
    llm.update_weights({"path": ground.save("attention", attention(ground.tensors["a"]))})
    llm.finish_weight_update(partial=True, digest=weight_digest(ground.tensors["mixed"]))
    llm.resume_generation()
    assert say(llm) == ground.said["mixed"]


def test_a_light_sleep_changes_nothing(llm: LLM, ground: Ground) -> None:
    llm.sleep(1)
    llm.wake_up()
    assert say(llm) == ground.said["a"]


def test_the_repacked_copies_are_under_test(llm: LLM, ground: Ground) -> None:
    repacked = llm.server_info()["derived_weight_bytes"]
    assert bool(repacked) == packs(ground.tensors["a"]["model.norm.weight"].dtype)
