"""``rollspan bench throughput`` and ``latency``: fair turns, honest figures, and clear words when an engine fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollspan import bench
from rollspan.bench import side as side_module
from rollspan.bench.alternating import Batch, Cell, Middle, geometric_mean, run_cells, steps
from rollspan.bench.progress import Progress
from rollspan.bench.side import Program, Side, SideError, thread_environment

FAKE = Path(__file__).resolve().parent.parent / "support" / "fake_bench_engine.py"
BATCH = Batch(input_tokens=3, output_tokens=20, temperature=0.0, vocabulary_size=16, seed=5)


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_module, "HOST", FAKE)


class NotedSide:
    """A side in this process that notes what it is asked."""

    def __init__(self, name: str, notes: list[tuple[str, dict[str, Any]]]) -> None:
        self.name = name
        self._notes = notes
        self.rests = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._notes.append((self.name, request))
        return {"seconds": 1.0, "cpu_seconds": 0.5}

    def rest(self) -> None:
        self.rests += 1


def noted_run(**changes: Any) -> tuple[list[tuple[str, dict[str, Any]]], list[Cell], list[str]]:
    notes: list[tuple[str, dict[str, Any]]] = []
    cells: list[Cell] = []
    watched: list[str] = []
    sides: Any = [NotedSide("ours", notes), NotedSide("theirs", notes)]
    settings: dict[str, Any] = {"op": "generate", "size": 2, "logprobs": [None, 0], "rounds": 2, **changes}
    run_cells(sides, BATCH, cells=cells, watch=watched.append, **settings)
    assert all(side.rests for side in sides)
    assert len(watched) == steps(2, len(settings["logprobs"]), settings["rounds"])
    return notes, cells, watched


def test_engines_take_turns_and_every_other_round_goes_the_other_way_round() -> None:
    notes, cells, _ = noted_run()
    warm_up, rounds = notes[:4], notes[4:]
    assert [request["output_tokens"] for _, request in warm_up] == [16] * 4
    turns = [("ours", None), ("theirs", None), ("ours", 0), ("theirs", 0)]
    assert [(name, request["logprobs"]) for name, request in rounds] == [*turns, *turns[::-1]]
    assert [(cell.size, cell.logprobs, len(cell.answers["ours"])) for cell in cells] == [(2, None, 2), (2, 0, 2)]


def test_engines_get_the_same_prompts_and_new_ones_each_round() -> None:
    notes, _, _ = noted_run(logprobs=[None])
    prompts = [request["prompts"] for _, request in notes]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert prompts[4] == prompts[5]
    assert len({json.dumps(one) for one in prompts}) == 3
    assert [len(row) for row in prompts[2]] == [3, 3]
    assert all(0 <= token < 16 for row in prompts[2] for token in row)
    again, _, _ = noted_run(logprobs=[None])
    assert [request for _, request in again] == [request for _, request in notes]


def test_a_ratio_is_taken_round_by_round() -> None:
    cell = Cell(2, None, 10)
    cell.answers["ours"] = [{"seconds": 1.0, "cpu_seconds": 0.4}, {"seconds": 4.0, "cpu_seconds": None}]
    cell.answers["theirs"] = [{"seconds": 2.0, "cpu_seconds": None}, {"seconds": 4.0, "cpu_seconds": None}]
    assert cell.tokens_per_second("ours") == [20.0, 5.0]
    assert cell.ratios("ours", "theirs") == [2.0, 1.0]
    assert Middle.of([3.0, 1.0, 2.0]).as_json() == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert cell.cpu_microseconds("ours") == pytest.approx(20_000)
    assert cell.cpu_microseconds("theirs") is None
    assert cell.agreement("ours", "theirs") is None
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)


def test_the_first_tokens_of_both_engines_are_compared() -> None:
    cell = Cell(2, None, 1)
    cell.answers = {"ours": [{"token_ids": [[1], [2]]}], "theirs": [{"token_ids": [[1], [3]]}]}
    assert cell.agreement("ours", "theirs") == 0.5


def open_side(name: str = "vllm", file: str = "vllm_llm", python: str = sys.executable) -> Side:
    return Side(Program(name, file, python, thread_environment(1, os.environ)), {"model": "x"})


REQUEST = BATCH.request("generate", 2, None, 0, 4)


@pytest.mark.usefixtures("fake_engines")
def test_a_side_answers_after_a_rest() -> None:
    with open_side() as side:
        assert side.loaded()["facts"]["threads"] == "1"
        side.rest()
        answer = side.ask(REQUEST)
    assert answer["token_ids"] == [[7] * 4] * 2
    assert answer["cpu_seconds"] is None or answer["cpu_seconds"] >= 0
    side.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("fake_engines")
def test_a_resting_side_is_stopped_and_a_closed_one_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TROUBLE", "vllm_llm:litters")
    with open_side() as side:
        child = side.loaded()["facts"]["child"]
        side.rest()
        status = Path(f"/proc/{child}/stat")
        while state(status) not in "Tt":  # the signal has been sent; the kernel delivers it in its own time
            os.sched_yield()
    while status.exists() and state(status) != "Z":
        os.sched_yield()


def state(status: Path) -> str:
    return status.read_text().rpartition(")")[2].split()[0]


@pytest.mark.usefixtures("fake_engines")
def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(SideError, match="vllm: cannot start /nowhere/python: No such file"):
        open_side(python="/nowhere/python")


@pytest.mark.usefixtures("fake_engines")
@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("missing", "No module named 'vllm'; give an interpreter that has it: --peer-python vllm=PATH"),
        ("refuses", "vllm: ValueError: this model is too strange"),
    ],
)
def test_an_engine_that_cannot_load_says_why(trouble: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TROUBLE", f"vllm_llm:{trouble}")
    with open_side() as side, pytest.raises(SideError) as caught:
        side.loaded()
    assert words in str(caught.value)


def run_bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    common = ["--batch", "1", "2", "--output-tokens", "20", "--rounds", "2"]
    code = bench.main([words[0], *common, *words[1:]])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.usefixtures("fake_engines")
def test_throughput_is_one_json_object_with_the_ratio(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    words = ("--against", "vllm", "transformers", "--logprobs", "none", "0", "--peer-python", sys.executable)
    code, out, _ = run_bench(capsys, "throughput", *words, "--threads", "3", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["complete"]
    assert found["ratio"] == {"vllm": pytest.approx(2.0), "transformers": pytest.approx(2.0)}
    assert [(cell["batch"], cell["logprobs"]) for cell in found["cells"]] == [(1, None), (1, 0), (2, None), (2, 0)]
    cell = found["cells"][3]
    assert cell["tokens_per_second"]["rollspan"]["rounds"] == [32.0, 32.0]
    assert cell["tokens_per_second"]["vllm"]["median"] == 16.0
    assert cell["ratio"]["vllm"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert cell["logprobs_cost"]["rollspan"] == pytest.approx(0.25)
    assert cell["same_first_token"]["transformers"] == 1.0
    assert found["engines"]["rollspan"]["facts"] == {"threads": "3", "path": "/ours"}
    assert found["engines"]["vllm"]["facts"] == {"threads": "3", "path": ""}
    assert found["settings"]["dtype"] == "float32"


@pytest.mark.usefixtures("fake_engines")
def test_the_table_shows_speeds_and_ratios(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ("--against", "vllm", "--logprobs", "none", "0", "--json", str(file))
    code, out, err = run_bench(capsys, "throughput", *words)
    assert code == 0
    row = next(line.split() for line in out.splitlines() if line.split()[:2] == ["2", "off"])
    assert row[2:8] == ["40.0", "(40.0..40.0)", "20.0", "(20.0..20.0)", "2.00", "(2.00..2.00)"]
    assert "+25.0%" in out
    assert "same first token as vllm: 100.0%" in out
    assert "loading add2-rl into vllm" in err
    assert json.loads(file.read_text())["complete"]


@pytest.mark.usefixtures("fake_engines")
def test_latency_is_told_apart_by_token(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_bench(capsys, "latency", "--against", "vllm", "--json")
    found = json.loads(out)
    assert code == 0
    cell = found["cells"][1]
    assert cell["time_to_first_token_ms"]["rollspan"]["p50"] == pytest.approx(500)
    assert cell["inter_token_latency_ms"]["vllm"]["p99"] == pytest.approx(100)
    assert cell["ratio"]["vllm"]["median"] == 2.0
    code, out, _ = run_bench(capsys, "latency")
    assert code == 0
    assert "ITL p50" in out
    assert "ratio" not in out


@pytest.mark.usefixtures("fake_engines")
def test_an_interrupt_prints_what_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TROUBLE", "rollspan_llm:interrupts")
    code, out, _ = run_bench(capsys, "throughput", "--json")
    found = json.loads(out)
    assert code == 130
    assert not found["complete"]
    assert [cell["batch"] for cell in found["cells"]] == [1]


@pytest.mark.usefixtures("fake_engines")
def test_the_death_of_an_engine_ends_the_run_with_its_last_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TROUBLE", "vllm_llm:dies")
    code, out, err = run_bench(capsys, "throughput", "--against", "vllm")
    assert code == 1
    assert "rollspan bench throughput: error: vllm:" in err
    assert "ended with code 7\n  out of luck" in err
    assert any(line.split()[:2] == ["1", "off"] for line in out.splitlines())


@pytest.mark.usefixtures("fake_engines")
def test_the_file_of_figures_is_there_before_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = []
    monkeypatch.setattr(Path, "write_text", lambda _path, text: written.append(json.loads(text)))
    run_bench(capsys, "throughput", "--json", str(tmp_path / "figures.json"))
    assert [(len(found["cells"]), found["complete"]) for found in written] == [(1, False), (2, True), (2, True)]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--logprobs", "-1"], "must be none or at least 0"),
        (["--batch", "0"], "must be at least 1"),
        (["--against", "sglang"], "invalid choice: 'sglang'"),
        (["--peer-python", "sglang=/x"], "there are transformers, transformers-continuous, vllm"),
        (["--block-size", "0"], "block_size must be"),
    ],
)
def test_wrong_usage_is_told_in_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["throughput", *words])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


class Screen:
    """A text stream that is, or is not, a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        self.text = ""
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_is_a_bar_on_a_terminal_and_plain_lines_elsewhere() -> None:
    for terminal in (True, False):
        screen: Any = Screen(terminal=terminal)
        with Progress(2, screen) as progress:
            for step in ("first", "second"):
                progress.begin(step)
        assert "[------------------------] 0/2" in screen.text
        assert ("second" in screen.text) == terminal
        assert ("\x1b" in screen.text) == terminal
        assert screen.text.endswith("\x1b[K" if terminal else "first\n")


@pytest.mark.slow
def test_the_embedded_model_runs_beside_transformers() -> None:
    command = [sys.executable, "-m", "rollspan.cli", "bench", "throughput", "--batch", "3", "--output-tokens", "5"]
    command += ["--logprobs", "none", "0", "--rounds", "1", "--against", "transformers", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [cell["same_first_token"] for cell in found["cells"]] == [{"transformers": 1.0}] * 2
    assert found["ratio"]["transformers"] > 0


@pytest.mark.slow
def test_latency_of_the_embedded_model() -> None:
    command = [sys.executable, "-m", "rollspan.cli", "bench", "latency", "--batch", "2", "--output-tokens", "5"]
    run = subprocess.run([*command, "--rounds", "1", "--json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    [cell] = json.loads(run.stdout)["cells"]
    assert cell["time_to_first_token_ms"]["rollspan"]["p50"] > 0
    assert cell["inter_token_latency_ms"]["rollspan"]["p50"] > 0
