"""Merging of request outputs."""

from __future__ import annotations

from typing import Any

from rollspan.outputs import CompletionOutput, Logprob, RequestOutput


def completion(*tokens: int, index: int = 0, **fields: Any) -> CompletionOutput:
    return CompletionOutput(index=index, text="", token_ids=list(tokens), **fields)


def request(*outputs: CompletionOutput, finished: bool = False, **fields: Any) -> RequestOutput:
    return RequestOutput("r", [1], list(outputs), finished, **fields)


def span(label: str | None, start: int, end: int) -> dict[str, Any]:
    return {"version": label, "start": start, "end": end}


def test_aggregated_deltas_keep_the_spans_of_the_last_one() -> None:
    merged = request(completion(1, 2))
    merged.add(request(completion(3, finish_reason="stop", weight_versions=[span("A", 0, 3)]), finished=True), True)
    (only,) = merged.outputs
    assert only.token_ids == [1, 2, 3]
    assert only.finish_reason == "stop"
    assert only.weight_versions == [span("A", 0, 3)]
    assert merged.finished


def test_merging_past_a_final_output_leaves_no_stale_spans() -> None:
    merged = request(completion(1, finish_reason="stop", stop_reason=7, weight_versions=[span("A", 0, 1)]))
    merged.add(request(completion(2)), aggregate=True)
    (only,) = merged.outputs
    assert (only.token_ids, only.finish_reason, only.stop_reason, only.weight_versions) == ([1, 2], None, None, None)


def test_deltas_with_their_own_spans_join_them() -> None:
    first = completion(1, 2, weight_versions=[span("A", 4, 6)], weight_commits=[{"commit": 0, "start": 4, "end": 6}])
    second = completion(
        3, 4, weight_versions=[span("A", 6, 7), span("B", 7, 8)], weight_commits=[{"commit": 1, "start": 6, "end": 8}]
    )
    first.add(second)
    assert first.weight_versions == [span("A", 4, 7), span("B", 7, 8)]
    assert first.weight_commits == [{"commit": 0, "start": 4, "end": 6}, {"commit": 1, "start": 6, "end": 8}]


def test_a_first_delta_without_labels_gets_a_null_span_when_labels_appear() -> None:
    first = completion(1, 2)
    first.add(completion(3, weight_versions=[span("A", 2, 3)]))
    assert first.weight_versions == [span(None, 0, 2), span("A", 2, 3)]


def test_cumulative_outputs_replace() -> None:
    merged = request(completion(1))
    merged.add(request(completion(1, 2), weight_version="v", weight_commit=3), aggregate=False)
    assert merged.outputs[0].token_ids == [1, 2]
    assert (merged.weight_version, merged.weight_commit) == ("v", 3)


def test_an_index_that_is_new_is_appended() -> None:
    merged = request(completion(1, index=1))
    merged.add(request(completion(5, index=0)), aggregate=True)
    assert [(output.index, output.token_ids) for output in merged.outputs] == [(1, [1]), (0, [5])]


def test_log_probs_grow_with_the_tokens() -> None:
    first = completion(1, logprobs=[{1: Logprob(-0.5, 1)}], cumulative_logprob=-0.5)
    first.add(completion(2, logprobs=[{2: Logprob(-1.0, 3)}], cumulative_logprob=-1.5))
    assert first.logprobs == [{1: Logprob(-0.5, 1)}, {2: Logprob(-1.0, 3)}]
    assert first.cumulative_logprob == -1.5
