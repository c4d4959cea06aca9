"""Bounds on the age of weights: requests that wait for a commit or are refused, and outputs that one leaves behind."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.harness import Engine, Result
from engine.models import TinyModel
from rollspan.engine import bounds
from rollspan.protocol.messages import FinishReason
from rollspan.provenance import Provenance

PROMPT = (5, 6, 7)
PATIENT = Provenance(min_weight_commit=1, weight_wait_s=1000)


@pytest.fixture
def root(tmp_path: Path, llama: TinyModel) -> Path:
    shutil.copytree(llama.path, tmp_path / "root" / "same")
    return tmp_path / "root"


@pytest.fixture(params=[False, True], ids=["step by step", "asynchronous"])
def engine(request: pytest.FixtureRequest, llama: TinyModel, root: Path) -> Engine:
    return Engine(llama, weights_root=str(root), async_scheduling=request.param)


def refused(engine: Engine, result: Result) -> str:
    """The message with which a request was refused because the weights are too old."""
    assert (result.token_ids, result.finish_reason) == ([], FinishReason.ERROR)
    assert result.error is not None
    assert (result.error.code, result.error.reason) == ("stale_weights", "stale_weights")
    assert (result.error.param, result.error.retryable) == ("min_weight_commit", True)
    assert not engine.core.scheduler.requests
    return result.error.message


def waiting(engine: Engine) -> int:
    """Requests that wait, as frontends are told."""
    engine.core.report()
    engine.step()
    return int(engine.stats[0][-1]["num_waiting_reqs"])


def test_a_commit_that_is_new_enough_is_not_waited_for(engine: Engine) -> None:
    engine.commit("same", "B")
    result = engine.add("r", PROMPT, max_tokens=2, provenance=PATIENT)
    engine.run()
    assert result.stamps == [("B", 1)] * 2


@pytest.mark.parametrize(
    ("provenance", "updating", "words"),
    [
        (Provenance(min_weight_commit=1), True, "the request does not wait"),
        (Provenance(min_weight_commit=1), False, "the request does not wait"),
        (PATIENT, False, "no update is open"),
    ],
)
def test_a_request_that_has_nothing_to_wait_for_is_refused_at_once(
    engine: Engine, provenance: Provenance, updating: bool, words: str
) -> None:
    if updating:
        engine.result_of("start_weight_update")
    result = engine.add("r", PROMPT, provenance=provenance)
    engine.step()
    assert refused(engine, result) == (f"the request needs weight commit 1 or newer, in force is 0: {words}")


def test_who_waits_is_admitted_with_the_commit_and_in_order(engine: Engine) -> None:
    engine.result_of("start_weight_update")
    names = [f"r{number}" for number in range(3)]
    results = [engine.add(name, PROMPT, max_tokens=2, provenance=PATIENT) for name in names]
    other = engine.add("other", PROMPT, max_tokens=2)
    engine.run()
    assert other.stamps == [("default", 0)] * 2
    assert waiting(engine) == 3
    assert [result.outputs for result in results] == [[], [], []]
    engine.commit_open("same", "B")
    assert list(engine.core.scheduler.requests) == names
    engine.run()
    assert waiting(engine) == 0
    for result in results:
        assert result.stamps == [("B", 1)] * 2
        assert set(result.admissions) == {("B", 1)}


def test_an_update_that_comes_to_nothing_refuses_who_waits_for_it(engine: Engine) -> None:
    engine.result_of("start_weight_update")
    result = engine.add("r", PROMPT, provenance=PATIENT)
    assert engine.failure_of("update_weights", {"path": "nowhere"})[0] == "weights_invalid"
    engine.step()
    assert "the update that was open has not brought it" in refused(engine, result)
    assert not engine.core.has_work()


def test_a_commit_that_is_still_too_old_refuses_who_waits_for_more(engine: Engine) -> None:
    engine.result_of("start_weight_update")
    results = [
        engine.add(f"r{least}", PROMPT, max_tokens=1, provenance=Provenance(min_weight_commit=least, weight_wait_s=99))
        for least in (1, 2)
    ]
    engine.commit_open("same", "B")
    engine.run()
    assert results[0].stamps == [("B", 1)]
    assert "needs weight commit 2 or newer, in force is 1" in refused(engine, results[1])


def test_a_wait_ends_when_its_time_is_over(engine: Engine) -> None:
    engine.result_of("start_weight_update")
    patient = engine.add("patient", PROMPT, provenance=PATIENT)
    result = engine.add("r", PROMPT, provenance=Provenance(min_weight_commit=1, weight_wait_s=1e-3))
    assert engine.core.next_deadline() is not None
    assert not engine.core.has_work()
    engine.step_until(lambda: result.finish_reason is not None)
    assert "its time to wait is over" in refused(engine, result)
    assert patient.outputs == []
    assert waiting(engine) == 1
    engine.core.abort_requests(["patient"])
    assert waiting(engine) == 0


def test_a_time_longer_than_any_clock_can_be_waited_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = threading.Event()
    runner, prepare = engine.core._runner, engine.core._runner.prepare
    monkeypatch.setattr(runner, "prepare", lambda new: prepare(new) if verify.wait(60) else None)
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "same"})
    answer = engine.start_call("finish_weight_update", "new")  # while it is verified, the update has no deadline
    result = engine.add("r", PROMPT, provenance=Provenance(min_weight_commit=1, weight_wait_s=1e300), max_tokens=2)
    while engine.core.has_work():
        engine.step()
    deadline = engine.core.next_deadline()
    assert deadline is not None
    assert deadline - time.monotonic() < threading.TIMEOUT_MAX
    verify.set()
    engine.core.wait()
    engine.step_until(lambda: answer() and result.finish_reason)
    assert result.stamps == [("new", 1)] * 2


def test_who_waits_can_be_aborted_and_its_id_is_taken_until_then(engine: Engine) -> None:
    engine.result_of("start_weight_update")
    engine.add("r", PROMPT, provenance=PATIENT)
    second = engine.add("r", PROMPT, provenance=PATIENT)
    engine.step()
    assert second.error is not None
    assert second.error.code == "duplicate_request_id"
    engine.core.abort_requests(["r"])
    again = engine.add("r", PROMPT, max_tokens=1)
    engine.commit_open("same", "B")
    engine.run()
    assert len(again.token_ids) == 1
    assert len(again.outputs) == 1


def test_who_waits_goes_with_its_frontend(engine: Engine) -> None:
    engine.core.add_client(1)
    engine.result_of("start_weight_update")
    mine = engine.add("a", PROMPT, max_tokens=1, provenance=PATIENT)
    theirs = engine.add("b", PROMPT, max_tokens=1, provenance=PATIENT, client=1)
    engine.core.remove_client(1)
    engine.commit_open("same", "B")
    engine.run()
    assert (len(mine.token_ids), theirs.outputs) == (1, [])


def test_a_pause_that_aborts_ends_who_waits(engine: Engine) -> None:
    engine.result_of("start_weight_update")
    result = engine.add("r", PROMPT, provenance=PATIENT)
    engine.result_of("pause_generation", "abort", True)
    assert (result.finish_reason, result.token_ids) == (FinishReason.ABORT, [])
    assert waiting(engine) == 0


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_during_a_pause_who_waited_is_admitted_and_runs_after_it(engine: Engine, mode: str) -> None:
    engine.result_of("start_weight_update")
    result = engine.add("r", PROMPT, max_tokens=2, provenance=PATIENT)
    engine.result_of("pause_generation", mode, False)
    engine.result_of("update_weights", {"path": "same"})
    engine.result_of("finish_weight_update", "B")
    engine.run()
    assert result.outputs == []
    engine.result_of("set_weight_version", "N")
    engine.result_of("resume_scheduler")
    engine.run()
    assert set(result.admissions) == {("B", 1)}
    assert result.stamps == [("N", 1)] * 2


def test_what_cannot_be_run_is_refused_before_it_waits(engine: Engine) -> None:
    engine.result_of("start_weight_update")
    result = engine.add("r", (10**6,), provenance=PATIENT)
    engine.step()
    assert result.error is not None
    assert result.error.code == "validation_error"


def test_no_more_wait_than_there_is_room_for(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_HELD", 1)
    engine.result_of("start_weight_update")
    first, second = (engine.add(name, PROMPT, provenance=PATIENT) for name in "ab")
    engine.step()
    assert first.outputs == []
    assert second.error is not None
    assert (second.error.code, second.error.retryable) == ("queue_full", True)
    engine.core.abort_requests(["a"])


def lagging(engine: Engine, lag: int | None, name: str = "r", **params: Any) -> Result:
    return engine.add(name, PROMPT, max_tokens=30, provenance=Provenance(max_weight_lag=lag), **params)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_output_ends_at_the_commit_that_leaves_its_first_token_too_far_behind(engine: Engine, lag: int) -> None:
    result, free = lagging(engine, lag), lagging(engine, None, "free")
    for commit in range(lag + 1):
        length = len(result.token_ids)
        engine.step_until(lambda: len(result.token_ids) > length)  # noqa: B023 (called at once)
        assert result.finish_reason is None
        engine.commit("same", f"v{commit + 1}")
    assert (result.finish_reason, result.stop_reason, result.error) == (FinishReason.ABORT, "stale_weights", None)
    assert result.outputs[-1].new_token_ids == []
    assert set(result.admissions) == {("default", 0)}
    tokens = len(result.token_ids)
    assert tokens > lag
    assert {commit for _, commit in result.stamps} == set(range(lag + 1))
    engine.run()
    assert len(result.token_ids) == tokens
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 30)
    assert free.token_ids[:tokens] == result.token_ids


def test_only_outputs_fall_behind_and_only_commits_count(engine: Engine) -> None:
    engine.result_of("pause_generation", "keep", False)
    queued = lagging(engine, 0)
    engine.commit("same", "B")
    engine.step_until(lambda: queued.token_ids)
    engine.result_of("set_weight_version", "N")
    engine.result_of("reset_prefix_cache", True)
    engine.run()
    assert (queued.finish_reason, len(queued.token_ids)) == (FinishReason.LENGTH, 30)
    assert {commit for _, commit in queued.stamps} == {1}


def test_an_output_that_waits_for_blocks_falls_behind_as_well(engine: Engine) -> None:
    result = lagging(engine, 0)
    engine.step_until(lambda: result.token_ids)
    engine.result_of("pause_generation", "keep", True)
    engine.commit("same", "B")
    assert (result.finish_reason, result.stop_reason) == (FinishReason.ABORT, "stale_weights")


def test_an_update_that_fails_leaves_nobody_behind(engine: Engine) -> None:
    result = lagging(engine, 0)
    engine.step_until(lambda: result.token_ids)
    engine.result_of("start_weight_update")
    engine.failure_of("update_weights", {"path": "nowhere"})
    engine.run()
    assert (result.finish_reason, len(result.token_ids)) == (FinishReason.LENGTH, 30)
