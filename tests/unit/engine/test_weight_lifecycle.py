"""Updates beside the steps: received while generation goes on, dropped by failure, abort and time, never half done."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.conftest import References
from engine.harness import Engine, Result
from engine.models import TinyModel
from rollspan.digest import weight_digest
from rollspan.protocol.messages import UtilityOutput
from support.gate import Gate

TOKENS = 12
GATE = {"backend": "gate"}


@pytest.fixture
def engine(llama: TinyModel, root: Path) -> Iterator[Engine]:
    engine = Engine(llama, weights_root=str(root))
    yield engine
    assert engine.result_of("abort_weight_update") in (True, False)
    engine.core.abort_requests(list(engine.results))
    engine.run()


@pytest.fixture
def second(other: TinyModel) -> dict[str, torch.Tensor]:
    return load_file(other.path / "model.safetensors")


def check(engine: Engine, references: References) -> None:
    """Asserts which weights the engine computes with."""
    results = engine.generate(list(references), max_tokens=TOKENS)
    assert [result.token_ids for result in results] == list(references.values())


def stamp(engine: Engine) -> tuple[str, int, str]:
    names = ("get_weight_version", "get_weight_commit", "get_weight_digest")
    label, commit, digest = (engine.result_of(name) for name in names)
    assert digest == weight_digest(engine.core._runner._model)
    return label, commit, digest


def state(engine: Engine) -> str:
    engine.step()
    record = engine.result_of("get_weight_history")
    assert engine.core.hello().weight_state == record["state"]
    stats = engine.stats.get(0)
    assert not stats or stats[-1]["weight_state"] == record["state"]
    return str(record["state"])


def failure(answer: Callable[[], UtilityOutput | None], engine: Engine) -> str | None:
    """Reason of a call's failure, once it is answered."""
    engine.step_until(answer)
    reply = answer()
    assert reply is not None
    return reply.reason


def running(engine: Engine) -> Result:
    result = engine.add("r", (1, 2, 3), max_tokens=200)
    engine.step_until(lambda: len(result.token_ids) >= 3)
    return result


def test_steps_go_on_while_an_update_is_received(
    engine: Engine, gate: Gate, second: dict[str, torch.Tensor], after: References
) -> None:
    result = running(engine)
    engine.result_of("start_weight_update")
    assert state(engine) == "updating"
    answer = engine.start_call("update_weights", GATE)
    for name, tensor in second.items():
        gate.await_reader()
        before = len(result.token_ids)
        engine.step()
        assert len(result.token_ids) == before + 1
        assert answer() is None
        gate.send({name: tensor})
    gate.end()
    assert failure(answer, engine) is None
    assert result.stamps == [("default", 0)] * len(result.stamps)
    assert engine.result_of("finish_weight_update", "new")["weight_commit"] == 1
    engine.run()
    assert [one for one, _ in itertools.groupby(result.stamps)] == [("default", 0), ("new", 1)]
    check(engine, after)
    assert state(engine) == "ready"


def test_calls_of_one_update_are_done_in_order_though_nobody_waits(
    engine: Engine, gate: Gate, second: dict[str, torch.Tensor], after: References
) -> None:
    names = sorted(second)
    engine.result_of("start_weight_update")
    answers = [engine.start_call("update_weights", GATE) for _ in range(2)]
    answers += [engine.start_call("finish_weight_update", "new") for _ in range(2)]  # the second one is a retry
    for part in range(2):
        gate.send({name: second[name] for name in names[part::2]})
        gate.end()
    for answer in answers:
        assert failure(answer, engine) is None
    replies = [answer() for answer in answers[2:]]
    assert [reply.result["weight_commit"] for reply in replies if reply is not None] == [1, 1]
    check(engine, after)


def test_calls_behind_one_that_fails_find_no_update(engine: Engine, root: Path, before: References) -> None:
    engine.result_of("start_weight_update")
    answers = [engine.start_call("update_weights", {"path": path}) for path in ("nowhere", "second")]
    answers.append(engine.start_call("finish_weight_update", "new"))
    reasons = [failure(answer, engine) for answer in answers]
    assert reasons == ["weights_invalid", "no_update_active", "no_update_active"]
    check(engine, before)


