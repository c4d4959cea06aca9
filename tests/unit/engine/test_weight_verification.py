"""What an update must be: its digest, its parts, deltas, its number; and what is told of it afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.conftest import References
from engine.harness import Engine
from engine.models import CONFIGS, TinyModel, make_model
from rollspan.digest import tensor_digest, weight_digest
from support.gate import Gate

TOKENS = 12
GATE = {"backend": "gate"}
NORM = "model.norm.weight"
WRONG = "blake3:" + "0" * 64


@pytest.fixture
def engine(llama: TinyModel, root: Path) -> Engine:
    return Engine(llama, weights_root=str(root))


@pytest.fixture
def second(other: TinyModel) -> dict[str, torch.Tensor]:
    return load_file(other.path / "model.safetensors")


def check(engine: Engine, references: References) -> None:
    results = engine.generate(list(references), max_tokens=TOKENS)
    assert [result.token_ids for result in results] == list(references.values())


def start(engine: Engine, path: str = "second") -> None:
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": path})


def history(engine: Engine) -> dict[str, Any]:
    record = engine.result_of("get_weight_history")
    assert isinstance(record, dict)
    return record


# Digests


def test_the_digest_is_that_of_the_model_as_anybody_computes_it(
    engine: Engine, llama: TinyModel, other: TinyModel, root: Path
) -> None:
    assert engine.result_of("get_weight_digest") == weight_digest(llama.model)
    start(engine)
    answer = engine.result_of("finish_weight_update", "new", {"digest": weight_digest(other.model)})
    assert answer["weight_digest"] == weight_digest(other.model) == engine.result_of("get_weight_digest")


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_tied_weights_count_once(tiny: Any, kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    engine = Engine(model, weights_root=str(tmp_path))
    assert engine.result_of("get_weight_digest") == weight_digest(model.model)
    fresh = make_model(tmp_path / "fresh", CONFIGS[kind](), seed=5)
    engine.commit("fresh")
    assert engine.result_of("get_weight_digest") == weight_digest(fresh.model)


def test_weights_with_another_digest_than_announced_are_dropped(engine: Engine, before: References) -> None:
    for call in ("prepare_weight_update",), ("finish_weight_update", "never"):
        start(engine)
        reason, message = engine.failure_of(*call, {"digest": WRONG})
        assert reason == "digest_mismatch"
        assert WRONG in message
        assert engine.failure_of("finish_weight_update")[0] == "no_update_active"
    assert engine.result_of("get_weight_commit") == 0
    check(engine, before)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"digest": "blake3:12"}, "weight_digest"),
        ({"digest": WRONG.upper()}, "weight_digest"),
        ({"digest": 7}, "weight_digest"),
        ({"partial": 1}, "partial"),
        ({"commit": 0}, "commit"),
        ({"commit": True}, "commit"),
        ({"commit": 2**60}, "commit"),
        ({"comit": 1}, "comit"),
        ([], "options"),
        ("x", "options"),
    ],
)
def test_options_that_are_none_leave_the_update_open(engine: Engine, options: Any, field: str) -> None:
    start(engine)
    for call in ("prepare_weight_update",), ("finish_weight_update", None):
        reason, message = engine.failure_of(*call, options)
        assert reason in ("invalid_request", "unsupported_field")
        assert field in message
    assert engine.result_of("finish_weight_update")["weight_commit"] == 1


def test_what_was_prepared_is_published_as_it_is(
    engine: Engine, other: TinyModel, before: References, after: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(engine)
    digest = engine.result_of("prepare_weight_update")["weight_digest"]
    assert digest == weight_digest(other.model)
    assert history(engine)["update"]["phase"] == "prepared"
    check(engine, before)
    monkeypatch.setattr("rollspan.weights.staging.tensor_digest", None)  # nothing is digested again
    monkeypatch.setattr(engine.core._runner, "prepare", None)
    assert engine.result_of("prepare_weight_update", {"digest": digest}) == {"weight_digest": digest}
    assert engine.result_of("finish_weight_update", "new", {"digest": digest})["weight_commit"] == 1
    check(engine, after)


def test_what_comes_after_a_preparation_is_verified_as_well(engine: Engine, root: Path, after: References) -> None:
    changed = load_file(root / "second" / "model.safetensors")
    changed[NORM] = changed[NORM] + 1
    (root / "changed").mkdir()
    save_file(changed, root / "changed" / "model.safetensors")
    start(engine, "changed")
    first = engine.result_of("prepare_weight_update")
    engine.result_of("update_weights", {"path": "second"})
    assert history(engine)["update"]["phase"] == "open"
    assert engine.result_of("finish_weight_update")["weight_digest"] != first["weight_digest"]
    check(engine, after)


# Parts


def test_a_partial_update_keeps_what_did_not_come(engine: Engine, gate: Gate) -> None:
    model = engine.core._runner._model
    other_names = [name for name in model.state_dict() if name != NORM]
    old = {name: model.state_dict()[name].clone() for name in other_names}
    for value, commit in ((2.0, 1), (3.0, 2)):
        gate.send({NORM: torch.full((32,), value)})
        gate.end()
        engine.result_of("start_weight_update")
        engine.result_of("update_weights", GATE)
        answer = engine.result_of("finish_weight_update", None, {"partial": True})
        assert answer["weight_commit"] == commit
        assert answer["weight_digest"] == weight_digest(model)
        assert torch.equal(model.state_dict()[NORM], torch.full((32,), value))
        assert all(torch.equal(model.state_dict()[name], old[name]) for name in other_names)
        record = history(engine)["commits"][-1]
        assert (record["partial"], record["tensors"], record["bytes"]) == (True, 1, 128)


@pytest.mark.parametrize("options", [None, {}, {"partial": None}, {"partial": False}])
def test_an_update_that_lacks_parameters_must_say_that_it_is_partial(engine: Engine, gate: Gate, options: Any) -> None:
    gate.send({NORM: torch.zeros(32)})
    gate.end()
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", GATE)
    reason, message = engine.failure_of("finish_weight_update", None, options)
    assert reason == "weights_invalid"
    assert message.startswith("the update lacks 20 of the model's parameters: ")


def test_an_update_for_which_nothing_was_ever_received_is_none_even_if_partial(engine: Engine, gate: Gate) -> None:
    engine.result_of("start_weight_update")
    assert engine.failure_of("finish_weight_update", None, {"partial": True})[0] == "weights_invalid"
    gate.end()  # it is one that says that nothing has changed
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", GATE)
    assert engine.result_of("finish_weight_update", None, {"partial": True})["weight_commit"] == 1


# Deltas


def delta(gate: Gate, indices: list[int], values: list[float], name: str = NORM) -> None:
    gate.send({f"{name}.indices": torch.tensor(indices), f"{name}.values": torch.tensor(values)})
    gate.end()


def test_deltas_change_single_elements_of_the_weights_that_they_name(engine: Engine, gate: Gate) -> None:
    model = engine.core._runner._model
    expected = model.state_dict()[NORM].clone()
    for commit, index in enumerate((3, 5, 3), 1):
        base = {"base_commit": commit - 1, "base_digest": engine.result_of("get_weight_digest")}
        delta(gate, [index, 31], [float(commit), 7.0])
        expected[index], expected[31] = float(commit), 7.0
        engine.result_of("start_weight_update")
        engine.result_of("update_weights", GATE | {"delta": base})
        assert engine.result_of("finish_weight_update")["weight_commit"] == commit
        assert torch.equal(model.state_dict()[NORM], expected)
        assert engine.result_of("get_weight_digest") == weight_digest(model)


def test_deltas_of_one_update_build_on_one_another(engine: Engine, gate: Gate) -> None:
    engine.result_of("start_weight_update")
    for index in (1, 2):
        delta(gate, [index], [9.0])
        engine.result_of("update_weights", GATE | {"delta": {"base_commit": 0}})
    engine.result_of("finish_weight_update")
    assert engine.core._runner._model.state_dict()[NORM][:4].tolist() == [1.0, 9.0, 9.0, 1.0]


@pytest.mark.parametrize("base", [{"base_commit": 1}, {"base_digest": WRONG}, {"base_commit": 0, "base_digest": WRONG}])
def test_a_delta_of_other_weights_is_refused(engine: Engine, gate: Gate, before: References, base: Any) -> None:
    engine.result_of("start_weight_update")
    reason, message = engine.failure_of("update_weights", GATE | {"delta": base})
    assert reason == "base_mismatch"
    assert f"commit 0, digest {engine.result_of('get_weight_digest')}" in message
    assert engine.failure_of("finish_weight_update")[0] == "no_update_active"
    check(engine, before)


@pytest.mark.parametrize(
    "base",
    [{}, [], 7, {"base_commit": -1}, {"base_commit": "0"}, {"base_digest": 0}, {"base": 0}, {"base_commit": None}],
)
def test_a_delta_of_nothing_that_can_be_named_is_refused(engine: Engine, base: Any) -> None:
    engine.result_of("start_weight_update")
    reason, message = engine.failure_of("update_weights", GATE | {"delta": base})
    assert reason == "invalid_request"
    assert message.startswith("update_info.delta must be an object with ")


def test_a_delta_that_must_be_complete_is_refused(engine: Engine, gate: Gate) -> None:
    delta(gate, [1], [9.0])
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", GATE | {"delta": {"base_commit": 0}})
    assert engine.failure_of("finish_weight_update", None, {"partial": False})[0] == "weights_invalid"


# What is told


def test_the_history_tells_what_became_of_the_weights(engine: Engine, llama: TinyModel, root: Path) -> None:
    began = time.time()
    first = engine.result_of("get_weight_digest")
    engine.result_of("set_weight_version", "named")
    start(engine)
    record = history(engine)
    assert record["state"] == "updating"
    assert {**record["update"], "since": None} == {
        "phase": "open",
        "since": None,
        "mode": "staged",
        "tensors": 21,
        "bytes": record["staging_bytes"],
        "source": "disk:second",
    }
    assert began <= record["update"]["since"] <= time.time()
    answer = engine.result_of("finish_weight_update", "step-1")
    start(engine)
    engine.result_of("abort_weight_update")
    record = history(engine)
    assert record["state"] == "ready"
    assert record["update"] is None
    assert (record["engine_index"], record["mode"], record["declared"]) == (0, "staged", True)
    assert {key: record[key] for key in answer} == answer
    kinds = [(one["kind"], one["weight_version"], one["weight_commit"], one["declared"]) for one in record["commits"]]
    assert kinds == [("load", "default", 0, False), ("relabel", "named", 0, True), ("update", "step-1", 1, True)]
    digests = [one["weight_digest"] for one in record["commits"]]
    assert digests == [first, first, answer["weight_digest"]]
    assert [one["source"] for one in record["commits"]] == [f"disk:{llama.path}", "set_weight_version", "disk:second"]
    update = record["commits"][-1]
    assert update["seconds"].keys() == {"receive", "verify", "prepare", "commit"}
    assert update["stall_seconds"] == update["seconds"]["commit"] > 0
    assert (update["tensors"], update["partial"]) == (21, False)
    assert [one["reason"] for one in record["failures"]] == ["update_aborted"]
    assert engine.stats[0][-1]["weight_updates"] == {"success": 1, "failure": 1}
    assert engine.stats[0][-1]["weight_update_seconds"].keys() == {"receive", "verify", "prepare", "commit", "stall"}


def test_the_history_keeps_the_last_thousand_commits_and_hundred_failures(engine: Engine) -> None:
    for number in range(1005):
        engine.core.weights.set_label(number)
    for _ in range(103):
        engine.core.weights.start()
        engine.core.weights.abort()
    record = history(engine)
    assert len(record["commits"]) == 1000
    assert record["commits"][-1]["weight_version"] == "1004"
    assert len(record["failures"]) == 100


def test_the_trainer_may_number_the_commit(engine: Engine) -> None:
    start(engine)
    assert engine.result_of("finish_weight_update", "far", {"commit": 17})["weight_commit"] == 17
    start(engine)
    assert engine.failure_of("finish_weight_update", "far", {"commit": 17})[0] == "invalid_request"
    assert engine.result_of("finish_weight_update", "on")["weight_commit"] == 18
    assert engine.generate([(1, 2)], max_tokens=2)[0].stamps == [("on", 18)] * 2


def test_a_finish_that_is_called_once_more_has_the_same_answer(engine: Engine) -> None:
    start(engine)
    answer = engine.result_of("finish_weight_update", "new")
    for options in ({}, {"digest": answer["weight_digest"]}, {"commit": 9}, {"partial": True}):
        assert engine.result_of("finish_weight_update", "new", options) == answer
    for args in (("other",), (None,), ("new", {"digest": WRONG})):
        assert engine.failure_of("finish_weight_update", *args)[0] == "no_update_active"
    assert engine.failure_of("finish_weight_update", "new", {"commit": 0})[0] == "invalid_request"
    engine.result_of("pause_generation", "keep", False)
    engine.result_of("check_weights", "reset")
    assert engine.failure_of("finish_weight_update", "new")[0] == "no_update_active"  # what it named is gone


@pytest.fixture
def undeclared(llama: TinyModel, root: Path) -> Iterator[Engine]:
    engine = Engine(llama, weights_root=str(root), require_weight_version=True, weight_version="given")
    result = engine.add("early", (1, 2))
    engine.run()
    assert result.error is not None
    assert (result.error.code, result.error.reason) == ("weights_undeclared", "weights_undeclared")
    assert result.error.retryable
    assert engine.hello.weight_state == "undeclared"
    yield engine
    assert len(engine.generate([(1, 2)], max_tokens=3)[0].token_ids) == 3
    assert history(engine)["state"] == "ready"


def test_undeclared_weights_serve_once_an_update_has_named_them(undeclared: Engine) -> None:
    start(undeclared)
    undeclared.result_of("finish_weight_update")
    assert history(undeclared)["state"] == "undeclared"
    start(undeclared)
    undeclared.result_of("finish_weight_update", "named")


def test_undeclared_weights_serve_once_somebody_has_named_them(undeclared: Engine) -> None:
    undeclared.result_of("set_weight_version", "named")


def test_weights_can_be_checked_where_they_lie(engine: Engine, llama: TinyModel) -> None:
    sums = engine.result_of("check_weights", "checksum")["checksums"]
    for name, tensor in llama.model.state_dict().items():
        assert sums[name] == "blake3:" + tensor_digest(name, tensor).hex()
    assert engine.result_of("check_weights", "compare", sums) == {"match": True, "mismatches": []}
    engine.parameters(NORM)[0].data[0] += 1  # as a broken memory would
    assert engine.result_of("check_weights", "compare", sums) == {"match": False, "mismatches": [NORM]}
    engine.commit("second")
    assert len(engine.result_of("check_weights", "compare", sums)["mismatches"]) > 10
    assert engine.result_of("check_weights", "compare", {})["mismatches"] == sorted(sums)


def test_weights_that_were_reset_serve_nobody_before_a_complete_update(
    engine: Engine, gate: Gate, after: References
) -> None:
    assert engine.failure_of("check_weights", "reset")[0] == "pause_required"
    engine.result_of("pause_generation", "keep", False)
    assert engine.result_of("check_weights", "reset") == {"status": "reset"}
    assert history(engine)["state"] == "inconsistent"
    assert all(not tensor.any() for tensor in engine.core._runner._model.state_dict().values())
    assert engine.failure_of("resume_scheduler")[0] == "weights_inconsistent"
    engine.commit("second")
    check(engine, after)


@pytest.mark.parametrize("args", [("sum",), (None,), ("compare",), ("compare", [])])
def test_a_check_that_is_none_is_refused(engine: Engine, args: Any) -> None:
    assert engine.failure_of("check_weights", *args)[0] == "invalid_request"


def test_the_memory_of_another_copy_is_told(engine: Engine, llama: TinyModel) -> None:
    expected = sum(tensor.nbytes for tensor in llama.model.state_dict().values())
    assert engine.result_of("server_info")["weight_staging_bytes"] == expected == history(engine)["staging_bytes"]
