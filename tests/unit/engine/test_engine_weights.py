"""Weight updates: atomic at every failure point, stamped at the step, independent of the files afterwards."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.conftest import References
from engine.harness import Engine
from engine.models import CONFIGS, TinyModel, decisive_prompts, make_model
from rollspan.config import EngineConfig
from rollspan.digest import weight_digest
from rollspan.errors import RollspanError
from rollspan.weights.manager import WeightManager
from rollspan.weights.worker import Bell, Worker

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENS = 12


@pytest.fixture
def engine(llama: TinyModel, root: Path) -> Engine:
    return Engine(llama, weights_root=str(root))


def check(engine: Engine, references: References) -> None:
    """Asserts which weights the engine computes with."""
    results = engine.generate(list(references), max_tokens=TOKENS)
    assert [result.token_ids for result in results] == list(references.values())


def update(engine: Engine, path: object, label: object = None) -> dict[str, Any]:
    engine.result_of("start_weight_update")
    assert engine.result_of("update_weights", {"path": path}) is None
    return finish(engine, label)


def finish(engine: Engine, label: object = None) -> dict[str, Any]:
    """Label and commit number that came into force; the digest is that of the model's weights."""
    result = engine.result_of("finish_weight_update", label)
    assert result.pop("weight_digest") == weight_digest(engine.core._runner._model)
    return result


def fails(engine: Engine, info: object) -> str:
    """The message with which an update is refused; the update is over then, and everything as before."""
    engine.result_of("start_weight_update")
    reason, message = engine.failure_of("update_weights", info)
    assert reason == "weights_invalid", message
    assert "\n" not in message
    assert engine.failure_of("finish_weight_update", "never")[0] == "no_update_active"
    assert stamp(engine) == ("default", 0)
    return message


def stamp(engine: Engine) -> tuple[str, int]:
    return engine.result_of("get_weight_version"), engine.result_of("get_weight_commit")


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / WEIGHTS)


def test_an_update_puts_weights_label_and_commit_in_force_together(
    engine: Engine, before: References, after: References
) -> None:
    check(engine, before)
    assert update(engine, "second", "step-1") == {"weight_version": "step-1", "weight_commit": 1}
    assert stamp(engine) == ("step-1", 1)
    assert (engine.core.hello().weight_version, engine.core.hello().weight_commit) == ("step-1", 1)
    check(engine, after)
    assert update(engine, "first", "step-2") == {"weight_version": "step-2", "weight_commit": 2}
    check(engine, before)


def test_an_update_without_a_name_keeps_the_label_and_counts(engine: Engine) -> None:
    engine.result_of("set_weight_version", "mine")
    assert update(engine, "second") == {"weight_version": "mine", "weight_commit": 1}
    assert update(engine, "second", 7) == {"weight_version": "7", "weight_commit": 2}
    assert update(engine, "second") == {"weight_version": "7", "weight_commit": 3}


def test_an_update_to_the_same_weights_is_a_commit_that_changes_no_token(engine: Engine, before: References) -> None:
    assert update(engine, "first")["weight_commit"] == 1
    check(engine, before)


def test_nothing_changes_before_finish(engine: Engine, before: References) -> None:
    engine.result_of("start_weight_update")
    check(engine, before)
    engine.result_of("update_weights", {"path": "second"})
    check(engine, before)
    assert stamp(engine) == ("default", 0)


def test_the_first_step_after_a_commit_carries_its_stamp_and_none_before_it(engine: Engine) -> None:
    result = engine.add("r", (1, 2, 3), max_tokens=100)
    engine.step()
    for commit, (path, label) in enumerate((("second", "B"), ("first", "A")), 1):
        engine.result_of("start_weight_update")
        engine.result_of("update_weights", {"path": path})
        assert result.stamps[-1][1] == commit - 1
        before = len(result.stamps)
        engine.result_of("finish_weight_update", label)
        assert result.stamps[-1] == (label, commit)  # of the step in which it was answered
        assert len(result.stamps) - result.stamps.index((label, commit)) == 1
        assert set(result.stamps[before:-1]) <= {result.stamps[before - 1]}
    engine.run()
    assert [stamp for stamp, _ in itertools.groupby(result.stamps)] == [("default", 0), ("B", 1), ("A", 2)]
    assert result.admissions == [("default", 0)] * 2


