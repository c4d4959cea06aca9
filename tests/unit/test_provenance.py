"""What a request may ask about its weights, and how outputs tell it."""

from __future__ import annotations

from typing import Any

import pytest

from rollspan import Provenance
from rollspan.admission import admit
from rollspan.errors import RollspanError
from rollspan.output_processor import OutputProcessor, RequestFailedError, RequestState
from rollspan.outputs import CompletionOutput, RequestOutput
from rollspan.protocol.messages import FinishReason, StampSpan
from rollspan.sampling_params import RequestOutputKind, SamplingParams
from support.fake_engine import HELLO, batch, logprobs, output

TOLD = Provenance(return_kv_versions=True)


def opened(processor: OutputProcessor, provenance: Provenance = TOLD, **params: Any) -> tuple[RequestState, list[str]]:
    admitted = admit([1, 2], SamplingParams(**params), HELLO, request_id="r", provenance=provenance)
    state = processor.add(admitted, lambda: None)
    return state, [request.request_id for request in admitted.engine_requests]


def taken(state: RequestState) -> RequestOutput:
    result = state.take()
    assert result is not None
    return result


def runs(*items: StampSpan) -> list[dict[str, Any]]:
    return [{"version": label, "commit": commit, "start": start, "end": end} for label, commit, start, end in items]


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("min_weight_commit", -1, "an integer of at least 0"),
        ("min_weight_commit", True, "an integer of at least 0"),
        ("min_weight_commit", None, "an integer of at least 0"),
        ("min_weight_commit", 2**63, "an integer of at least 0"),
        ("weight_wait_s", -0.5, "a number of at least 0"),
        ("weight_wait_s", float("nan"), "a number of at least 0"),
        ("weight_wait_s", "1", "a number of at least 0"),
        ("max_weight_lag", 1.0, "an integer of at least 0"),
        ("return_kv_versions", 1, "true or false"),
        ("allow_stale_prefix", None, "true or false"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(RollspanError, match=f"{field} must be {allowed}") as refusal:
        Provenance(**{field: value})
    assert (refusal.value.reason, refusal.value.param) == ("invalid_request", field)


def test_it_goes_to_each_sequence_as_it_is() -> None:
    asked = Provenance(min_weight_commit=3, max_weight_lag=1)
    admitted = admit([1], SamplingParams(n=2), HELLO, provenance=asked)
    assert [request.provenance for request in admitted.engine_requests] == [asked, asked]
    assert admit([1], SamplingParams(), HELLO).engine_requests[0].provenance == Provenance()


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_the_final_output_says_what_its_tokens_attended_to(kind: RequestOutputKind) -> None:
    processor = OutputProcessor()
    state, [name] = opened(processor, output_kind=kind)
    processor.process(batch(output(name, 5, kv_spans=[("A", 0, 0, 2)])))
    if kind is not RequestOutputKind.FINAL_ONLY:
        assert taken(state).outputs[0].kv_versions is None
    processor.process(batch(output(name, 6, finish=FinishReason.LENGTH), version="B", commit=1))
    assert taken(state).outputs[0].kv_versions == [
        {"start": 0, "end": 1, "kv": runs(("A", 0, 0, 2))},
        {"start": 1, "end": 2, "kv": runs(("A", 0, 0, 2), ("B", 1, 2, 3))},
    ]


def test_it_is_said_of_aborted_and_failed_outputs_too() -> None:
    processor = OutputProcessor()
    for end in ("abort", "fail"):
        state, [name] = opened(processor, output_kind=RequestOutputKind.FINAL_ONLY)
        processor.process(batch(output(name, 5, kv_spans=[("A", 0, 0, 2)])))
        if end == "abort":
            processor.abort()
            result = taken(state)
        else:
            processor.process(batch(output(name, finish=FinishReason.ERROR), version=None, commit=None))
            with pytest.raises(RequestFailedError) as failure:
                state.take()
            assert failure.value.partial_output is not None
            result = failure.value.partial_output
        assert result.outputs[0].kv_versions == [{"start": 0, "end": 1, "kv": runs(("A", 0, 0, 2))}]


def test_nothing_is_said_unasked_nor_where_the_engine_is_silent() -> None:
    processor = OutputProcessor()
    for provenance, spans in ((Provenance(), [("A", 0, 0, 2)]), (TOLD, None)):
        state, [name] = opened(processor, provenance)
        processor.process(batch(output(name, 5, finish=FinishReason.STOP, kv_spans=spans)))
        assert taken(state).outputs[0].kv_versions is None


def test_each_sequence_has_its_own() -> None:
    processor = OutputProcessor()
    state, names = opened(processor, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    for commit, name in enumerate(names):
        kv = [("A", commit, 0, 2)]
        processor.process(batch(output(name, 5, finish=FinishReason.STOP, kv_spans=kv), commit=commit))
    assert [choice.kv_versions for choice in taken(state).outputs] == [
        [{"start": 0, "end": 1, "kv": runs(("A", commit, 0, 2))}] for commit in (0, 1)
    ]


def test_spans_that_do_not_fit_the_tokens_fail_the_request() -> None:
    processor = OutputProcessor()
    state, [name] = opened(processor)
    processor.process(batch(output(name, 5, kv_spans=[("A", 0, 0, 3)])))
    with pytest.raises(RequestFailedError, match="cover 3 positions") as failure:
        state.take()
    assert failure.value.reason == "decode_error"


def test_whose_log_probs_of_the_prompt_are_is_said_with_them() -> None:
    processor = OutputProcessor()
    state, [name] = opened(processor, Provenance(), prompt_logprobs=0, output_kind=RequestOutputKind.DELTA)
    scores = logprobs([(2, -1.0, 1)])
    first = output(name, 5, new_prompt_logprobs=scores, prompt_spans=[("A", 0, 1, 2)])
    processor.process(batch(first, version="B", commit=1))
    result = taken(state)
    assert result.prompt_logprobs is not None
    assert result.prompt_weight_spans == runs(("A", 0, 1, 2))
    processor.process(batch(output(name, 6, finish=FinishReason.STOP)))
    following = taken(state)
    assert following.prompt_weight_spans is None
    result.add(following, aggregate=True)
    assert result.prompt_weight_spans == runs(("A", 0, 1, 2))


def test_merging_keeps_the_kv_versions_of_the_last_output() -> None:
    segment: Any = {"start": 0, "end": 2, "kv": runs(("A", 0, 0, 2))}
    first = CompletionOutput(0, "", [1])
    first.add(CompletionOutput(0, "", [2], finish_reason="stop", kv_versions=[segment]))
    assert first.kv_versions == [segment]
    first.add(CompletionOutput(0, "", [3]))
    assert first.kv_versions is None
