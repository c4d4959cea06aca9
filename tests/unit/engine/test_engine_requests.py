"""The life of a request: admission, stops, limits, refusals, aborts, failures, and what its outputs say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.harness import Engine
from engine.models import VOCABULARY, TinyModel
from rollspan.protocol.messages import EngineCoreRequest, FinishReason
from rollspan.sampling_params import SamplingParams

PROMPT = (5, 6, 7)


@pytest.fixture
def greedy(llama: TinyModel) -> list[int]:
    """What the tiny Llama says after PROMPT."""
    return llama.generate(list(PROMPT), 12)[0]


def test_every_token_comes_with_a_label_and_commit_and_the_first_and_last_output_with_the_admission(
    engine: Engine,
) -> None:
    result = engine.generate([PROMPT], max_tokens=4)[0]
    assert result.stamps == [("default", 0)] * 4
    assert [output.admission for output in result.outputs] == [("default", 0), None, None, ("default", 0)]
    assert result.outputs[0].prefill_stats is not None
    assert result.outputs[0].prefill_stats["num_prompt_tokens"] == 3
    assert result.outputs[1].prefill_stats is None


def test_max_tokens_ends_an_output_with_length(engine: Engine, greedy: list[int]) -> None:
    for count in (1, 5):
        result = engine.generate([PROMPT], max_tokens=count)[0]
        assert (result.token_ids, result.finish_reason) == (greedy[:count], FinishReason.LENGTH)
        assert result.stop_reason is None


def test_the_models_length_ends_an_output(engine: Engine) -> None:
    longest = engine.hello.limits.max_model_len
    result = engine.generate([PROMPT])[0]
    assert (len(result.token_ids), result.finish_reason) == (longest - 3, FinishReason.LENGTH)
    prompt = [1] * (longest - 1)
    for max_tokens in (None, 1, 10**9):
        wire = EngineCoreRequest(f"wire-{max_tokens}", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        unresolved = engine.send(wire)
        engine.run()
        assert (len(unresolved.token_ids), unresolved.finish_reason) == (1, FinishReason.LENGTH)


def test_a_stop_token_ends_the_output_is_part_of_it_and_is_the_reason(engine: Engine, greedy: list[int]) -> None:
    stop = greedy[3]
    end = greedy.index(stop) + 1
    result = engine.generate([PROMPT], stop_token_ids=[stop, 90], max_tokens=12)[0]
    assert result.token_ids == greedy[:end]
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)


def end_of_sequence(engine: Engine, token: int, further: int | None = None) -> None:
    """Makes the engine's hello name EOS ids, which the model on disk has none of."""
    engine.hello.model.eos_token_ids[:] = [token] if further is None else [further, token]


def test_eos_ends_the_output_without_a_stop_reason_unless_it_is_ignored(engine: Engine, greedy: list[int]) -> None:
    end_of_sequence(engine, greedy[2])
    end = greedy.index(greedy[2]) + 1
    result, ignoring = engine.generate([PROMPT], max_tokens=12)[0], engine.generate([PROMPT], ignore_eos=True)[0]
    assert (result.token_ids, result.finish_reason, result.stop_reason) == (greedy[:end], FinishReason.STOP, None)
    assert ignoring.token_ids[:12] == greedy


def test_a_further_eos_id_ends_the_output_as_a_stop_token_does(engine: Engine, greedy: list[int]) -> None:
    end_of_sequence(engine, greedy[2], further=VOCABULARY - 1 if VOCABULARY - 1 not in greedy else VOCABULARY - 2)
    result = engine.generate([PROMPT], max_tokens=12)[0]
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, greedy[2])


def test_min_tokens_keeps_stop_tokens_out_until_enough_tokens_are_out(engine: Engine, greedy: list[int]) -> None:
    stop = greedy[0]
    result = engine.generate([PROMPT], stop_token_ids=[stop], min_tokens=6, max_tokens=30)[0]
    assert stop not in result.token_ids[:6]
    assert len(result.token_ids) >= 6


def test_a_seeded_request_gives_the_same_tokens_whatever_runs_beside_it(llama: TinyModel) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 10}
    alone = [Engine(llama).generate([PROMPT], seed=seed, **params)[0].token_ids for seed in range(3)]
    assert len({tuple(tokens) for tokens in alone}) == 3
    crowded = Engine(llama, block_size=4, num_blocks=30, max_num_batched_tokens=11, max_num_seqs=5)
    others = [crowded.add(f"x{i}", [i + 1] * (3 * i + 1), temperature=1.5, max_tokens=9) for i in range(6)]
    found = []
    for seed in reversed(range(3)):
        found.append(crowded.add(f"s{seed}", PROMPT, seed=seed, **params))
        crowded.step()
    crowded.run()
    assert [result.token_ids for result in reversed(found)] == alone
    assert all(len(result.token_ids) == 9 for result in others)


