"""From engine outputs to request outputs, without a link."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from rollspan.admission import admit
from rollspan.errors import RollspanError
from rollspan.output_processor import OutputProcessor, RequestFailedError, RequestState
from rollspan.outputs import Logprob, RequestOutput
from rollspan.protocol.messages import EngineError, FinishReason
from rollspan.protocol.packed_logprobs import pack_each
from rollspan.sampling_params import RequestOutputKind, SamplingParams
from support.fake_engine import HELLO, batch, logprobs, output

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Opened:
    """An open request, the ids that the engine knows it by, and how often its reader was woken."""

    def __init__(self, processor: OutputProcessor, request_id: str = "r", chunks: bool = False, **params: Any) -> None:
        self.woken = 0
        admitted = admit([1, 2], SamplingParams(**params), HELLO, request_id=request_id)
        self.ids = [request.request_id for request in admitted.engine_requests]
        self.state: RequestState = processor.add(admitted, self._wake, include_weight_versions=chunks)

    def _wake(self) -> None:
        self.woken += 1

    def take(self) -> RequestOutput:
        taken = self.state.take()
        assert taken is not None
        return taken


@pytest.fixture
def processor() -> OutputProcessor:
    return OutputProcessor()


def pickle_round(taken: RequestOutput) -> RequestOutput:
    again: RequestOutput = pickle.loads(pickle.dumps(taken))
    return again


def spans(*items: tuple[str | None, int, int]) -> list[dict[str, Any]]:
    return [{"version": label, "start": start, "end": end} for label, start, end in items]


def test_deltas_hold_what_is_new_and_the_last_one_the_spans_of_everything(processor: OutputProcessor) -> None:
    opened = Opened(processor, output_kind=DELTA)
    name = opened.ids[0]
    processor.process(batch(output(name, 5, admission=("A", 0)), version="A"))
    first = opened.take()
    assert (first.outputs[0].token_ids, first.outputs[0].weight_versions, first.finished) == ([5], None, False)
    assert (first.weight_version, first.weight_commit) == ("A", 0)
    assert opened.state.take() is None
    processor.process(batch(output(name, 6, finish=FinishReason.STOP, stop_reason=6), version="B", commit=1))
    last = opened.take()
    assert last.finished
    assert last.outputs[0].token_ids == [6]
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", 6)
    assert last.outputs[0].weight_versions == spans(("A", 0, 1), ("B", 1, 2))
    assert last.outputs[0].weight_commits == [{"commit": 0, "start": 0, "end": 1}, {"commit": 1, "start": 1, "end": 2}]
    assert last.weight_version == "A"
    assert len(processor) == 0


def test_a_slow_reader_gets_one_larger_delta(processor: OutputProcessor) -> None:
    opened = Opened(processor, output_kind=DELTA, chunks=True)
    for token, label in ((1, "A"), (2, "B"), (3, "B")):
        processor.process(batch(output(opened.ids[0], token), version=label))
    (only,) = opened.take().outputs
    assert only.token_ids == [1, 2, 3]
    assert only.weight_versions == spans(("A", 0, 1), ("B", 1, 3))
    processor.process(batch(output(opened.ids[0], 4), version="B"))
    assert opened.take().outputs[0].weight_versions == spans(("B", 3, 4))


def test_cumulative_outputs_hold_everything_and_are_not_shared(processor: OutputProcessor) -> None:
    opened = Opened(processor)
    processor.process(batch(output(opened.ids[0], 5)))
    first = opened.take()
    processor.process(batch(output(opened.ids[0], 6)))
    assert first.outputs[0].token_ids == [5]
    assert opened.take().outputs[0].token_ids == [5, 6]


def test_final_only_says_nothing_before_the_end(processor: OutputProcessor) -> None:
    opened = Opened(processor, output_kind=FINAL)
    processor.process(batch(output(opened.ids[0], 5)))
    assert opened.state.take() is None
    processor.process(batch(output(opened.ids[0], 6, finish=FinishReason.LENGTH)))
    assert opened.take().outputs[0].token_ids == [5, 6]
    assert opened.state.take() is None


def test_a_terminal_output_without_tokens_is_delivered(processor: OutputProcessor) -> None:
    opened = Opened(processor, output_kind=DELTA)
    processor.process(batch(output(opened.ids[0], finish=FinishReason.ABORT), version="Z"))
    (only,) = opened.take().outputs
    assert (only.token_ids, only.finish_reason, only.weight_versions) == ([], "abort", [])


def test_tokens_of_an_engine_that_reports_no_labels_have_no_spans(processor: OutputProcessor) -> None:
    opened = Opened(processor)
    processor.process(batch(output(opened.ids[0], 5, finish=FinishReason.STOP), version=None, commit=None))
    taken = opened.take()
    assert (taken.outputs[0].weight_versions, taken.outputs[0].weight_commits) == (None, None)
    assert taken.weight_version is None


def test_sequences_have_their_own_spans_and_the_request_null_when_admissions_differ(processor: OutputProcessor) -> None:
    opened = Opened(processor, output_kind=FINAL, n=2)
    first, second = opened.ids
    processor.process(batch(output(first, 5, finish=FinishReason.STOP, admission=("A", 0)), version="A"))
    processor.process(batch(output(second, 6, finish=FinishReason.STOP, admission=("B", 1)), version="B"))
    taken = opened.take()
    assert [completion.index for completion in taken.outputs] == [0, 1]
    assert [completion.weight_versions for completion in taken.outputs] == [spans(("A", 0, 1)), spans(("B", 0, 1))]
    assert (taken.weight_version, taken.weight_commit) == (None, None)


def test_deltas_of_n_sequences_hold_those_that_changed(processor: OutputProcessor) -> None:
    opened = Opened(processor, output_kind=DELTA, n=2)
    processor.process(batch(output(opened.ids[1], 6, finish=FinishReason.STOP)))
    taken = opened.take()
    assert [completion.index for completion in taken.outputs] == [1]
    assert not taken.finished
    processor.process(batch(output(opened.ids[0], 5, finish=FinishReason.STOP)))
    assert opened.take().finished


def test_one_failed_sequence_fails_the_request_and_aborts_the_others(processor: OutputProcessor) -> None:
    opened = Opened(processor, n=3)
    processor.process(batch(output(opened.ids[1], 4, finish=FinishReason.STOP)))
    error = EngineError("nan_logits", "logits of request r hold NaN")
    to_abort = processor.process(batch(output(opened.ids[0], 5, finish=FinishReason.ERROR, error=error)))
    assert to_abort == [opened.ids[2]]
    with pytest.raises(RequestFailedError, match="hold NaN") as caught:
        opened.state.take()
    assert caught.value.reason == "nan_logits"
    partial = caught.value.partial_output
    assert partial is not None
    assert [completion.finish_reason for completion in partial.outputs] == ["error", "stop", "error"]
    assert partial.outputs[0].weight_versions == spans(("A", 0, 1))
    assert len(processor) == 0


def test_a_refused_request_fails_without_a_partial_output(processor: OutputProcessor) -> None:
    opened = Opened(processor)
    error = EngineError("engine_paused", "generation is paused", retryable=True)
    processor.process(batch(output(opened.ids[0], finish=FinishReason.ERROR, error=error)))
    with pytest.raises(RequestFailedError) as caught:
        opened.state.take()
    assert (caught.value.reason, caught.value.status, caught.value.partial_output) == ("engine_paused", 503, None)


def test_abort_ends_with_what_there_is_and_drops_what_comes_later(processor: OutputProcessor) -> None:
    opened = Opened(processor, output_kind=DELTA)
    other = Opened(processor, request_id="other")
    processor.process(batch(output(opened.ids[0], 5)))
    assert processor.abort(["r", "unknown", "r"]) == (1, opened.ids)
    processor.process(batch(output(opened.ids[0], 6)))
    taken = opened.take()
    assert (taken.outputs[0].token_ids, taken.outputs[0].finish_reason) == ([5], "abort")
    assert taken.outputs[0].weight_versions == spans(("A", 0, 1))
    assert taken.finished
    assert processor.abort() == (1, other.ids)


def test_an_external_id_is_free_again_once_its_request_ended(processor: OutputProcessor) -> None:
    Opened(processor)
    with pytest.raises(RollspanError, match="already in use") as caught:
        Opened(processor)
    assert (caught.value.reason, caught.value.param) == ("duplicate_request_id", "request_id")
    processor.abort(["r"])
    Opened(processor)


def test_discarding_a_request_that_ended_leaves_its_successor_alone(processor: OutputProcessor) -> None:
    first = Opened(processor)
    processor.abort(["r"])
    second = Opened(processor)
    assert processor.discard(first.state) == []
    assert len(processor) == 1
    assert processor.discard(second.state) == second.ids


def test_log_probs_have_the_sampled_token_first_and_each_token_once(processor: OutputProcessor) -> None:
    opened = Opened(processor, output_kind=DELTA, logprobs=2)
    rows = logprobs([(7, -2.0, 5), (1, -0.5, 0), (2, -1.0, 0)], [(1, -0.5, 1), (1, -0.5, 0), (2, -1.0, 0)])
    processor.process(batch(output(opened.ids[0], 7, 1, new_logprobs=rows)))
    (only,) = opened.take().outputs
    assert only.logprobs == [
        {7: Logprob(-2.0, 5), 1: Logprob(-0.5, 1), 2: Logprob(-1.0, 2)},
        {1: Logprob(-0.5, 1), 2: Logprob(-1.0, 2)},
    ]
    assert [next(iter(position)) for position in only.logprobs] == [7, 1]
    assert only.cumulative_logprob == -2.5


def test_columns_beyond_what_was_asked_for_are_left_out(processor: OutputProcessor) -> None:
    opened = Opened(processor, logprobs=0)
    processor.process(batch(output(opened.ids[0], 7, new_logprobs=logprobs([(7, -2.0, 5), (1, -0.5, 0)]))))
    assert opened.take().outputs[0].logprobs == [{7: Logprob(-2.0, 5)}]


def with_log_probs(processor: OutputProcessor) -> RequestOutput:
    """An output whose log-probs nobody has looked at."""
    opened = Opened(processor, logprobs=1, prompt_logprobs=0)
    rows, prompt = logprobs([(7, -0.5, 1), (7, -0.5, 1)]), logprobs([(2, -1.5, 3)])
    processor.process(batch(output(opened.ids[0], 7, new_logprobs=rows, new_prompt_logprobs=prompt)))
    return opened.take()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, dataclasses.replace, pickle_round])
def test_log_probs_are_plain_lists_to_whoever_looks(processor: OutputProcessor, duplicate: Any) -> None:
    taken = with_log_probs(processor)
    completion = duplicate(taken.outputs[0])
    assert type(completion.logprobs) is list
    assert completion.logprobs == taken.outputs[0].logprobs == [{7: Logprob(-0.5, 1)}]
    assert completion.logprobs is completion.logprobs
    assert duplicate(taken).prompt_logprobs == [None, {2: Logprob(-1.5, 3)}]


def test_outputs_with_log_probs_become_json(processor: OutputProcessor) -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(with_log_probs(processor))))
    entry = {"logprob": -0.5, "rank": 1, "decoded_token": None}
    assert plain["outputs"][0]["logprobs"] == [{"7": entry}]
    assert plain["prompt_logprobs"] == [None, {"2": {**entry, "logprob": -1.5, "rank": 3}}]


def test_log_probs_read_late_are_those_of_their_output(processor: OutputProcessor) -> None:
    kinds = {kind: Opened(processor, str(kind), logprobs=0, output_kind=kind) for kind in RequestOutputKind}
    taken: dict[RequestOutputKind, list[RequestOutput]] = {kind: [] for kind in kinds}
    for token in range(4):
        finish = FinishReason.LENGTH if token == 3 else None
        for kind, opened in kinds.items():
            rows = logprobs([(token, -0.1 * token, 1)])
            lists = pack_each(rows)[0] if token % 2 else rows
            processor.process(batch(output(opened.ids[0], token, finish=finish, new_logprobs=lists)))
            taken[kind] += [one] if token != 1 and (one := opened.state.take()) is not None else []
    found = {
        kind: [[next(iter(position)) for position in one.outputs[0].logprobs or []] for one in outputs]
        for kind, outputs in taken.items()
    }
    assert found[DELTA] == [[0], [1, 2], [3]]
    assert found[FINAL] == [[0, 1, 2, 3]]
    assert found[RequestOutputKind.CUMULATIVE] == [[0], [0, 1, 2], [0, 1, 2, 3]]
    sums = {outputs[-1].outputs[0].cumulative_logprob for outputs in taken.values()}
    assert len(sums) == 1


def test_a_reader_who_changes_its_log_probs_does_not_change_later_ones(processor: OutputProcessor) -> None:
    opened = Opened(processor, logprobs=0)
    for token in (5, 6):
        processor.process(batch(output(opened.ids[0], token, new_logprobs=logprobs([(token, -0.5, 1)]))))
        positions = opened.take().outputs[0].logprobs
        assert positions is not None
        assert [next(iter(position)) for position in positions] == list(range(5, token + 1))
        positions.clear()


def test_log_probs_that_do_not_match_the_tokens_fail_that_request_only(processor: OutputProcessor) -> None:
    broken, other = Opened(processor, logprobs=0), Opened(processor, request_id="other")
    to_abort = processor.process(batch(output(broken.ids[0], 7), output(other.ids[0], 7)))
    assert to_abort == broken.ids
    with pytest.raises(RollspanError) as caught:
        broken.state.take()
    assert caught.value.reason == "decode_error"
    assert other.take().outputs[0].token_ids == [7]


def test_cached_tokens_come_from_the_prefill_statistics(processor: OutputProcessor) -> None:
    opened = Opened(processor)
    processor.process(batch(output(opened.ids[0], 7, prefill_stats={"num_cached_tokens": 2})))
    assert opened.take().num_cached_tokens == 2


def test_the_end_of_the_engine_reaches_every_request(processor: OutputProcessor) -> None:
    opened = [Opened(processor, request_id=str(number)) for number in range(3)]
    processor.fail_all(RollspanError("gone", reason="engine_dead"))
    for one in opened:
        assert one.woken == 1
        with pytest.raises(RollspanError, match="gone"):
            one.state.take()
    assert len(processor) == 0


def test_log_probs_of_the_prompt_come_with_the_first_delta_of_the_first_sequence(processor: OutputProcessor) -> None:
    opened = Opened(processor, n=2, prompt_logprobs=2, output_kind=DELTA)
    processor.process(batch(output(opened.ids[1], 7)))
    assert opened.take().prompt_logprobs is None
    rows = logprobs([(2, -1.5, 3), (8, -0.5, 1), (2, -1.5, 2)])
    processor.process(batch(output(opened.ids[0], 7, new_prompt_logprobs=rows)))
    assert opened.take().prompt_logprobs == [None, {2: Logprob(-1.5, 3), 8: Logprob(-0.5, 1)}]
    processor.process(batch(output(opened.ids[0], 7)))
    assert opened.take().prompt_logprobs is None


def test_log_probs_of_the_prompt_stay_on_cumulative_and_final_outputs(processor: OutputProcessor) -> None:
    whole = Opened(processor, "a", prompt_logprobs=0)
    final = Opened(processor, "b", prompt_logprobs=0, output_kind=FINAL)
    rows = logprobs([(2, -1.5, 3)])
    for opened in (whole, final):
        processor.process(batch(output(opened.ids[0], 7, new_prompt_logprobs=rows)))
    assert whole.take().prompt_logprobs == [None, {2: Logprob(-1.5, 3)}]
    for opened in (whole, final):
        processor.process(batch(output(opened.ids[0], 7, finish=FinishReason.LENGTH)))
        assert opened.take().prompt_logprobs == [None, {2: Logprob(-1.5, 3)}]


@pytest.mark.parametrize("rows", [None, logprobs([(2, -1.5, 3)], [(2, -1.5, 3)])])
def test_a_prompt_without_its_log_probs_is_a_decode_error(processor: OutputProcessor, rows: Any) -> None:
    opened = Opened(processor, prompt_logprobs=0)
    processor.process(batch(output(opened.ids[0], 7, new_prompt_logprobs=rows)))
    with pytest.raises(RequestFailedError) as failure:
        opened.take()
    assert failure.value.reason == "decode_error"


def test_routed_experts_and_cached_tokens_are_on_the_final_output(processor: OutputProcessor) -> None:
    opened = Opened(processor, n=2, routed_experts=True, output_kind=FINAL)
    experts = np.zeros((2, 1, 2), np.uint8)
    for index, cached in enumerate((1, 2)):
        stats = {"num_cached_tokens": cached}
        name = opened.ids[index]
        processor.process(batch(output(name, 7, prefill_stats=stats)))
        processor.process(batch(output(name, 7, finish=FinishReason.LENGTH, routed_experts=experts)))
    taken = opened.take()
    assert [choice.routed_experts is experts for choice in taken.outputs] == [True, True]
    assert taken.num_cached_tokens == 1


def test_a_refusal_of_the_engine_keeps_its_field_and_reason(processor: OutputProcessor) -> None:
    opened = Opened(processor)
    error = EngineError("validation_error", "no tokenizer", False, "sampling_params.bad_words", "unsupported_field")
    processor.process(batch(output(opened.ids[0], finish=FinishReason.ERROR, error=error)))
    with pytest.raises(RequestFailedError) as failure:
        opened.take()
    assert (failure.value.reason, failure.value.param) == ("unsupported_field", "sampling_params.bad_words")
