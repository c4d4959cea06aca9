"""/metrics: the same families, labels and values from both frontends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from frontend_process import wait_until
from scripted_frontend import Mocked, MockFactory

from rollspan.protocol import codec
from rollspan.protocol.framing import FrameKind
from rollspan.protocol.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason

FAMILIES = {
    "rollspan:num_requests_running": "gauge",
    "rollspan:num_requests_waiting": "gauge",
    "rollspan:kv_cache_usage_perc": "gauge",
    "rollspan:paused": "gauge",
    "rollspan:weight_commit": "gauge",
    "rollspan:weight_version_info": "gauge",
    "rollspan:prompt_tokens_total": "counter",
    "rollspan:generation_tokens_total": "counter",
    "rollspan:request_success_total": "counter",
    "rollspan:weight_updates_total": "counter",
    "rollspan:weight_update_duration_seconds": "histogram",
    "rollspan:weight_update_stall_seconds": "histogram",
    "rollspan:generation_tokens_by_lag_total": "counter",
    "rollspan:requests_spanning_update_total": "counter",
    "rollspan:num_preemptions_total": "counter",
    "rollspan:prefix_cache_queries_total": "counter",
    "rollspan:prefix_cache_hits_total": "counter",
    "rollspan:wire_decode_errors_total": "counter",
    "rollspan:wire_skipped_fields_total": "counter",
    "rollspan:time_to_first_token_seconds": "histogram",
    "rollspan:inter_token_latency_seconds": "histogram",
    "rollspan:e2e_request_latency_seconds": "histogram",
}

#: Elements of an EngineCoreOutput that this version knows.
KNOWN_ELEMENTS = 22


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def test_the_families_are_those_of_the_contract(mock: Mocked) -> None:
    response = mock.frontend.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds = {}
    for line in response.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("#"):
            assert 'model_name="mock"' in line, line
    # Its labels are not known beforehand: it may wait for the first one.
    kinds.setdefault("rollspan:wire_decode_errors_total", "counter")
    assert kinds == FAMILIES


def test_the_buckets_are_those_of_vllm(mock: Mocked) -> None:
    samples = mock.frontend.metrics()

    def bounds(name: str) -> list[float]:
        prefix = f'rollspan:{name}_bucket{{le="'
        return sorted(float(sample[len(prefix) : -2]) for sample in samples if sample.startswith(prefix))

    assert bounds("time_to_first_token_seconds")[:3] == [0.001, 0.005, 0.01]
    assert len(bounds("time_to_first_token_seconds")) == 23
    assert bounds("inter_token_latency_seconds")[-2:] == [80.0, float("inf")]
    assert len(bounds("inter_token_latency_seconds")) == 20
    assert bounds("e2e_request_latency_seconds")[-2:] == [7680.0, float("inf")]
    assert len(bounds("e2e_request_latency_seconds")) == 22
    assert bounds("weight_update_stall_seconds")[:2] == [0.0001, 0.0005]
    assert bounds("weight_update_stall_seconds")[-2:] == [1800.0, float("inf")]
    assert len(bounds("weight_update_stall_seconds")) == 18


def test_requests_are_counted_as_they_pass(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    mock = mocks.start()
    answer = pool.submit(mock.frontend.generate, [5, 6, 7], sampling_params={"n": 2})
    first, second = (mock.engine.next_request().request_id for _ in range(2))
    mock.engine.tokens(first, [1, 2], version="a", commit=1)
    mock.engine.tokens(second, [1], version="a", commit=1)
    mock.engine.tokens(first, [3], version="b", commit=2)
    mock.engine.tokens(first, [], finish=FinishReason.LENGTH, version="b", commit=2)
    mock.engine.tokens(second, [4], finish=FinishReason.STOP, version="a", commit=1)
    assert answer.result().status_code == 200
    aborted = pool.submit(mock.frontend.generate, [5], request_id="x")
    mock.engine.next_request()
    assert mock.frontend.post("/abort_requests", {"request_ids": ["x"]}).json()["aborted"] == 1
    assert aborted.result().status_code == 200
    samples = mock.frontend.metrics()
    finished = {
        reason: samples[f'rollspan:request_success_total{{finished_reason="{reason}"}}']
        for reason in ("stop", "length", "abort", "error")
    }
    assert finished == {"stop": 1, "length": 1, "abort": 1, "error": 0}
    assert samples["rollspan:prompt_tokens_total"] == 6
    assert samples["rollspan:generation_tokens_total"] == 5
    assert samples["rollspan:time_to_first_token_seconds_count"] == 2
    assert samples["rollspan:inter_token_latency_seconds_count"] == 2
    assert samples["rollspan:e2e_request_latency_seconds_count"] == 3
    assert samples["rollspan:requests_spanning_update_total"] == 1


def test_the_engines_state_is_shown(mocks: MockFactory) -> None:
    mock = mocks.start(weight_version='a"b', weight_commit=4, paused=True)
    samples = mock.frontend.metrics()
    assert samples["rollspan:weight_commit"] == 4
    assert samples["rollspan:paused"] == 1
    assert samples['rollspan:weight_version_info{version="a\\"b"}'] == 1
    mock.engine.stats(
        "next", 5, num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25, paused=False, something_new={"a": [1]}
    )
    wait_until(lambda: mock.frontend.metrics()["rollspan:weight_commit"] == 5, "the new commit")
    samples = mock.frontend.metrics()
    assert samples["rollspan:num_requests_running"] == 3
    assert samples["rollspan:num_requests_waiting"] == 2
    assert samples["rollspan:kv_cache_usage_perc"] == 0.25
    assert samples["rollspan:paused"] == 0
    versions = [name for name in samples if name.startswith("rollspan:weight_version_info")]
    assert versions == ['rollspan:weight_version_info{version="next"}']


def test_outputs_of_a_step_that_a_commit_has_overtaken_do_not_take_it_back(mocks: MockFactory) -> None:
    mock = mocks.start()
    mock.engine.stats("next", 1)
    mock.engine.stats("default", 0, num_running_reqs=3)
    wait_until(lambda: mock.frontend.metrics()["rollspan:num_requests_running"] == 3, "the late outputs")
    samples = mock.frontend.metrics()
    assert samples["rollspan:weight_commit"] == 1
    versions = [name for name in samples if name.startswith("rollspan:weight_version_info")]
    assert versions == ['rollspan:weight_version_info{version="next"}']


def test_the_prefix_cache_is_counted_by_its_deltas_and_preemptions_by_their_total(mocks: MockFactory) -> None:
    mock = mocks.start()
    for commit, queries, hits, preemptions in ((1, 40, 16, 2), (2, 0, 0, 2), (3, 2, 1, 5)):
        cache = {"reset": False, "requests": 1, "queries": queries, "hits": hits, "preempted_requests": 7}
        mock.engine.stats("next", commit, prefix_cache_stats=cache, num_preemptions=preemptions)
    wait_until(lambda: mock.frontend.metrics()["rollspan:weight_commit"] == 3, "the last stats")
    samples = mock.frontend.metrics()
    assert samples["rollspan:prefix_cache_queries_total"] == 42
    assert samples["rollspan:prefix_cache_hits_total"] == 17
    assert samples["rollspan:num_preemptions_total"] == 5


def test_weight_updates_are_what_the_engine_counts(mocks: MockFactory) -> None:
    mock = mocks.start()
    names = ("success", "failure")
    updates = {name: f'rollspan:weight_updates_total{{result="{name}"}}' for name in names}
    assert [mock.frontend.metrics()[updates[name]] for name in names] == [0, 0]
    seconds = {"receive": 2.0, "verify": 0.25, "prepare": 0, "commit": 0.0005, "stall": 0.002, "unknown": 9}
    for commit, success, failure in ((1, 1, 0), (2, 1, 2), (3, 2, 2)):
        counts = {"success": success, "failure": failure}
        mock.engine.stats("next", commit, weight_updates=counts, weight_update_seconds=seconds)
    wait_until(lambda: mock.frontend.metrics()["rollspan:weight_commit"] == 3, "the last stats")
    samples = mock.frontend.metrics()
    assert [samples[updates[name]] for name in names] == [2, 2]
    for phase, total in (("receive", 4.0), ("verify", 0.5), ("prepare", 0.0), ("commit", 0.001)):
        assert samples[f'rollspan:weight_update_duration_seconds_count{{phase="{phase}"}}'] == 2
        assert samples[f'rollspan:weight_update_duration_seconds_sum{{phase="{phase}"}}'] == pytest.approx(total)
    assert samples["rollspan:weight_update_stall_seconds_count"] == 2
    assert samples["rollspan:weight_update_stall_seconds_sum"] == pytest.approx(0.004)


def test_tokens_are_counted_by_how_stale_they_are_when_their_output_ends(
    mocks: MockFactory, pool: ThreadPoolExecutor
) -> None:
    mock = mocks.start(weight_commit=1)
    answer = pool.submit(mock.frontend.generate, [5], sampling_params={"n": 2})
    first, second = (mock.engine.next_request().request_id for _ in range(2))
    for commit, tokens in ((1, [1]), (2, [2, 3]), (4, [4, 5, 6])):
        mock.engine.tokens(first, tokens, version="a", commit=commit)
    mock.engine.tokens(second, [1], version="a", commit=4)
    mock.engine.tokens(first, [7], finish=FinishReason.LENGTH, version="a", commit=5)
    mock.engine.stats("a", 7)
    mock.engine.tokens(second, [1], finish=FinishReason.STOP, version="a", commit=6)
    assert answer.result().status_code == 200
    samples = mock.frontend.metrics()
    by_lag = {lag: samples[f'rollspan:generation_tokens_by_lag_total{{lag="{lag}"}}'] for lag in ("0", "1", "2", "3+")}
    assert by_lag == {"0": 1, "1": 3 + 1, "2": 0, "3+": 1 + 2 + 1}


def test_elements_that_nobody_knows_are_skipped_and_counted(mocks: MockFactory, pool: ThreadPoolExecutor) -> None:
    import msgpack

    mock = mocks.start()
    answer = pool.submit(mock.frontend.generate, [5])
    request_id = mock.engine.next_request().request_id
    message = EngineCoreOutputs(
        outputs=[EngineCoreOutput(request_id, [1], finish_reason=FinishReason.STOP)],
        timestamp=1.0,
        weight_version="a",
        weight_commit=1,
    )
    row = msgpack.unpackb(codec.encode_outputs(message))
    row[1][0] += [None] * (KNOWN_ELEMENTS - len(row[1][0])) + ["new", {"er": 1}]
    mock.engine.raw(FrameKind.OUTPUTS, msgpack.packb([*row, "newest"]))
    assert answer.result().json()["choices"][0]["token_ids"] == [1]
    assert mock.frontend.metrics()["rollspan:wire_skipped_fields_total"] == 3