def test_requests_without_a_seed_differ_unless_the_engine_has_one(llama: TinyModel) -> None:
    def sample(**config: Any) -> list[list[int]]:
        results = Engine(llama, **config).generate([PROMPT] * 3, temperature=2.0, max_tokens=8)
        return [result.token_ids for result in results]

    assert sample() != sample()
    first = sample(seed=7)
    assert first == sample(seed=7)
    assert len({tuple(tokens) for tokens in first}) == 3


def test_logprobs_are_those_of_the_models_own_logits(llama: TinyModel) -> None:
    engine = Engine(llama, max_logprobs=VOCABULARY)
    result = engine.generate([PROMPT], max_tokens=6, logprobs=-1)[0]
    logits = llama.logits([*PROMPT, *result.token_ids])
    for place, output in enumerate(result.outputs):
        expected = torch.log_softmax(logits[len(PROMPT) - 1 + place], dim=-1)
        found = output.new_logprobs
        assert found is not None
        assert found.token_ids.shape == (1, VOCABULARY + 1)
        assert found.token_ids[0, 0] == result.token_ids[place]
        np.testing.assert_allclose(found.logprobs[0], expected.numpy()[found.token_ids[0]], atol=1e-4)
        assert found.sampled_ranks.tolist() == [1]


def test_the_engine_reports_raw_logprobs_when_configured_to(llama: TinyModel) -> None:
    params: dict[str, Any] = {"temperature": 0.5, "seed": 1, "max_tokens": 1, "logprobs": 0}
    values = {}
    for mode in ("raw", "processed"):
        output = Engine(llama, logprobs_mode=mode).generate([PROMPT], **params)[0].outputs[0]
        assert output.new_logprobs is not None
        values[mode] = (output.new_token_ids[0], float(output.new_logprobs.logprobs[0, 0]))
    logits = llama.logits(list(PROMPT))[-1]
    token = values["raw"][0]
    assert values["raw"][1] == pytest.approx(float(torch.log_softmax(logits, -1)[token]), abs=1e-4)
    assert values["processed"] == (token, pytest.approx(float(torch.log_softmax(logits / 0.5, -1)[token]), abs=1e-4))


@pytest.mark.parametrize(
    ("prompt", "code", "text"),
    [
        ([], "validation_error", "prompt_token_ids must be a non-empty list of integers from 0 to 95"),
        ([1, VOCABULARY], "validation_error", "prompt_token_ids must be a non-empty list of integers from 0 to 95"),
        ([1] * 64, "prompt_too_long", "prompt_token_ids must hold at most 63 tokens, got 64"),
    ],
)
def test_a_prompt_that_cannot_be_run_ends_its_request_only(
    engine: Engine, greedy: list[int], prompt: list[int], code: str, text: str
) -> None:
    good = engine.add("good", PROMPT, max_tokens=12)
    bad = engine.send(EngineCoreRequest("bad", prompt, SamplingParams(max_tokens=2)))
    engine.run()
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error is not None
    assert (bad.error.code, bad.error.message, bad.error.retryable) == (code, text, False)
    assert good.token_ids == greedy


@pytest.mark.parametrize(
    ("params", "path"),
    [
        ({"n": 2}, "n"),
        ({"stop_token_ids": (VOCABULARY,)}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"min_tokens": 1, "max_tokens": 4, "all_stop_token_ids": tuple(range(VOCABULARY))}, "min_tokens"),
    ],
)
def test_parameters_that_the_model_cannot_satisfy_end_the_request_naming_the_field(
    engine: Engine, params: dict[str, Any], path: str
) -> None:
    bad = engine.send(EngineCoreRequest("bad", [1], SamplingParams(**params)))
    engine.run()
    assert bad.error is not None
    assert bad.error.code == "validation_error"
    assert f"sampling_params.{path} must be" in bad.error.message


def test_an_id_that_is_in_use_is_refused_and_the_first_request_goes_on(engine: Engine, greedy: list[int]) -> None:
    first = engine.add("same", PROMPT, max_tokens=12)
    engine.step()
    second = engine.add("same", [1], client=1, max_tokens=2)
    engine.run()
    assert second.error is not None
    assert second.error.code == "duplicate_request_id"
    assert second.error.message == 'request id "same" is in use'
    assert first.token_ids == greedy
    assert engine.generate([PROMPT], max_tokens=2)[0].token_ids == greedy[:2]
    assert engine.add("same", PROMPT, max_tokens=1).error is None


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_says_nothing_more_and_its_neighbour_nothing_less(
    engine: Engine, greedy: list[int], steps: int
) -> None:
    gone, stays = engine.add("gone", [9, 9], max_tokens=20), engine.add("stays", PROMPT, max_tokens=12)
    for _ in range(steps):
        engine.step()
    before = len(gone.outputs)
    engine.core.abort_requests(["gone", "unknown", "gone"])
    engine.run()
    assert len(gone.outputs) == before
    assert gone.finish_reason is None
    assert stays.token_ids == greedy


