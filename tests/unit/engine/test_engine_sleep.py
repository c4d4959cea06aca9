"""Sleep: memory is given back at two levels, nobody is served from what is not there, and what was kept goes on."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import References
from engine.harness import Engine
from engine.models import TinyModel
from rollspan.protocol.messages import FinishReason

TOKENS = 12


@pytest.fixture
def engine(llama: TinyModel, root: Path) -> Engine:
    return Engine(llama, weights_root=str(root))


def check(engine: Engine, references: References) -> None:
    results = engine.generate(list(references), max_tokens=TOKENS)
    assert [result.token_ids for result in results] == list(references.values())


def state(engine: Engine) -> str:
    engine.step()
    found = engine.result_of("get_weight_history")["state"]
    assert found == engine.stats[0][-1]["weight_state"] == engine.core.hello().weight_state
    return str(found)


def kv_bytes(engine: Engine) -> int:
    cache = engine.core._runner._context.cache
    return int(sum(tensor.nbytes for _, pair in cache._layers.values() for tensor in pair))


def weight_bytes(engine: Engine) -> int:
    return sum(tensor.nbytes for tensor in engine.core._runner._model.state_dict().values())


def refused(engine: Engine) -> str:
    """Reason with which a request is refused."""
    name = f"refused {len(engine.results)}"
    result = engine.add(name, (1, 2), max_tokens=2)
    engine.step()
    assert result.error is not None
    assert result.error.retryable
    assert result.error.code == result.error.reason
    return str(result.error.reason)


def test_level_one_frees_the_kv_cache_and_keeps_the_weights(engine: Engine, before: References) -> None:
    check(engine, before)
    weights = weight_bytes(engine)
    assert kv_bytes(engine) > 0
    engine.result_of("sleep")
    assert engine.result_of("is_sleeping") is True
    assert state(engine) == "sleeping"
    assert (kv_bytes(engine), weight_bytes(engine)) == (0, weights)
    assert engine.core.scheduler.pool.num_cached == 0
    assert refused(engine) == "engine_sleeping"
    engine.result_of("wake_up")
    assert engine.result_of("is_sleeping") is False
    assert state(engine) == "ready"
    check(engine, before)
    assert engine.result_of("get_weight_commit") == 0


def test_level_two_drops_the_weights_until_a_complete_update(
    engine: Engine, before: References, after: References
) -> None:
    check(engine, before)
    weights = weight_bytes(engine)
    engine.result_of("sleep", 2)
    assert weight_bytes(engine) == 0
    assert state(engine) == "sleeping"
    assert engine.failure_of("start_weight_update")[0] == "engine_sleeping"
    assert engine.failure_of("get_weight_digest")[0] == "engine_sleeping"
    assert engine.failure_of("check_weights", "checksum")[0] == "engine_sleeping"
    engine.result_of("wake_up", ["weights"])
    assert (state(engine), engine.result_of("is_sleeping"), weight_bytes(engine)) == ("inconsistent", True, weights)
    assert refused(engine) == "weights_inconsistent"
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "second"})
    engine.result_of("finish_weight_update", "woken")
    assert state(engine) == "sleeping"
    assert refused(engine) == "engine_sleeping"
    engine.result_of("wake_up", ["kv_cache"])
    assert state(engine) == "ready"
    check(engine, after)


def test_waking_up_all_at_once_from_level_two_leaves_weights_without_values(engine: Engine, after: References) -> None:
    engine.result_of("sleep", 2, "keep")
    engine.result_of("wake_up")
    assert state(engine) == "inconsistent"
    assert refused(engine) == "weights_inconsistent"
    assert engine.failure_of("resume_scheduler")[0] == "weights_inconsistent"
    engine.commit("second")
    check(engine, after)


def test_an_update_goes_on_while_only_the_kv_cache_sleeps(engine: Engine, after: References) -> None:
    engine.result_of("sleep")
    assert engine.failure_of("start_weight_update")[0] == "engine_sleeping"
    engine.result_of("wake_up", ["weights"])
    engine.result_of("start_weight_update", {"mode": "in_place"})
    engine.result_of("update_weights", {"path": "second"})
    engine.result_of("finish_weight_update")
    engine.result_of("wake_up")
    check(engine, after)


@pytest.mark.parametrize("level", [1, 2])
def test_requests_that_were_kept_go_on_when_the_engine_is_awake(
    engine: Engine, before: References, after: References, level: int
) -> None:
    results = [engine.add(f"r{i}", prompt, max_tokens=TOKENS) for i, prompt in enumerate(before)]
    for _ in range(5):
        engine.step()
    counts = [len(result.token_ids) for result in results]
    assert sum(counts) > 0
    engine.result_of("sleep", level, "keep")
    for _ in range(3):
        engine.step()
    assert [len(result.token_ids) for result in results] == counts
    engine.result_of("wake_up")
    if level == 2:
        engine.commit("first", "again")
    engine.run()
    assert [result.token_ids for result in results] == list(before.values())  # the same weights, or equal ones
    stamps = [[stamp for stamp, _ in itertools.groupby(result.stamps)] for result in results]
    assert stamps == [[("default", 0)] if level == 1 else [("default", 0), ("again", 1)]] * len(results)


def test_the_mode_decides_what_becomes_of_running_requests(engine: Engine) -> None:
    aborted = engine.add("aborted", (1, 2), max_tokens=50)
    engine.step()
    engine.result_of("sleep")
    assert aborted.finish_reason is FinishReason.ABORT
    engine.result_of("wake_up")
    finished = engine.add("finished", (1, 2), max_tokens=9)
    engine.step()
    engine.result_of("sleep", 1, "wait")
    assert finished.finish_reason is FinishReason.LENGTH
    assert len(finished.token_ids) == 9
    engine.result_of("wake_up")
    assert engine.result_of("is_scheduler_paused") is False


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_survives_the_sleep(engine: Engine, mode: str) -> None:
    engine.result_of("pause_generation", mode)
    engine.result_of("sleep")
    engine.result_of("wake_up")
    assert engine.result_of("is_scheduler_paused") is True
    engine.result_of("resume_scheduler")
    assert len(engine.generate([(1, 2)], max_tokens=3)[0].token_ids) == 3


def test_a_pause_that_comes_during_the_sleep_holds_afterwards(engine: Engine) -> None:
    engine.result_of("sleep", 1, "keep")
    engine.result_of("pause_generation", "abort")
    assert engine.failure_of("resume_scheduler")[0] == "engine_sleeping"
    assert engine.result_of("is_scheduler_paused") is True
    engine.result_of("wake_up")
    assert refused(engine) == "engine_paused"
    engine.result_of("resume_scheduler")
    assert len(engine.generate([(1, 2)], max_tokens=3)[0].token_ids) == 3


def test_sleeping_twice_goes_to_the_deeper_level_and_waking_up_twice_does_nothing(
    engine: Engine, before: References
) -> None:
    engine.result_of("wake_up")
    assert state(engine) == "ready"
    for level in (1, 1, 2, 1):
        engine.result_of("sleep", level, "keep")
    assert weight_bytes(engine) == 0
    engine.result_of("wake_up")
    engine.result_of("wake_up", ["weights"])
    engine.commit("first")
    assert engine.result_of("is_scheduler_paused") is False
    check(engine, before)


def test_nobody_sleeps_during_an_update(engine: Engine) -> None:
    result = engine.add("r", (1, 2), max_tokens=9)
    engine.step()
    engine.result_of("start_weight_update")
    assert engine.failure_of("sleep", 1, "abort")[0] == "update_active"
    engine.run()
    assert len(result.token_ids) == 9  # a refusal pauses nothing


def test_an_update_that_starts_while_the_sleep_waits_keeps_the_engine_awake(engine: Engine) -> None:
    result = engine.add("r", (1, 2), max_tokens=9)
    engine.step()
    sleep = engine.start_call("sleep", 1, "wait")
    engine.result_of("start_weight_update")
    engine.step_until(sleep)
    reply = sleep()
    assert reply is not None
    assert reply.reason == "update_active"
    assert state(engine) == "updating"
    assert len(result.token_ids) == 9
    engine.result_of("abort_weight_update")
    assert engine.result_of("is_scheduler_paused") is False
    assert len(engine.generate([(1, 2)], max_tokens=3)[0].token_ids) == 3


def test_a_sleep_that_waits_is_superseded_like_a_pause(engine: Engine) -> None:
    engine.add("r", (1, 2), max_tokens=50)
    engine.step()
    sleep = engine.start_call("sleep", 1, "wait")
    engine.result_of("resume_scheduler")
    engine.step_until(sleep)
    reply = sleep()
    assert reply is not None
    assert reply.reason == "pause_superseded"
    assert engine.result_of("is_sleeping") is False
    engine.run()


@pytest.mark.parametrize(
    ("method", "args", "field"),
    [
        ("sleep", (0,), "level"),
        ("sleep", (3,), "level"),
        ("sleep", (True,), "level"),
        ("sleep", ("1",), "level"),
        ("sleep", (1, "stop"), "mode"),
        ("wake_up", ("weights",), "tags"),
        ("wake_up", (["weight"],), "tags"),
        ("wake_up", (7,), "tags"),
    ],
)
def test_wrong_arguments_are_refused_by_name(engine: Engine, method: str, args: Any, field: str) -> None:
    reason, message = engine.failure_of(method, *args)
    assert reason == "invalid_request"
    assert message.startswith(f"{field} must be ")
    assert engine.result_of("is_scheduler_paused") is False


def test_weights_that_sleep_by_the_time_of_their_check_are_not_checked(engine: Engine) -> None:
    busy = threading.Event()
    engine.core.weights._worker.submit(lambda: busy.wait(60))
    sleep = engine.start_call("sleep", 2)
    check = engine.start_call("check_weights", "checksum")
    busy.set()
    engine.step_until(lambda: sleep() and check())
    reply = check()
    assert reply is not None
    assert reply.reason == "engine_sleeping"


def test_the_digest_is_the_same_after_a_light_sleep(engine: Engine) -> None:
    digest = engine.result_of("get_weight_digest")
    engine.result_of("sleep")
    assert engine.result_of("get_weight_digest") == digest
    engine.result_of("wake_up")
    sums = engine.result_of("check_weights", "checksum")["checksums"]
    assert engine.result_of("check_weights", "compare", sums)["match"] is True
    assert engine.result_of("get_weight_digest") == digest
