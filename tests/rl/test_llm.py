"""LLM in process: one forward pass at a time, so that each boundary is known in advance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from counting_model import Checkpoints, tensors, write
from counting_oracle import assert_cover

from rollspan.admission import Prompt
from rollspan.errors import RollspanError
from rollspan.llm import LLM
from rollspan.outputs import RequestOutput
from rollspan.provenance import Provenance
from rollspan.sampling_params import RequestOutputKind, SamplingParams

DELTA = RequestOutputKind.DELTA
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(checkpoints: Checkpoints) -> Iterator[LLM]:
    with LLM(
        checkpoints.emitting(1), weights_root=str(checkpoints.root), kv_cache_memory=1 << 24, num_threads=1
    ) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """Emits token 1 under the label "one"."""
    shared.start_weight_update()
    shared.update_weights({"path": "emits-1"})
    shared.finish_weight_update("one")
    yield shared
    shared.resume_generation()
    shared.abort()
    while shared.has_unfinished_requests():
        shared.step()


def emit_two(llm: LLM, checkpoints: Checkpoints, label: str = "two") -> dict[str, object]:
    llm.start_weight_update()
    llm.update_weights({"path": str(checkpoints.emitting(2))})
    return llm.finish_weight_update(label)


def test_a_batch_comes_back_in_the_order_of_its_prompts(llm: LLM) -> None:
    prompts: list[Prompt] = [[5], [6, 7], {"prompt_token_ids": [8, 9, 10]}]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[5], [6, 7], [8, 9, 10]]
    for output in outputs:
        assert output.finished
        assert output.outputs[0].token_ids == [1] * 6
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].weight_versions == [{"version": "one", "start": 0, "end": 6}]
        assert (output.weight_version, output.weight_commit) == ("one", llm.get_weight_commit())


def test_a_batch_can_bound_its_weights_and_tell_whose_its_kv_is(llm: LLM) -> None:
    commit = llm.get_weight_commit()
    asked = Provenance(min_weight_commit=commit, return_kv_versions=True)
    [output] = llm.generate([5, 6], GREEDY, provenance=asked)
    kv = [{"version": "one", "commit": commit, "start": 0, "end": 7}]
    assert output.outputs[0].kv_versions == [{"start": 0, "end": 6, "kv": kv}]
    with pytest.raises(RollspanError, match="the request does not wait") as refusal:
        llm.generate([5, 6], GREEDY, provenance=Provenance(min_weight_commit=commit + 1))
    assert refusal.value.reason == "stale_weights"


def test_a_batch_waits_no_longer_than_it_may_for_an_open_update(llm: LLM) -> None:
    llm.start_weight_update()
    asked = Provenance(min_weight_commit=llm.get_weight_commit() + 1, weight_wait_s=0.02)
    with pytest.raises(RollspanError, match="its time to wait is over") as refusal:
        llm.generate([[5], [6]], GREEDY, provenance=asked)
    assert refusal.value.reason == "stale_weights"
    assert llm.abort_weight_update()


def test_a_single_prompt_and_parameters_for_each_are_accepted(llm: LLM) -> None:
    assert len(llm.generate([5, 6, 7], GREEDY)) == 1
    assert llm.generate([]) == []
    each = [SamplingParams(max_tokens=number, n=number, ignore_eos=True) for number in (1, 2)]
    outputs = llm.generate([[5], [6]], each)
    assert [len(output.outputs) for output in outputs] == [1, 2]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2]
    with pytest.raises(RollspanError, match="one for each of the 2"):
        llm.generate([[5], [6]], each[:1])


def test_an_update_lands_between_two_known_tokens(llm: LLM, checkpoints: Checkpoints) -> None:
    commit = llm.get_weight_commit()
    llm.add_request([5], SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, output_kind=DELTA), "mine")
    merged = one_step(llm)
    for _ in range(9):
        merged.add(one_step(llm), aggregate=True)
    before = len(merged.outputs[0].token_ids)
    assert merged.outputs[0].token_ids == [1] * before
    answer = emit_two(llm, checkpoints)
    digest = answer.pop("weight_digest")
    assert answer == {"weight_version": "two", "weight_commit": commit + 1}
    assert isinstance(digest, str)
    assert digest.startswith("blake3:")
    while not merged.finished:
        merged.add(one_step(llm), aggregate=True)
        if len(merged.outputs[0].token_ids) > 30:
            llm.abort("mine")
    (only,) = merged.outputs
    assert_cover([dict(span) for span in only.weight_versions or []], "version", len(only.token_ids))
    boundary = (only.weight_versions or [])[0]["end"]
    assert only.token_ids == [1] * boundary + [2] * (len(only.token_ids) - boundary)
    # Steps go on while the calls wait for what the worker does with the weights.
    assert before <= boundary < len(only.token_ids)
    assert (merged.weight_version, merged.weight_commit) == ("one", commit)
    assert only.finish_reason == "abort"


def one_step(llm: LLM) -> RequestOutput:
    (output,) = llm.step()
    return output


def test_while_paused_generate_refuses_instead_of_hanging(llm: LLM) -> None:
    for mode in ("keep", "abort"):
        llm.pause_generation(mode)
        assert llm.is_paused()
        with pytest.raises(RollspanError) as caught:
            llm.generate([5], GREEDY)
        assert caught.value.reason == "engine_paused"
        llm.resume_generation()
    assert llm.generate([5], GREEDY)[0].outputs[0].token_ids == [1] * 6


def test_pausing_with_wait_runs_open_requests_to_their_ends(llm: LLM) -> None:
    llm.add_request([5], GREEDY)
    llm.step()
    llm.pause_generation("wait")
    (output,) = llm.step()
    assert output.finished
    assert output.outputs[0].token_ids == [1] * 6
    assert not llm.has_unfinished_requests()


def test_pausing_with_keep_freezes_open_requests(llm: LLM, checkpoints: Checkpoints) -> None:
    llm.add_request([5], GREEDY)
    llm.step()
    llm.pause_generation("keep")
    emit_two(llm, checkpoints)
    frozen = [output for _ in range(3) for output in llm.step()]
    llm.resume_generation()
    outputs = frozen
    while llm.has_unfinished_requests():
        outputs += llm.step()
    (only,) = outputs[-1].outputs
    assert only.finish_reason == "length"
    assert [span["version"] for span in only.weight_versions or []] == ["one", "two"]
    assert set(only.token_ids) == {1, 2}


def test_a_failed_update_changes_nothing(llm: LLM) -> None:
    commit = llm.get_weight_commit()
    llm.start_weight_update()
    with pytest.raises(RollspanError) as caught:
        llm.update_weights({"path": "nowhere"})
    assert caught.value.reason == "weights_invalid"
    assert (llm.get_weight_version(), llm.get_weight_commit()) == ("one", commit)
    assert llm.generate([5], GREEDY)[0].outputs[0].token_ids == [1] * 6


def test_relabelling_changes_the_label_only(llm: LLM) -> None:
    commit = llm.get_weight_commit()
    assert llm.update_weight_version(7) == "7"
    assert (llm.get_weight_version(), llm.get_weight_commit()) == ("7", commit)


def test_the_files_that_the_model_was_started_from_may_be_overwritten(checkpoints: Checkpoints) -> None:
    """Weights that stay mapped from their file would change under an unchanged label when it does."""
    directory = write(checkpoints.root / "started-from", tensors(1))
    with LLM(directory, kv_cache_memory=1 << 20, num_threads=1) as llm:
        overwrite = (checkpoints.emitting(5) / "model.safetensors").read_bytes()
        with (directory / "model.safetensors").open("r+b") as file:
            file.write(overwrite)
        assert llm.generate([5], GREEDY)[0].outputs[0].token_ids == [1] * 6


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    for prompts in ([[5], []], [[5], [64]], ["text"], [1.5]):
        with pytest.raises(RollspanError, match="token_ids must be"):
            llm.generate(prompts, GREEDY)  # type: ignore[arg-type]


def test_after_shutdown_every_call_says_so(checkpoints: Checkpoints) -> None:
    llm = LLM(checkpoints.emitting(1), kv_cache_memory=1 << 20, num_threads=1)
    llm.check_health()
    llm.shutdown()
    llm.shutdown()
    for call in (llm.check_health, llm.get_weight_version, lambda: llm.generate([5], GREEDY)):
        with pytest.raises(RollspanError) as caught:
            call()
        assert caught.value.reason == "shutting_down"


def test_a_request_that_fails_takes_nothing_from_the_others(llm: LLM) -> None:
    llm.add_request([5], GREEDY, request_id="good")
    llm.step()
    llm.pause_generation("wait")
    llm.add_request([5], GREEDY, request_id="refused")
    with pytest.raises(RollspanError) as caught:
        llm.step()
    assert caught.value.reason == "engine_paused"
    (output,) = llm.step()
    assert (output.request_id, output.finished, output.outputs[0].token_ids) == ("good", True, [1] * 6)


def test_the_log_probs_of_a_prompt_and_what_the_cache_had_of_it_are_told(llm: LLM) -> None:
    prompt = [5, 6, 7, 8] * 10
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, n=2, prompt_logprobs=1)
    (output,) = llm.generate([prompt], params)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    tokens = [next(iter(position)) for position in output.prompt_logprobs[1:] if position is not None]
    assert tokens == prompt[1:]
    plain = SamplingParams(temperature=0.0, max_tokens=2)
    assert llm.generate([prompt], plain)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], plain)[0].num_cached_tokens == 0


def test_what_only_the_engine_can_refuse_names_its_field(llm: LLM) -> None:
    with pytest.raises(RollspanError) as refusal:
        llm.generate([5], SamplingParams(routed_experts=True))
    assert (refusal.value.reason, refusal.value.param) == ("unsupported_field", "sampling_params.routed_experts")
    assert llm.server_info()["dtype"] == "float32"