def damage(llama: TinyModel, engine: Engine, token: int, value: float) -> None:
    """Loads weights under which ``token``'s embedding, and so every sequence that holds it, is not finite."""
    for parameter in engine.parameters("model.embed_tokens.weight"):
        parameter.data = parameter.data.clone()
        parameter.data[token] = value


def test_logits_that_are_not_finite_end_only_the_requests_that_have_them(
    engine: Engine, llama: TinyModel, greedy: list[int]
) -> None:
    poison = next(token for token in range(VOCABULARY) if token not in greedy and token not in PROMPT)
    damage(llama, engine, poison, float("nan"))
    good, bad = engine.add("good", PROMPT, max_tokens=12), engine.add("bad", [1, poison, 2], max_tokens=12, seed=1)
    engine.run()
    assert good.token_ids == greedy
    assert (bad.finish_reason, bad.token_ids) == (FinishReason.ERROR, [])
    assert bad.error is not None
    assert bad.error.code == "nan_logits"
    assert bad.admissions == [("default", 0)]
    assert "default" in bad.error.message


def test_a_cache_that_held_values_which_are_not_finite_serves_the_next_request_as_if_new(
    llama: TinyModel, greedy: list[int]
) -> None:
    engine = Engine(llama, block_size=4, num_blocks=16)
    poison = next(token for token in range(VOCABULARY) if token not in greedy and token not in PROMPT)
    damage(llama, engine, poison, float("inf"))
    engine.generate([(poison,) * 50], max_tokens=3)
    assert engine.generate([PROMPT, (8, 9)], max_tokens=12)[0].token_ids == greedy


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(
    engine: Engine, greedy: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    engine.add("before", PROMPT, max_tokens=12)
    engine.step()
    with engine.broken_model("no such kernel"), caplog.at_level(logging.CRITICAL, "rollspan.engine"):
        engine.add("beside", [1, 2], max_tokens=3)
        engine.step()
    for name in ("before", "beside"):
        result = engine.results[name]
        assert result.finish_reason is FinishReason.ERROR
        assert result.error is not None
        assert result.error.code == "engine_error"
        assert "no such kernel" in result.error.message
        assert result.admissions[-1] == ("default", 0)
    assert engine.generate([PROMPT], max_tokens=12)[0].token_ids == greedy


def test_each_client_gets_the_outputs_of_its_own_requests_and_all_get_the_state(engine: Engine) -> None:
    engine.core.add_client(1)
    engine.core.add_client(2)
    engine.add("a", PROMPT, client=1, max_tokens=2)
    engine.add("b", PROMPT, client=2, max_tokens=3)
    owners: dict[str, set[int]] = {}
    while engine.core.has_work():
        for client, message in engine.step():
            for output in message.outputs:
                owners.setdefault(output.request_id, set()).add(client)
    assert owners == {"a": {1}, "b": {2}}
    assert set(engine.stats) == {0, 1, 2}


def test_a_client_that_leaves_takes_its_requests_along_and_no_others(engine: Engine, greedy: list[int]) -> None:
    engine.core.add_client(1)
    mine, other = engine.add("mine", PROMPT, client=1, max_tokens=12), engine.add("other", PROMPT, max_tokens=12)
    engine.step()
    engine.core.remove_client(1)
    said = len(mine.outputs)
    engine.run()
    assert len(mine.outputs) == said
    assert other.token_ids == greedy


def test_lower_priority_values_are_served_first(llama: TinyModel) -> None:
    engine = Engine(llama, max_num_seqs=1, max_num_batched_tokens=64)
    order: list[str] = []
    for name, priority in (("first", 0), ("low", 5), ("high", -5), ("middle", 0)):
        engine.add(name, PROMPT, max_tokens=2, priority=priority)
        engine.step() if name == "first" else None
    while engine.core.has_work():
        engine.step()
        order += [name for name, result in engine.results.items() if result.finish_reason and name not in order]
    assert order == ["first", "high", "middle", "low"]


def test_the_state_is_reported_while_requests_run_and_when_the_last_has_ended(engine: Engine) -> None:
    engine.generate([PROMPT, PROMPT], max_tokens=3)
    stats = engine.stats[0]
    assert stats[0]["num_running_reqs"] + stats[0]["num_waiting_reqs"] > 0
    last = stats[-1]
    assert (last["num_running_reqs"], last["num_waiting_reqs"], last["kv_cache_usage"]) == (0, 0, 0.0)
    assert last["paused"] is False


def test_a_prompt_of_any_token_ids_and_any_length_is_served(tiny: Callable[[str], TinyModel]) -> None:
    engine = Engine(tiny("gpt2"), max_num_batched_tokens=10, max_num_seqs=3)
    prompts = [(token,) * length for token in (0, VOCABULARY - 1) for length in (1, 9, 10, 11, 62, 63)]
    results = engine.generate(prompts, max_tokens=5)
    assert [len(result.token_ids) for result in results] == [min(5, 64 - len(prompt)) for prompt in prompts]