def test_the_boundary_of_the_stamps_is_where_the_tokens_change(
    llama: TinyModel, root: Path, before: References
) -> None:
    zero = tensors_of(root / "first")
    zero["lm_head.weight"] = torch.zeros_like(zero["lm_head.weight"])
    (root / "zero").mkdir()
    save_file(zero, root / "zero" / WEIGHTS)
    prompts = {prompt: output for prompt, output in before.items() if 0 not in output}
    assert len(prompts) > 3
    for clear_cache in (False, True):
        engine = Engine(llama, weights_root=str(root), max_num_batched_tokens=24, max_num_seqs=4)
        results = [engine.add(f"r{i}", prompt, max_tokens=TOKENS) for i, prompt in enumerate(prompts)]
        for _ in range(7):
            engine.step()
        engine.result_of("pause_generation", "keep", clear_cache)
        update(engine, "zero", "zero")
        engine.result_of("resume_scheduler")
        engine.run()
        boundaries = [result.stamps.index(("zero", 1)) for result in results if ("zero", 1) in result.stamps]
        assert len(set(boundaries)) > 1  # requests at different places
        for result, expected in zip(results, prompts.values(), strict=True):
            old = result.stamps.count(("default", 0))
            assert result.token_ids == expected[:old] + [0] * (TOKENS - old)
            assert result.stamps == [("default", 0)] * old + [("zero", 1)] * (TOKENS - old)


def test_a_request_that_enters_between_update_and_finish_carries_the_old_label(engine: Engine) -> None:
    engine.result_of("pause_generation", "keep", False)
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "second"})
    early = engine.add("early", (1, 2), max_tokens=3)
    engine.result_of("finish_weight_update", "new")
    late = engine.add("late", (1, 2), max_tokens=3)
    engine.result_of("resume_scheduler")
    engine.run()
    assert early.admissions == [("default", 0)] * 2
    assert late.admissions == [("new", 1)] * 2
    assert early.stamps == late.stamps == [("new", 1)] * 3


def test_the_files_may_change_or_vanish_once_update_weights_is_answered(
    engine: Engine, root: Path, after: References
) -> None:
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "second"})
    file = root / "second" / WEIGHTS
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.write(b"\xff" * size)
    os.truncate(file, 0)
    shutil.rmtree(root / "second")
    engine.result_of("finish_weight_update", "new")
    check(engine, after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_floating_point_weights_of_another_type_are_converted(engine: Engine, root: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(root / "second").items()}
    save_file(tensors, root / "second" / WEIGHTS)
    update(engine, "second")
    for name, tensor in tensors.items():
        for parameter in engine.parameters(name):
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, tensor.to(torch.float32))


def test_weights_in_shards_with_an_index_are_read(
    engine: Engine, root: Path, other: TinyModel, after: References
) -> None:
    other.model.save_pretrained(root / "sharded", max_shard_size="20KB")
    assert (root / "sharded" / INDEX).is_file()
    update(engine, "sharded")
    check(engine, after)


def test_several_files_without_an_index_are_read(engine: Engine, root: Path, after: References) -> None:
    tensors = tensors_of(root / "second")
    names = sorted(tensors)
    (root / "parts").mkdir()
    for part in range(3):
        save_file({name: tensors[name] for name in names[part::3]}, root / "parts" / f"part-{part}.safetensors")
    update(engine, "parts")
    check(engine, after)


def test_an_update_may_come_in_several_pieces(engine: Engine, root: Path, after: References) -> None:
    tensors = tensors_of(root / "second")
    names = sorted(tensors)
    engine.result_of("start_weight_update")
    for part in range(2):
        (root / str(part)).mkdir()
        save_file({name: tensors[name] for name in names[part::2]}, root / str(part) / WEIGHTS)
        engine.result_of("update_weights", [{"path": str(part)}])
    engine.result_of("finish_weight_update")
    check(engine, after)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2"])
def test_tied_weights_are_updated_from_a_checkpoint_that_holds_them_once(
    tmp_path: Path, tiny: Callable[[str], TinyModel], kind: str
) -> None:
    fresh = make_model(tmp_path / "fresh", CONFIGS[kind](), seed=5)
    assert "lm_head.weight" not in tensors_of(fresh.path)
    engine = Engine(tiny(kind), weights_root=str(tmp_path))
    update(engine, "fresh")
    check(engine, decisive_prompts(fresh, count=3, tokens=TOKENS))


