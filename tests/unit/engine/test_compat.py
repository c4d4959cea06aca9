"""The compat runner keeps one sequence's memory from another's, and no longer than the request lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.architectures import COMPAT
from engine.harness import Engine
from engine.models import VOCABULARY, TinyModel, decisive_prompts, make_model
from rollspan.errors import RollspanError
from rollspan.runner.compat import CompatRunner

TOKENS = 6
#: One for each way in which a sequence goes on.
KINDS = ["qwen3_next", "jamba", "recurrent_gemma"]


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> TinyModel:
    return make_model(tmp_path, COMPAT[request.param][1]())


def start(model: TinyModel, **config: Any) -> Engine:
    return Engine(str(model.path), **{"block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 4, **config})


def remembered(engine: Engine) -> set[str]:
    runner = engine.core._runner
    assert isinstance(runner, CompatRunner)
    return {request.request_id for request in runner._sequences}


def test_preempted_sequences_are_computed_again(model: TinyModel) -> None:
    expected = decisive_prompts(model, count=4, tokens=TOKENS)
    engine = start(model)
    results = [engine.add(f"r{i}", prompt, max_tokens=TOKENS) for i, prompt in enumerate(expected)]
    while engine.core.has_work():
        engine.step()
        engine.step()
        engine.result_of("pause_generation", "keep", True)
        engine.result_of("resume_scheduler")
        for _ in range(20):
            engine.step()
    assert [result.token_ids for result in results] == list(expected.values())


def test_what_is_remembered_of_ended_requests_is_dropped(model: TinyModel) -> None:
    engine = start(model)
    for name in ("short", "aborted", "long"):
        engine.add(name, (1, 2, 3), max_tokens=1 if name == "short" else 30)
    engine.step()
    engine.step()
    assert remembered(engine) == {"aborted", "long"}
    engine.core.abort_requests(["aborted"])
    engine.step()
    assert remembered(engine) == {"long"}


def test_a_step_that_fails_costs_only_its_requests(model: TinyModel) -> None:
    engine = start(model)
    failed = engine.add("failed", (4, 5, 6), max_tokens=TOKENS)
    engine.step()
    with engine.broken_model("out of order"):
        engine.step()
    assert failed.error is not None
    expected = decisive_prompts(model, count=2, tokens=TOKENS)
    results = engine.generate(list(expected), max_tokens=TOKENS)
    assert [result.token_ids for result in results] == list(expected.values())
    assert "failed" not in remembered(engine)


def test_prompt_logprobs_are_those_of_a_plain_forward(model: TinyModel) -> None:
    prompt = tuple((5 * i + 3) % VOCABULARY for i in range(21))
    engine = start(model)
    found = engine.generate([prompt], max_tokens=1, prompt_logprobs=0)[0].outputs[0].new_prompt_logprobs
    assert found is not None
    own = model.model.from_pretrained(model.path)  # with the attention that transformers chooses
    with torch.inference_mode():
        logits = own(torch.tensor([prompt]), use_cache=False).logits[0]
    expected = torch.log_softmax(logits, dim=-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs[:, 0]), expected, atol=1e-4, rtol=0)


def test_the_log_and_the_engine_say_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = start(make_model(tmp_path, COMPAT["jamba"][1]()))
    reason = "JambaForCausalLM has layers of type linear_attention"
    facts = engine.core.facts()
    assert (facts["runner"], facts["runner_reason"]) == ("compat", reason)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("rollspan")]
    assert messages == [f"{reason}: it runs in the compat runner, one sequence at a time, token by token; that is slow"]
    assert capfd.readouterr().err.count("fast path") == 0


@pytest.mark.parametrize("sequences", [1, 4])
def test_room_is_kept_for_the_memory_of_as_many_sequences_as_may_run(sequences: int, tmp_path: Path) -> None:
    make_model(tmp_path, COMPAT["mamba"][1]())
    config: dict[str, Any] = {"kv_cache_memory": 9000, "max_num_seqs": sequences}
    if sequences == 1:
        assert Engine(str(tmp_path), **config).hello.limits.num_blocks > 0
    else:
        with pytest.raises(RollspanError, match="lower --max-model-len or --max-num-seqs"):
            Engine(str(tmp_path), **config)
