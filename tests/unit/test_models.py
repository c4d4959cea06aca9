"""The embedded models: found by name, loadable by transformers, better after reinforcement learning, reproducible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollspan import models
from rollspan.models import task

MEGABYTE = 1_000_000


def test_importing_the_registry_imports_no_torch() -> None:
    program = "import sys, rollspan.models; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("name", models.names())
def test_an_embedded_model_is_a_small_hugging_face_directory_with_an_untied_head(name: str) -> None:
    directory = models.path(name)
    assert (directory / "model.safetensors").stat().st_size <= 2 * MEGABYTE
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] >= 256
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == task.EOS


def test_the_default_is_an_embedded_model() -> None:
    assert models.resolve(None) == models.path(models.DEFAULT)
    assert models.DEFAULT in models.names()


def test_a_model_is_resolved_by_name_or_by_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve("add2-sft") == models.root() / "add2-sft"
    assert models.resolve(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize(
    ("make", "problem"),
    [(lambda p: None, "does not exist"), (Path.mkdir, "has no config.json"), (Path.touch, "is not a directory")],
)
def test_an_unknown_model_is_refused_with_what_was_tried(tmp_path: Path, make: object, problem: str) -> None:
    place = tmp_path / "nothing"
    make(place)  # type: ignore[operator]
    with pytest.raises(FileNotFoundError, match=f"{problem}.*add2-sft, add2-rl"):
        models.resolve(str(place))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="add2-sft, add2-rl"):
        models.path("add3")


def test_the_tokenizer_agrees_with_the_task() -> None:
    from tokenizers import Tokenizer

    for name in models.names():
        tokenizer = Tokenizer.from_file(str(models.path(name) / "tokenizer.json"))
        problem = task.Problem(12, 34)
        assert tokenizer.encode(problem.prompt).ids == problem.prompt_ids
        assert tokenizer.decode(problem.answer_ids) == "46"
        assert tokenizer.get_vocab_size() == len(task.VOCABULARY) == 16


def test_held_out_problems_are_one_in_ten_and_never_trained_on() -> None:
    training, held_out = task.split_problems()
    assert len(held_out) == 810
    assert len({*training, *held_out}) == len(training) + len(held_out) == 8100


def test_reinforcement_learning_made_the_model_better_as_the_card_says() -> None:
    from transformers import AutoModelForCausalLM

    from rollspan.models.reinforcement import accuracy

    _, held_out = task.split_problems()
    measured = {}
    for name in models.names():
        network = AutoModelForCausalLM.from_pretrained(models.path(name))
        measured[name] = accuracy(network, held_out, None)
        # Rounding differs between CPUs, so a near-tie may fall the other way.
        card = (models.path(name) / "README.md").read_text()
        stated = float(card.split("| greedy | ")[1].split("%")[0]) / 100
        assert measured[name] == pytest.approx(stated, abs=0.01)
    assert measured["add2-rl"] > measured["add2-sft"] + 0.2


def test_training_is_one_command_and_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    contents = []
    for directory in (tmp_path / "a", tmp_path / "b"):
        steps = ["--supervised-steps", "2", "--reinforcement-steps", "1"]
        command = [sys.executable, "-m", "rollspan.models.train", "--out", str(directory), *steps]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "supervised step 2/2" in answer.stderr
        assert "reinforcement step 1/1" in answer.stderr
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        contents.append({path.relative_to(directory): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert Path("add2-sft/model.safetensors") in contents[0]
    assert contents[0][Path("add2-sft/model.safetensors")] != contents[0][Path("add2-rl/model.safetensors")]