def test_tied_weights_may_come_under_every_name_if_they_are_equal(
    tmp_path: Path, tiny: Callable[[str], TinyModel]
) -> None:
    engine = Engine(tiny("qwen3"), weights_root=str(tmp_path))
    fresh = make_model(tmp_path / "fresh", CONFIGS["qwen3"](), seed=5)
    tensors = tensors_of(fresh.path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, fresh.path / WEIGHTS)
    update(engine, "fresh")
    check(engine, decisive_prompts(fresh, count=3, tokens=TOKENS))
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, fresh.path / WEIGHTS)
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "fresh"})
    reason, message = engine.failure_of("finish_weight_update")
    assert reason == "weights_invalid"
    assert "differs from another tensor that the model ties it to" in message
    assert stamp(engine) == ("default", 1)


def test_a_missing_tensor_fails_at_finish_and_drops_the_update(engine: Engine, root: Path, before: References) -> None:
    tensors = tensors_of(root / "second")
    del tensors["model.norm.weight"]
    save_file(tensors, root / "second" / WEIGHTS)
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "second"})
    message = "the update lacks 1 of the model's parameters: model.norm.weight"
    assert engine.failure_of("finish_weight_update", "x") == ("weights_invalid", message)
    assert engine.failure_of("finish_weight_update", "x")[0] == "no_update_active"
    assert stamp(engine) == ("default", 0)
    check(engine, before)


def test_a_finish_that_received_nothing_fails(engine: Engine) -> None:
    engine.result_of("start_weight_update")
    assert "lacks 21 of the model's parameters" in engine.failure_of("finish_weight_update")[1]


@pytest.mark.parametrize("label", ["", "a\n", "x" * 257, 1.5, True, []])
def test_a_label_that_is_none_leaves_the_update_open_for_another_try(
    engine: Engine, label: object, after: References
) -> None:
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "second"})
    reason, message = engine.failure_of("finish_weight_update", label)
    assert reason == "invalid_label"
    assert message.startswith("weight_version must be ")
    assert stamp(engine) == ("default", 0)
    assert finish(engine, "good") == {"weight_version": "good", "weight_commit": 1}
    check(engine, after)


def test_updates_are_opened_and_finished_once(engine: Engine, after: References) -> None:
    assert engine.failure_of("update_weights", {"path": "second"})[0] == "no_update_active"
    assert engine.failure_of("finish_weight_update")[0] == "no_update_active"
    engine.result_of("start_weight_update")
    assert engine.failure_of("start_weight_update")[0] == "update_active"
    engine.result_of("update_weights", {"path": "second"})
    assert engine.failure_of("start_weight_update")[0] == "update_active"
    engine.result_of("finish_weight_update")
    check(engine, after)
    assert engine.failure_of("finish_weight_update")[0] == "no_update_active"
    assert stamp(engine) == ("default", 1)


def change_tensor(root: Path, name: str, tensor: torch.Tensor) -> None:
    save_file(tensors_of(root / "second") | {name: tensor}, root / "second" / WEIGHTS)


def test_a_tensor_that_does_not_fit_fails_the_update_by_name(engine: Engine, root: Path, before: References) -> None:
    norm = "model.norm.weight"
    change_tensor(root, norm, torch.zeros(31))
    assert fails(engine, {"path": "second"}) == f"tensor {norm!r} has shape [31], the model needs [32]"
    change_tensor(root, norm, torch.zeros(32, dtype=torch.int64))
    message = f"tensor {norm!r} has dtype torch.int64, the model needs torch.float32"
    assert fails(engine, {"path": "second"}) == message
    change_tensor(root, norm, torch.zeros(32))
    change_tensor(root, "model.extra", torch.zeros(1))
    assert fails(engine, {"path": "second"}) == "tensor 'model.extra' is none of the model's parameters"
    check(engine, before)


def test_an_update_that_fails_in_its_second_piece_drops_the_first_as_well(
    engine: Engine, root: Path, before: References, after: References
) -> None:
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "second"})
    assert engine.failure_of("update_weights", {"path": "nowhere"})[0] == "weights_invalid"
    assert engine.failure_of("finish_weight_update", "x")[0] == "no_update_active"
    check(engine, before)
    update(engine, "second", "x")
    check(engine, after)


