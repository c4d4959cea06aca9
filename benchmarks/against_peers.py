"""The engine against vLLM and transformers: every model, batch size and log-probs setting, as one table.

    python benchmarks/make_models.py MODELS
    python benchmarks/against_peers.py MODELS --out RESULTS --peer-python vllm=PATH

runs `rollspan bench throughput` for one model after the other, all engines of a model in one alternating run, and
writes RESULTS/MODEL.json after each batch size, RESULTS/cells.jsonl (one cell a line) and RESULTS/table.md. Batch sizes
that RESULTS already holds are not run again, so an interrupted matrix goes on where it was. An engine that fails is
named, left out, and the model is run without it. `--quick` runs few cells with few rounds, to see that all works.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EMBEDDED = "add2-rl"
MODELS = (EMBEDDED, "tiny", "small", "mid")
PEERS = ("vllm", "transformers-continuous", "transformers")
BATCHES = (1, 8, 32, 128)

Cell = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """How every model is run."""

    batches: Sequence[int]
    peers: Sequence[str]
    pythons: Sequence[str]
    rounds: int
    input_tokens: int
    output_tokens: int
    threads: int


def target(peer: str, batch: int, logprobs: int | None) -> float:
    """Smallest ratio that the engine is meant to reach."""
    if peer == "vllm":
        return 1.0 if logprobs is None else 1.2
    if peer == "transformers-continuous":
        return 8.0 if batch >= 128 else 2.0 if batch >= 32 else 1.2 if batch == 1 else 1.0
    return 1.0


def run_model(model: str, directory: Path, plan: Plan, out: Path) -> list[str]:
    """Runs what is missing of one model, and files the cells; returns the failures.

    Raises:
        KeyboardInterrupt: when it was interrupted; the cells so far are filed.
    """
    failures = []
    peers = list(plan.peers)
    while batches := missing(model, plan, out):
        name = model if model == EMBEDDED else str(directory / model)
        figures = out / f"{model}.json"
        command = [sys.executable, "-m", "rollspan.cli", "bench", "throughput", name, "--json", str(figures)]
        command += ["--batch", *map(str, batches), "--logprobs", "none", "0", "--rounds", str(plan.rounds)]
        command += ["--input-tokens", str(plan.input_tokens), "--output-tokens", str(plan.output_tokens)]
        command += ["--threads", str(plan.threads), *(["--against", *peers] if peers else [])]
        command += [word for python in plan.pythons for word in ("--peer-python", python)]
        figures.unlink(missing_ok=True)
        code, complaint = _run(command)
        collect(model, figures, plan, out)
        if code in (130, -signal.SIGINT):
            raise KeyboardInterrupt
        if code == 0:
            break
        culprit = next((peer for peer in sorted(peers, key=len) if f"error: {peer}:" in complaint), None)
        failures.append(complaint.splitlines()[0] if complaint else f"{model}: ended with code {code}")
        if culprit is None:
            break
        peers.remove(culprit)
    return failures


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Runs a command, its progress shown; returns its exit code and what it said from the first error on."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    complaint: list[str] = []
    assert process.stderr is not None
    try:
        for line in process.stderr:
            sys.stderr.write(line)
            if complaint or ": error: " in line:
                complaint.append(line)
    except KeyboardInterrupt:  # the terminal has sent it to the command as well
        sys.stderr.write(process.stderr.read())
        process.wait()
        return 130, ""
    return process.wait(), "".join(complaint)


def missing(model: str, plan: Plan, out: Path) -> list[int]:
    """Batch sizes of which not both cells are filed."""
    filed = [cell["batch"] for cell in read_cells(out) if cell["model"] == model]
    return [batch for batch in plan.batches if filed.count(batch) < 2]


def collect(model: str, figures: Path, plan: Plan, out: Path) -> None:
    """Appends the complete batch sizes of a run to cells.jsonl."""
    if not figures.exists():
        return
    found = json.loads(figures.read_text())
    wanted = missing(model, plan, out)
    whole = [b for b in wanted if sum(c["batch"] == b and _complete(c, plan) for c in found["cells"]) == 2]
    with (out / "cells.jsonl").open("a") as lines:
        for cell in found["cells"]:
            if cell["batch"] in whole:
                lines.write(json.dumps({"model": model, **cell, "settings": found["settings"]}) + "\n")


def _complete(cell: Cell, plan: Plan) -> bool:
    return all(len(speeds["rounds"]) == plan.rounds for speeds in cell["tokens_per_second"].values())


def read_cells(out: Path) -> list[Cell]:
    """All cells filed so far."""
    file = out / "cells.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(cells: list[Cell]) -> str:
    """The cells as Markdown; a ratio below its target is marked."""
    peers = [peer for peer in PEERS if any(peer in cell.get("ratio", {}) for cell in cells)]
    header = ["model", "batch", "log-probs", "rollspan tok/s", "log-probs cost"]
    header += [text for peer in peers for text in (f"{peer} tok/s", "ratio")]
    header.append("CPU µs a token, in the same order")
    lines = [_row(header), _row(["---"] * len(header))]
    for cell in sorted(cells, key=lambda c: (MODELS.index(c["model"]), c["batch"], c["logprobs"] is not None)):
        speeds = cell["tokens_per_second"]
        row = [cell["model"], str(cell["batch"]), "off" if cell["logprobs"] is None else "on"]
        row.append(_middle(speeds["rollspan"], ",.0f"))
        row.append(f"{cell['logprobs_cost']['rollspan']:+.0%}" if "logprobs_cost" in cell else "")
        for peer in peers:
            ratio = cell.get("ratio", {}).get(peer)
            if ratio is None:
                row += ["-", "-"]
                continue
            mark = "" if ratio["median"] >= target(peer, cell["batch"], cell["logprobs"]) else " ✗"
            row += [_middle(speeds[peer], ",.0f"), _middle(ratio, ".2f") + mark]
        used = [cell["cpu_microseconds_per_token"].get(name) for name in ("rollspan", *peers)]
        row.append(", ".join("-" if value is None else f"{value:,.0f}" for value in used))
        lines.append(_row(row))
    lines += ["", "Median (slowest to fastest round); ratio round by round; ✗: below the target.", ""]
    for peer in peers:
        found = [cell for cell in cells if peer in cell.get("ratio", {})]
        ratios = [cell["ratio"][peer]["median"] for cell in found]
        met = sum(ratio >= target(peer, c["batch"], c["logprobs"]) for ratio, c in zip(ratios, found, strict=True))
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        lines.append(f"{peer}: geometric mean {mean:.2f}, target met in {met} of {len(found)} cells")
    return "\n".join(lines) + "\n"


def _middle(values: dict[str, float], form: str) -> str:
    return f"{values['median']:{form}} ({values['min']:{form}} to {values['max']:{form}})"


def _row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where make_models.py has written the models")
    parser.add_argument(
        "--out", type=Path, help="(default: build/against_peers; with --quick build/against_peers_quick)"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--batch", type=int, nargs="+", help="(default: 1 8 32 128; with --quick 1 32)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="(default: all)")
    parser.add_argument(
        "--peer-python", metavar="[ENGINE=]PATH", action="append", default=[], help="as for the command"
    )
    parser.add_argument("--rounds", type=int, help="(default: 3; with --quick 1)")
    parser.add_argument("--input-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--output-tokens", type=int, help="(default: 128; with --quick 32)")
    parser.add_argument("--threads", type=int, default=1, help="of every engine (default: 1)")
    parser.add_argument("--quick", action="store_true", help="few cells, one round, short outputs")
    args = parser.parse_args()
    plan = Plan(
        batches=args.batch or ((1, 32) if args.quick else BATCHES),
        peers=args.peers,
        pythons=args.peer_python,
        rounds=args.rounds or (1 if args.quick else 3),
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens or (32 if args.quick else 128),
        threads=args.threads,
    )
    out = args.out or Path("build") / ("against_peers_quick" if args.quick else "against_peers")
    out.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    interrupted = False
    try:
        for model in args.models:
            collect(model, out / f"{model}.json", plan, out)  # what a killed run has left
            failures += run_model(model, args.directory, plan, out)
    except KeyboardInterrupt:
        interrupted = True
    cells = read_cells(out)
    if cells:
        (out / "table.md").write_text(table(cells))
        print(table(cells))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 130 if interrupted else 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