class Stuck:
    """Preparing an update, the worker waits for the test."""

    def __init__(self, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reached, self._leave = threading.Event(), threading.Event()
        prepare = runner.prepare

        def wait(new: Any) -> Callable[[], None]:
            self._reached.set()
            assert self._leave.wait(60)
            return prepare(new)

        monkeypatch.setattr(runner, "prepare", wait)

    def await_worker(self) -> None:
        assert self._reached.wait(60)

    def release(self) -> None:
        self._leave.set()


@pytest.mark.parametrize("phase", ["open", "received", "receiving", "verifying", "prepared"])
def test_an_update_can_be_aborted_in_every_phase_and_the_next_one_works(
    engine: Engine, gate: Gate, second: dict[str, torch.Tensor], before: References, after: References,
    phase: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    old = stamp(engine)
    engine.result_of("start_weight_update")
    answer: Callable[[], UtilityOutput | None] | None = None
    if phase == "receiving":
        answer = engine.start_call("update_weights", GATE)
        gate.send({"model.norm.weight": second["model.norm.weight"]})
        gate.await_reader()
    elif phase != "open":
        engine.result_of("update_weights", {"path": "second"})
    stuck: Stuck | None = None
    if phase == "verifying":
        stuck = Stuck(engine.core._runner, monkeypatch)
        answer = engine.start_call("finish_weight_update", "never")
        stuck.await_worker()
    elif phase == "prepared":
        engine.result_of("prepare_weight_update")
    assert engine.result_of("abort_weight_update") is True
    assert answer is None or failure(answer, engine) == "update_aborted"
    assert engine.result_of("abort_weight_update") is False
    assert state(engine) == "ready"
    if stuck is not None:
        check(engine, before)  # the worker is still at it
        stuck.release()
    assert stamp(engine) == old
    check(engine, before)
    failed = engine.result_of("get_weight_history")["failures"]
    expected = {"received": "open"}.get(phase, phase)
    assert [(entry["reason"], entry["phase"]) for entry in failed] == [("update_aborted", expected)]
    for call in ("update_weights", {}), ("finish_weight_update", "x"), ("prepare_weight_update",):
        assert engine.failure_of(*call)[0] == "no_update_active"
    engine.commit("second", "new")
    check(engine, after)
    assert stamp(engine)[:2] == ("new", 1)


def test_an_aborted_call_does_not_hold_up_the_next_update_when_its_sender_keeps_silent(
    engine: Engine, gate: Gate, after: References
) -> None:
    for _ in range(3):
        engine.result_of("start_weight_update")
        answer = engine.start_call("update_weights", GATE)
        gate.await_reader()
        assert engine.result_of("abort_weight_update") is True
        assert failure(answer, engine) == "update_aborted"
    engine.commit("second", "new")
    check(engine, after)
    assert gate.closed == 3


def test_a_sender_that_fails_half_way_changes_nothing(
    engine: Engine, gate: Gate, second: dict[str, torch.Tensor], before: References
) -> None:
    old = stamp(engine)
    names = sorted(second)
    for count in (0, 1, len(names) // 2, len(names)):
        engine.result_of("start_weight_update")
        gate.send({name: second[name] for name in names[:count]})
        gate.fail(ZeroDivisionError("a bug of the sender"))
        assert engine.failure_of("update_weights", GATE) == ("internal_error", "ZeroDivisionError: a bug of the sender")
        assert stamp(engine) == old
    check(engine, before)
    assert engine.stats[0][-1]["weight_updates"] == {"success": 0, "failure": 4}


@pytest.mark.parametrize("silent", ["between calls", "in a call"])
def test_an_update_without_progress_is_dropped(
    llama: TinyModel, root: Path, gate: Gate, before: References, after: References, silent: str
) -> None:
    engine = Engine(llama, weights_root=str(root), weight_update_timeout=0.05)
    engine.result_of("start_weight_update")
    answer = engine.start_call("update_weights", GATE) if silent == "in a call" else None
    engine.step_until(lambda: not engine.core.weights.updating)
    assert answer is None or failure(answer, engine) == "update_aborted"
    (failed,) = engine.result_of("get_weight_history")["failures"]
    assert failed["reason"] == "update_aborted"
    assert "0.05 s (--weight-update-timeout)" in failed["message"]
    check(engine, before)
    engine.commit("second")
    check(engine, after)


def test_a_trainer_is_joined_once_for_many_updates(
    engine: Engine, gate: Gate, second: dict[str, torch.Tensor], after: References
) -> None:
    engine.result_of("init_weight_transfer_engine", {"backend": "gate", "rank": 1})
    assert gate.joined == [{"rank": 1}]
    for commit in (1, 2):
        engine.result_of("start_weight_update")
        gate.send(second)
        gate.end()
        engine.result_of("update_weights", {})
        assert engine.result_of("finish_weight_update")["weight_commit"] == commit
    assert gate.closed == 0
    check(engine, after)
    engine.result_of("shutdown_weight_transfer_engine")
    assert gate.closed == 1
    engine.result_of("start_weight_update")
    assert engine.failure_of("update_weights", {}) == ("weights_invalid", "update_info.path is required")


def test_joining_is_given_up_when_the_trainer_starts_anew_or_shuts_down(engine: Engine, gate: Gate) -> None:
    first = engine.start_call("init_weight_transfer_engine", {"backend": "gate", "silent": True})
    gate.await_reader()
    engine.result_of("init_weight_transfer_engine", {"backend": "gate", "number": 2})
    assert failure(first, engine) == "update_aborted"
    assert gate.joined == [{"number": 2}]
    third = engine.start_call("init_weight_transfer_engine", {"backend": "gate", "silent": True})
    gate.await_reader()
    engine.result_of("shutdown_weight_transfer_engine")
    assert failure(third, engine) == "update_aborted"
    assert gate.closed == 3


def test_joining_has_an_end_though_the_trainer_never_comes(llama: TinyModel, gate: Gate) -> None:
    engine = Engine(llama, weight_update_timeout=0.05)
    reason, message = engine.failure_of("init_weight_transfer_engine", {"backend": "gate", "silent": True})
    assert reason == "transfer_failed"
    assert "(--weight-update-timeout)" in message


def test_no_trainer_joins_or_leaves_during_an_update(engine: Engine, gate: Gate) -> None:
    engine.result_of("start_weight_update")
    for call in ("init_weight_transfer_engine", {"backend": "gate"}), ("shutdown_weight_transfer_engine",):
        assert engine.failure_of(*call)[0] == "update_active"
    assert gate.joined == []


def test_an_update_outlives_the_frontend_that_opened_it_and_others_can_drop_it(engine: Engine, gate: Gate) -> None:
    engine.core.add_client(1)
    engine.start_call("start_weight_update", client=1)
    engine.start_call("update_weights", GATE, client=1)
    gate.await_reader()
    engine.core.remove_client(1)
    assert state(engine) == "updating"
    assert engine.failure_of("start_weight_update")[0] == "update_active"
    assert engine.result_of("abort_weight_update") is True
    assert state(engine) == "ready"


def test_memory_of_weights_that_were_replaced_or_dropped_is_given_back(
    engine: Engine, gate: Gate, second: dict[str, torch.Tensor]
) -> None:
    name = "model.norm.weight"
    alive = []
    for outcome in ("commit", "abort", "commit", "fail"):
        array = second[name].numpy().copy()
        alive.append(weakref.ref(array))
        gate.send({key: tensor for key, tensor in second.items() if key != name})
        gate.give(name, torch.from_numpy(array))
        del array
        gate.end()
        engine.result_of("start_weight_update")
        engine.result_of("update_weights", GATE)
        if outcome == "commit":
            engine.result_of("finish_weight_update")
        elif outcome == "abort":
            engine.result_of("abort_weight_update")
        else:
            assert engine.failure_of("finish_weight_update", None, {"digest": "blake3:" + "0" * 64})
    engine.result_of("check_weights", "checksum")  # behind all that the worker had to do
    assert [array() is not None for array in alive] == [False, False, True, False]


def test_a_transfer_that_does_not_stop_is_left_to_itself(
    engine: Engine, gate: Gate, after: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollspan.weights.operations.STUCK_SECONDS", 0.05)
    gate.deaf = True  # as a read from a file system that is gone
    engine.result_of("start_weight_update")
    answer = engine.start_call("update_weights", GATE)
    gate.await_reader()
    engine.result_of("abort_weight_update")
    assert failure(answer, engine) == "update_aborted"
    engine.commit("second", "new")
    check(engine, after)
    gate.end()  # it comes back after all, and changes nothing
    engine.result_of("check_weights", "checksum")
    assert stamp(engine)[:2] == ("new", 1)


def test_what_computes_is_waited_for_however_long_it_takes(
    engine: Engine, after: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollspan.weights.operations.STUCK_SECONDS", 0.0)
    stuck = Stuck(engine.core._runner, monkeypatch)
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "first"})
    answer = engine.start_call("finish_weight_update", "never")
    stuck.await_worker()
    threads = set(threading.enumerate())
    engine.result_of("abort_weight_update")
    assert failure(answer, engine) == "update_aborted"
    engine.result_of("start_weight_update")
    received = engine.start_call("update_weights", {"path": "second"})
    engine.run()
    assert set(threading.enumerate()) <= threads  # none writes to what the worker may still write to
    assert received() is None
    stuck.release()
    assert failure(received, engine) is None
    engine.result_of("finish_weight_update", "new")
    check(engine, after)


def test_the_worker_ends_with_its_engine(llama: TinyModel) -> None:
    threads = set(threading.enumerate())
    engine = Engine(llama)
    engine.result_of("get_weight_digest")
    (thread,) = set(threading.enumerate()) - threads
    assert thread.name == "weights"
    core = weakref.ref(engine.core)
    del engine
    gc.collect()
    assert core() is None
    thread.join(60)
    assert not thread.is_alive()