def test_weights_move_under_running_requests_without_any_pause(engine: Engine) -> None:
    results = [engine.add(f"r{i}", (i + 1,), max_tokens=30) for i in range(6)]
    expected = 0
    while engine.core.has_work():
        expected += 1
        update(engine, "second" if expected % 2 else "first", f"v{expected}")
    assert stamp(engine) == (f"v{expected}", expected)
    for result in results:
        assert len(result.token_ids) == len(result.stamps) == 30
        commits = [commit for _, commit in result.stamps]
        assert commits == sorted(commits, key=lambda commit: commit or 0)
        assert all(label == (f"v{commit}" if commit else "default") for label, commit in result.stamps)


def test_the_index_names_files_of_its_directory_only(engine: Engine, root: Path) -> None:
    (root / "second" / "sub").mkdir()
    shutil.copy(root / "second" / WEIGHTS, root / "second" / "sub")
    for name in ("../first/model.safetensors", "sub/model.safetensors", "/etc/passwd", "..", "", "x.bin", 5, None):
        (root / "second" / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        assert INDEX in fails(engine, {"path": "second"})


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {"a": ["b"]}}', "[" * 100_000, "\udcff"],
    ids=range(9),
)
def test_a_broken_index_fails_the_update(engine: Engine, root: Path, text: str) -> None:
    (root / "second" / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    assert fails(engine, {"path": "second"}) == f"{INDEX} holds no weight_map of tensor names to file names"


@pytest.mark.parametrize(
    "name", ["a\0.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors"], ids=["nul", "surrogate", "long"]
)
def test_an_index_with_impossible_file_names_fails_the_update(engine: Engine, root: Path, name: str) -> None:
    (root / "second" / INDEX).write_text(json.dumps({"weight_map": {"a": f"{name}.safetensors"}}))
    fails(engine, {"path": "second"})


def test_an_index_that_promises_more_than_the_files_hold_fails_the_update(engine: Engine, root: Path) -> None:
    (root / "second" / INDEX).write_text(json.dumps({"weight_map": {"model.lost": WEIGHTS}}))
    expected = "the index promises 'model.lost' (1 missing in all), but no file holds it"
    assert fails(engine, {"path": "second"}) == expected
    (root / "second" / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert 'holds no file "gone.safetensors"' in fails(engine, {"path": "second"})


def test_a_tensor_in_two_files_fails_the_update(engine: Engine, root: Path) -> None:
    (root / "second" / WEIGHTS).rename(root / "second" / "a.safetensors")
    shutil.copy(root / "second" / "a.safetensors", root / "second" / "b.safetensors")
    assert "is in more than one file" in fails(engine, {"path": "second"})


@pytest.mark.parametrize("length", [0, 4, 9, 100, -1])
def test_a_broken_or_cut_file_fails_the_update(engine: Engine, root: Path, length: int, before: References) -> None:
    data = (root / "second" / WEIGHTS).read_bytes()
    (root / "second" / WEIGHTS).write_bytes(data[:length])
    assert fails(engine, {"path": "second"}).startswith(f"{WEIGHTS} cannot be read as safetensors: ")
    check(engine, before)


class _WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("correction", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class _Alone:
    """Weights without an engine around them; nothing is derived from them."""

    def __init__(self, module: nn.Module, root: Path) -> None:
        self._bell = Bell()
        self.manager = WeightManager(module, EngineConfig(weights_root=str(root)), Worker(self._bell), self, self)

    def prepare(self, new: object) -> Callable[[], None]:
        return self.after_commit

    def after_commit(self) -> None: ...
    def weights_change(self) -> None: ...
    def weights_changed(self) -> None: ...
    def weights_settled(self) -> None: ...

    def update(self, path: str, label: str) -> dict[str, Any]:
        self.manager.start()
        self.manager.update({"path": path})
        future = self.manager.finish(label)
        while not future.done():
            self._bell.wait(60)
            self.manager.poll()
        return future.result()


def test_persistent_buffers_are_weights_as_well(tmp_path: Path) -> None:
    module = _WithBuffer()
    alone = _Alone(module, tmp_path)
    for name, tensors in (("part", {"weight": torch.ones(2)}), ("all", module.state_dict())):
        (tmp_path / name).mkdir()
        save_file({key: torch.ones_like(tensor) for key, tensor in tensors.items()}, tmp_path / name / WEIGHTS)
    with pytest.raises(RollspanError, match="correction"):
        alone.update("part", "part")
    assert module.weight.tolist() == [0, 0]
    assert alone.update("all", "all")["weight_commit"] == 1
    assert (module.weight.tolist(), module.correction.tolist()) == ([1, 1], [1, 1, 1])
