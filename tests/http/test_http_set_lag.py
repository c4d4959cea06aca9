"""Engines of a set that fall behind the others: they are shown as they are, and take no requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from frontend_process import error_of, wait_until
from scripted_frontend import MockedSet

from rollspan.protocol.messages import FinishReason

DIGEST = "blake3:" + "0f" * 32


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.fixture
def own(kind: str, socket_directory: Path) -> Iterator[MockedSet]:
    """Two scripted engines."""
    mocked = MockedSet(kind, socket_directory, 2)
    yield mocked
    mocked.close()


def test_an_engine_that_is_back_shows_the_weights_that_it_has_now(own: MockedSet) -> None:
    def samples() -> dict[str, float]:
        shown = ("weight_version_info", "weight_commit")
        return {
            name: value
            for name, value in own.frontend.metrics().items()
            if 'engine="1"' in name and any(word in name for word in shown)
        }

    own.engines[1].stats("step-7", 7)
    wait_until(lambda: 'rollspan:weight_version_info{engine="1",version="step-7"}' in samples(), "its label")
    own.engines[1].close()
    own.restart(1, weight_version="default")
    back = {
        'rollspan:weight_commit{engine="1"}': 0.0,
        'rollspan:weight_version_info{engine="1",version="default"}': 1.0,
    }
    wait_until(lambda: samples() == back, "the label of the new one alone")


def committed(commit: int) -> dict[str, Any]:
    return {"weight_version": "a", "weight_commit": commit, "weight_digest": DIGEST}


def served_by(own: MockedSet, pool: ThreadPoolExecutor) -> int:
    """Which engine takes a request; it is answered there."""
    answer = pool.submit(own.frontend.generate, [5])
    wait_until(lambda: any(engine.has_pending_request for engine in own.engines) or answer.done(), "a request")
    (index,) = (index for index, engine in enumerate(own.engines) if engine.has_pending_request)
    request = own.engines[index].next_request()
    own.engines[index].tokens(request.request_id, [1], finish=FinishReason.LENGTH, engine_index=index)
    assert answer.result().json()["engine_index"] == index
    return index


def finish(own: MockedSet, pool: ThreadPoolExecutor, commits: list[int], results: list[Any]) -> Any:
    """A whole update; in its last step the engines answer with ``results``. Gives the answer to it."""
    for step, body in (("start_weight_update", None), ("update_weights", {"update_info": {"path": "a"}})):
        answer = pool.submit(own.frontend.post, f"/{step}", body)
        own.expect(step, [] if body is None else [{"path": "a"}])
        assert answer.result().status_code == 200
    answer = pool.submit(own.frontend.post, "/finish_weight_update", {"weight_version": "a"})
    own.expect("prepare_weight_update", [{}], [{"weight_digest": DIGEST}] * 2)
    own.expect("get_weight_commit", [], commits)
    own.expect("finish_weight_update", ["a", {"commit": 1 + max(commits)}], results)
    return answer.result()


def test_an_engine_that_has_not_committed_with_the_others_waits_for_the_next_commit(
    own: MockedSet, pool: ThreadPoolExecutor
) -> None:
    failed = finish(own, pool, [0, 0], [("out of memory", "internal_error"), committed(1)])
    assert (failed.status_code, failed.json()["error"]["reason"]) == (502, "partial_failure")
    assert [served_by(own, pool) for _ in range(3)] == [1, 1, 1]
    message = error_of(own.frontend.generate([5], {"X-data-parallel-rank": "0"}), 503, "engine_dead")
    reason = "it was restarted or has missed a commit, and waits for the next weight update"
    assert message == f"engine 0 takes no requests: {reason}"
    assert own.frontend.get("/health").status_code == 200
    assert finish(own, pool, [0, 1], [committed(2), committed(2)]).status_code == 200
    assert {served_by(own, pool) for _ in range(2)} == {0, 1}


def test_an_update_that_has_committed_nowhere_leaves_all_engines_as_they_were(
    own: MockedSet, pool: ThreadPoolExecutor
) -> None:
    failed = finish(own, pool, [0, 0], [("out of memory", "internal_error")] * 2)
    assert (failed.status_code, failed.json()["error"]["reason"]) == (500, "internal_error")
    assert {served_by(own, pool) for _ in range(2)} == {0, 1}


def test_a_finish_that_is_sent_again_at_once_waits_for_the_first(own: MockedSet, pool: ThreadPoolExecutor) -> None:
    answers = [pool.submit(own.frontend.post, "/finish_weight_update")]
    own.expect("prepare_weight_update", [{}], [{"weight_digest": DIGEST}] * 2)
    own.expect("get_weight_commit", [], [0, 0])
    calls = [engine.next_call("finish_weight_update") for engine in own.engines]
    answers.append(pool.submit(own.frontend.post, "/finish_weight_update"))
    own.engines[1].reply(calls[1], committed(1))
    # Engine 0 has not committed yet: whoever asks engine 1 now is told that no update is open.
    answers.append(pool.submit(own.frontend.post, "/abort_weight_update"))
    own.expect("abort_weight_update", [], [False, False])
    assert answers[2].result().status_code == 200
    own.engines[0].reply(calls[0], committed(1))
    assert answers[0].result().json()["weight_commit"] == 1
    none_open = ("none is open", "no_update_active")
    own.expect("prepare_weight_update", [{}], [none_open] * 2)
    own.expect("abort_weight_update", [], [False, False])
    own.expect("finish_weight_update", [None], [committed(1)] * 2)
    assert answers[1].result().json()["weight_commit"] == 1
