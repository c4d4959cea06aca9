"""Tests of ``--batch-invariant``, for an interpreter in MKL's strict mode: ``test_invariance.py`` runs them in one."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from engine.architectures import COMPAT, PAGED
from engine.harness import Engine, Result
from engine.models import CONFIGS, make_model
from rollspan import models, trainer
from rollspan.errors import RollspanError

assert os.environ.get("MKL_CBWR", "").endswith(",STRICT"), "run by test_invariance.py"


@dataclass(frozen=True)
class Case:
    """A checkpoint, the dtype that it is served in, and what makes its KV cache small."""

    path: Path
    dtype: str
    kv_cache_memory: int

    def engine(self, **changes: Any) -> Engine:
        config: dict[str, Any] = {
            "dtype": self.dtype,
            "kv_cache_memory": self.kv_cache_memory,
            "max_num_batched_tokens": 24,
            "max_num_seqs": 6,
            "max_model_len": 96,
        }
        return Engine(str(self.path), batch_invariant=True, **(config | changes))

    def trainer(self) -> PreTrainedModel:
        trainer.register()
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.path, dtype=getattr(torch, self.dtype), attn_implementation=trainer.NAME
        )
        return model.eval()


@pytest.fixture(scope="module", params=["embedded", "bfloat16", "odd_sizes"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The embedded model; two layers in bfloat16; sizes that fill no vector register, with experts and sinks."""
    if request.param == "embedded":
        return Case(models.path(), "float32", 12 * 16 * 512)
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "bfloat16":
        config = LlamaConfig(
            vocab_size=200,
            hidden_size=96,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
        make_model(directory, config)
        return Case(directory, "bfloat16", 12 * 16 * 256)
    config = PAGED["gpt_oss"]()
    config.max_position_embeddings = 512
    make_model(directory, config)
    return Case(directory, "float32", 12 * 16 * 256)


@dataclass
class Traffic:
    """Requests with what they asked for and got."""

    prompts: list[list[int]]
    params: list[dict[str, Any]]
    results: list[Result]


def send_traffic(engine: Engine, seed: int, count: int = 18) -> Traffic:
    """Random prompts, some of which share beginnings, at random times."""
    rng = random.Random(seed)
    vocabulary = engine.hello.limits.vocab_size
    shared = [rng.randrange(3, vocabulary) for _ in range(40)]
    traffic = Traffic([], [], [])
    for index in range(count):
        own = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 20))]
        prompt = shared[: rng.choice([0, 16, 33, 40])] + own
        params = {
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "seed": index,
            "logprobs": rng.choice([0, 3]),
            "prompt_logprobs": rng.choice([None, 0]),
            "max_tokens": rng.randrange(1, 28),
            "ignore_eos": True,
        }
        traffic.prompts.append(prompt)
        traffic.params.append(params)
        traffic.results.append(engine.add(f"request-{index}", prompt, **params))
        for _ in range(rng.randrange(3)):
            engine.step()
    engine.run()
    assert all(result.error is None for result in traffic.results)
    return traffic


def log_probs(result: Result) -> np.ndarray:
    """float32: of the output tokens."""
    return np.concatenate([out.new_logprobs.logprobs[:, 0] for out in result.outputs if out.new_logprobs is not None])


def prompt_log_probs(result: Result) -> np.ndarray | None:
    """float32: of the prompt tokens but the first, if they were asked for."""
    rows = [out.new_prompt_logprobs for out in result.outputs if out.new_prompt_logprobs is not None]
    return rows[0].logprobs[:, 0] if rows else None


