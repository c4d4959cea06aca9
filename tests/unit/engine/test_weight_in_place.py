"""Updates in place: little memory, a pause, and an engine that knows when its weights are a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.conftest import References
from engine.harness import Engine
from engine.models import TinyModel
from rollspan.digest import weight_digest
from support.gate import Gate

TOKENS = 12
GATE = {"backend": "gate"}
NORM = "model.norm.weight"


@pytest.fixture
def engine(llama: TinyModel, root: Path) -> Engine:
    return Engine(llama, weights_root=str(root), weight_update_mode="in_place")


@pytest.fixture
def second(other: TinyModel) -> dict[str, torch.Tensor]:
    return load_file(other.path / "model.safetensors")


def check(engine: Engine, references: References) -> None:
    results = engine.generate(list(references), max_tokens=TOKENS)
    assert [result.token_ids for result in results] == list(references.values())


def state(engine: Engine) -> str:
    engine.step()
    found = engine.result_of("get_weight_history")["state"]
    assert found == engine.stats[0][-1]["weight_state"] == engine.core.hello().weight_state
    return str(found)


def pause(engine: Engine, mode: str = "keep") -> None:
    engine.result_of("pause_generation", mode, False)


def cut_off(engine: Engine, gate: Gate, tensors: dict[str, torch.Tensor], how: str) -> None:
    """Opens an update in place, hands tensors over, and breaks it off."""
    engine.result_of("start_weight_update")
    gate.send(tensors)
    if how == "abort":
        answer = engine.start_call("update_weights", GATE)
        gate.await_reader()
        engine.result_of("abort_weight_update")
        engine.step_until(answer)
        reply = answer()
        assert reply is not None
        assert reply.reason == "update_aborted"
    elif how == "failure":
        gate.fail(ZeroDivisionError())
        assert engine.failure_of("update_weights", GATE)[0] == "internal_error"
    else:
        gate.end()
        engine.result_of("update_weights", GATE)
        options = {"digest": "blake3:" + "0" * 64, "partial": True} if how == "digest" else {}
        expected = "digest_mismatch" if how == "digest" else "weights_invalid"
        assert engine.failure_of("finish_weight_update", None, options)[0] == expected


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_tensors_go_straight_into_the_model(
    engine: Engine, gate: Gate, second: dict[str, torch.Tensor], after: References, mode: str, other: TinyModel
) -> None:
    parameters = {name: tensor.data_ptr() for name, tensor in engine.core._runner._model.state_dict().items()}
    pause(engine, mode)
    engine.result_of("start_weight_update")
    answer = engine.start_call("update_weights", GATE)
    gate.send({NORM: second[NORM]})
    gate.await_reader()
    assert torch.equal(engine.parameters(NORM)[0], second[NORM])
    gate.send({name: tensor for name, tensor in second.items() if name != NORM})
    gate.end()
    engine.step_until(answer)
    assert engine.result_of("finish_weight_update", "new")["weight_digest"] == weight_digest(other.model)
    engine.result_of("resume_scheduler")
    assert {name: t.data_ptr() for name, t in engine.core._runner._model.state_dict().items()} == parameters
    check(engine, after)
    assert engine.result_of("get_weight_commit") == 1


def test_it_needs_a_pause_under_which_nothing_runs(engine: Engine) -> None:
    assert engine.failure_of("start_weight_update")[0] == "pause_required"
    engine.add("r", (1, 2), max_tokens=100)
    engine.step()
    waiting = engine.start_call("pause_generation", "wait", False)
    assert engine.failure_of("start_weight_update")[0] == "pause_required"
    engine.step_until(waiting)
    engine.result_of("start_weight_update")


def test_the_mode_of_one_update_may_be_another(engine: Engine, after: References) -> None:
    engine.result_of("start_weight_update", {"mode": "staged"})
    engine.result_of("update_weights", {"path": "second"})
    engine.result_of("finish_weight_update")
    check(engine, after)
    for wrong in ({"mode": "x"}, {"mode": 1}, {"mod": "staged"}, 7):
        assert engine.failure_of("start_weight_update", wrong)[0] in ("invalid_request", "unsupported_field")


def test_nothing_goes_on_while_it_is_open(engine: Engine) -> None:
    result = engine.add("r", (1, 2), max_tokens=20)
    engine.step()
    pause(engine)
    engine.result_of("start_weight_update")
    before = len(result.token_ids)
    assert engine.failure_of("resume_scheduler")[0] == "update_active"
    assert engine.failure_of("pause_generation", "wait")[0] == "update_active"
    for _ in range(3):
        engine.step()
    assert len(result.token_ids) == before
    assert engine.result_of("is_scheduler_paused") is True
    engine.result_of("abort_weight_update")  # before anything came
    assert state(engine) == "ready"
    engine.result_of("resume_scheduler")
    engine.run()
    assert len(result.token_ids) == 20


def test_an_update_that_writes_nothing_derives_nothing_either(
    engine: Engine, gate: Gate, before: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause(engine)
    engine.result_of("start_weight_update")
    gate.end()
    engine.result_of("update_weights", GATE)
    # Aborted now, the engine may compute before the worker has noticed.
    monkeypatch.setattr(engine.core._runner, "after_commit", None)
    digest = engine.result_of("prepare_weight_update", {"partial": True})["weight_digest"]
    assert engine.result_of("finish_weight_update", None, {"partial": True})["weight_digest"] == digest
    engine.result_of("resume_scheduler")
    check(engine, before)


@pytest.mark.parametrize("how", ["abort", "failure"])
def test_what_is_cut_off_before_the_first_byte_has_changed_nothing(
    engine: Engine, gate: Gate, before: References, how: str
) -> None:
    pause(engine)
    cut_off(engine, gate, {}, how)
    assert state(engine) == "ready"
    engine.result_of("resume_scheduler")
    check(engine, before)


def test_a_tensor_that_does_not_fit_is_noticed_before_it_is_written(
    engine: Engine, gate: Gate, before: References
) -> None:
    pause(engine)
    engine.result_of("start_weight_update")
    gate.send({NORM: torch.zeros(31)})
    gate.end()
    assert engine.failure_of("update_weights", GATE)[0] == "weights_invalid"
    assert state(engine) == "ready"
    engine.result_of("resume_scheduler")
    check(engine, before)


@pytest.mark.parametrize("heal", ["staged", "in_place"])
@pytest.mark.parametrize("how", ["abort", "failure", "digest", "missing"])
def test_what_is_cut_off_half_way_is_inconsistent_until_a_complete_update(
    engine: Engine, gate: Gate, second: dict[str, torch.Tensor], after: References, how: str, heal: str
) -> None:
    kept = engine.add("kept", (1, 2, 3), max_tokens=20)
    engine.step()
    pause(engine)
    cut_off(engine, gate, {NORM: second[NORM]}, how)
    assert state(engine) == "inconsistent"
    assert engine.result_of("get_weight_history")["weight_digest"] is None
    assert engine.failure_of("get_weight_digest")[0] == "weights_inconsistent"
    refused = engine.add("refused", (1, 2))
    engine.step()
    assert refused.error is not None
    assert (refused.error.code, refused.error.reason) == ("weights_inconsistent", "weights_inconsistent")
    for call in ("resume_scheduler",), ("pause_generation", "wait"):
        assert engine.failure_of(*call)[0] == "weights_inconsistent"
    tokens = len(kept.token_ids)
    for _ in range(3):
        engine.step()
    assert len(kept.token_ids) == tokens
    for finish in ({"partial": True}, {"partial": False}):  # half an update does not mend it
        engine.result_of("start_weight_update", {"mode": heal})
        gate.send({NORM: second[NORM]})
        gate.end()
        engine.result_of("update_weights", GATE)
        assert engine.failure_of("finish_weight_update", None, finish)[0] == "weights_invalid"
    engine.result_of("start_weight_update", {"mode": heal})
    assert engine.failure_of("update_weights", GATE | {"delta": {"base_commit": 0}})[0] == "base_mismatch"
    assert state(engine) == "inconsistent"
    engine.result_of("start_weight_update", {"mode": heal})
    engine.result_of("update_weights", {"path": "second"})
    assert engine.result_of("finish_weight_update", "healed")["weight_commit"] == 1
    assert state(engine) == "ready"
    engine.result_of("resume_scheduler")
    engine.run()
    assert (len(kept.token_ids), kept.stamps[-1]) == (20, ("healed", 1))
    check(engine, after)


def test_deltas_and_parts_in_place(engine: Engine, gate: Gate) -> None:
    model = engine.core._runner._model
    pause(engine)
    engine.result_of("start_weight_update")
    gate.send({f"{NORM}.indices": torch.tensor([4]), f"{NORM}.values": torch.tensor([8.0])})
    gate.end()
    engine.result_of("update_weights", GATE | {"delta": {"base_commit": 0}})
    answer: dict[str, Any] = engine.result_of("finish_weight_update")
    assert answer["weight_digest"] == weight_digest(model)
    assert model.state_dict()[NORM][4] == 8.0
    assert engine.result_of("get_weight_history")["commits"][-1]["partial"] is True


def test_less_memory_is_asked_for(engine: Engine) -> None:
    largest = max(tensor.nbytes for tensor in engine.core._runner._model.state_dict().values())
    assert engine.result_of("server_info")["weight_staging_bytes"] == largest