def expected(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        return trainer.score(model, [ids], temperature=temperature or 1.0)[0].numpy()


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype == np.float32 and left.tobytes() == right.tobytes()


def test_traffic_gets_the_trainers_bits_and_those_of_a_lone_run(case: Case) -> None:
    engine = case.engine()
    traffic = send_traffic(engine, seed=1)
    assert engine.core.scheduler.num_preemptions > 0
    cached = [out.prefill_stats["num_cached_tokens"] for r in traffic.results for out in r.outputs if out.prefill_stats]
    assert any(cached), "no prompt began with cached blocks"
    model = case.trainer()
    lone = case.engine(enable_prefix_caching=False, max_num_batched_tokens=512, kv_cache_memory=1 << 20)
    for index, (prompt, params, result) in enumerate(
        zip(traffic.prompts, traffic.params, traffic.results, strict=True)
    ):
        ids = prompt + result.token_ids
        scores = expected(model, ids, params["temperature"])[len(prompt) - 1 :]
        assert same_bits(log_probs(result), scores), f"request {index} of {len(prompt)} + {len(result.token_ids)}"
        found = prompt_log_probs(result)
        if found is not None and len(prompt) > 1:
            assert same_bits(found, expected(model, prompt)), f"prompt {index}"
        alone = lone.add(f"lone-{index}", prompt, **params)
        lone.run()
        assert alone.token_ids == result.token_ids
        assert same_bits(log_probs(alone), log_probs(result))


def test_long_sequences_keep_the_promise(case: Case) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 16) for _ in range(length)] for length in (390, 290)]
    engine = case.engine(max_model_len=512, kv_cache_memory=1 << 22, max_num_batched_tokens=50)
    results = [
        engine.add(f"long-{i}", prompt, logprobs=0, max_tokens=40, ignore_eos=True, temperature=1.0, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    model = case.trainer()
    for prompt, result in zip(prompts, results, strict=True):
        assert same_bits(log_probs(result), expected(model, prompt + result.token_ids)[len(prompt) - 1 :])


def test_threads_and_block_sizes_change_no_bit(case: Case) -> None:
    runs = [send_traffic(case.engine(), seed=2, count=8)]
    runs.append(send_traffic(case.engine(block_size=32, kv_cache_memory=1 << 20), seed=2, count=8))
    threads = torch.get_num_threads()
    try:
        engine = case.engine()
        torch.set_num_threads(3)
        runs.append(send_traffic(engine, seed=2, count=8))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        for left, right in zip(runs[0].results, other.results, strict=True):
            assert left.token_ids == right.token_ids
            assert same_bits(log_probs(left), log_probs(right))


def test_new_weights_have_the_trainers_bits(case: Case, tmp_path: Path) -> None:
    model = case.trainer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    shutil.copytree(case.path, tmp_path / "next")
    model.save_pretrained(tmp_path / "next")
    engine = case.engine(weights_root=str(tmp_path), kv_cache_memory=1 << 20)
    send_traffic(engine, seed=3, count=4)
    for call in (("start_weight_update",), ("update_weights", {"path": "next"}), ("finish_weight_update", "next")):
        engine.result_of(*call)
    prompt = [5, 9, 4, 7, 7, 3]
    result = engine.add("after", prompt, logprobs=0, max_tokens=20, ignore_eos=True)
    engine.run()
    assert same_bits(log_probs(result), expected(model, prompt + result.token_ids)[len(prompt) - 1 :])


def test_raw_log_probs_are_the_trainers_at_temperature_1(case: Case) -> None:
    engine = case.engine(logprobs_mode="raw")
    prompt = [5, 9, 4, 7]
    result = engine.add("raw", prompt, logprobs=0, max_tokens=20, ignore_eos=True, temperature=1.3, top_k=5, seed=1)
    engine.run()
    assert same_bits(log_probs(result), expected(case.trainer(), prompt + result.token_ids)[len(prompt) - 1 :])


def test_padded_and_packed_batches_of_a_trainer_have_the_bits_of_single_sequences(case: Case) -> None:
    model = case.trainer()
    rng = random.Random(4)
    sequences = [[rng.randrange(3, 16) for _ in range(n)] for n in (70, 33, 5)]
    single = [expected(model, ids) for ids in sequences]
    longest = max(map(len, sequences))

    def of(logits: torch.Tensor, ids: list[int]) -> np.ndarray:
        found: np.ndarray = (
            torch.log_softmax(logits[:-1].float(), -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()
        )
        return found

    with torch.no_grad(), trainer.batch_invariant(model):
        for left in (False, True):
            pads = [longest - len(ids) for ids in sequences]
            rows = [[0] * pad + ids if left else ids + [0] * pad for ids, pad in zip(sequences, pads, strict=True)]
            mask = torch.tensor(
                [[i >= pad if left else i < longest - pad for i in range(longest)] for pad in pads]
            ).long()
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(
                input_ids=torch.tensor(rows), attention_mask=mask, position_ids=positions, use_cache=False
            ).logits
            for row, ids, pad, wanted in zip(logits, sequences, pads, single, strict=True):
                start = pad if left else 0
                assert same_bits(of(row[start : start + len(ids)], ids), wanted)
        packed = torch.tensor([[token for ids in sequences for token in ids]])
        positions = torch.cat([torch.arange(len(ids)) for ids in sequences])[None]
        logits = model(input_ids=packed, position_ids=positions, use_cache=False).logits[0]
        for part, ids, wanted in zip(logits.split([len(ids) for ids in sequences]), sequences, single, strict=True):
            assert same_bits(of(part, ids), wanted)


def test_the_server_tells_its_numbers(case: Case) -> None:
    told = case.engine().result_of("server_info")["numerics"]
    assert told["batch_invariant"] is True
    assert told["dtype"] == case.dtype
    assert told["mkl_cbwr"] == os.environ["MKL_CBWR"]
    assert told["threads"] == 1


def test_an_engine_without_the_flag_promises_nothing(case: Case) -> None:
    engine = Engine(str(case.path), dtype=case.dtype, kv_cache_memory=1 << 20, max_model_len=96)
    told = engine.result_of("server_info")["numerics"]
    assert (told["batch_invariant"], told["reason"]) == (False, "not asked for (--batch-invariant)")


def test_a_model_with_a_recurrent_state_is_refused(tmp_path: Path) -> None:
    _, config = COMPAT["mamba"]
    make_model(tmp_path / "mamba", config())
    with pytest.raises(RollspanError, match="batch_invariant cannot be kept: this model runs one sequence at a time"):
        Engine(str(tmp_path / "mamba"), batch_invariant=True, kv_cache_memory=1 << 24)


def test_a_model_whose_masks_are_of_its_own_kind_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "doge", PAGED["doge"]())
    with pytest.raises(RollspanError, match=r"cannot be kept: with the attention of rollspan\.trainer Doge"):
        Engine(str(tmp_path / "doge"), batch_invariant=True, kv_cache_memory=1 << 20)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_architecture_keeps_the_promise(kind: str, tmp_path: Path) -> None:
    tiny = make_model(tmp_path / kind, CONFIGS[kind]())
    for dtype in ("float32", "bfloat16"):
        case = Case(tiny.path, dtype, 1 << 18)
        engine = case.engine(max_model_len=64)
        model = case.trainer()
        prompts = [[5, 9, 4, 7, 30, 31, 32, 33][:n] for n in (8, 3, 1)]
        results = [
            engine.add(f"{i}", prompt, logprobs=0, max_tokens=30, ignore_eos=True, temperature=1.0, seed=i)
            for i, prompt in enumerate(prompts)
        ]
        engine.run()
        for prompt, result in zip(prompts, results, strict=True):
            assert same_bits(log_probs(result), expected(model, prompt + result.token_ids)[len(prompt) - 1 :])
