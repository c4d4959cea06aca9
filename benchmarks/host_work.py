"""What the engine does for a decode step besides the model and the sampler's arithmetic: scheduling, building the
inputs, building the outputs.

`python benchmarks/host_work.py` runs EngineCore's real step at several batch sizes with the forward pass and the
sampling kernel replaced by constants, and prints for each output token:

- CPU time of the engine's thread, of the fastest of many short rounds;
- bytecode instructions of Python, which do not depend on what else the machine does (but count a call into numpy as
  one);
- machine instructions, with `--instructions`: the same steps under valgrind's callgrind, which must be installed; it
  takes minutes, nearly all of them for imports.

All are means over a run of steps in which sequences grow across block boundaries, with requests staying the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from rollspan import SamplingParams, models
from rollspan.config import EngineConfig
from rollspan.engine.core import EngineCore
from rollspan.kernels import sampling
from rollspan.protocol.messages import EngineCoreRequest

PROMPT_TOKENS = 64
STEPS = 32
"""Steps of one measurement: two blocks of each sequence."""
ROUNDS = 8

Figure = dict[str, Any]


def stubbed_core(max_batch: int) -> EngineCore:
    """An EngineCore whose forward pass and sampling kernel return constants at once."""
    steps = PROMPT_TOKENS + STEPS * (ROUNDS + 4)
    config = EngineConfig(
        model=str(models.path()), max_num_seqs=max_batch, num_threads=1, max_num_batched_tokens=max(2048, max_batch)
    )
    core = EngineCore(config)
    limit = core.hello().limits
    if steps > limit.max_model_len:
        raise SystemExit(f"the embedded model takes {limit.max_model_len} tokens, {steps} are needed")
    logits = torch.zeros(max_batch, limit.vocab_size)

    def forward(_ids: torch.Tensor, _positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return logits[: len(rows)]

    def sample(given: torch.Tensor, rows: sampling.Rows, **_options: Any) -> sampling.SampleResult:
        result = sampling.SampleResult.room(np.minimum(rows["num_top"], given.shape[1]))
        result.token_ids[:] = 1
        result.valid[:] = True
        return result

    core._runner._forward = forward  # type: ignore[union-attr]  # the benchmark's point: all but the model
    sampling.sample = sample
    return core


def fill(core: EngineCore, batch: int, logprobs: int | None) -> None:
    """Opens so many requests, runs their prompts and some steps more."""
    params = SamplingParams(max_tokens=core.hello().limits.max_model_len, ignore_eos=True, logprobs=logprobs)
    for number in range(batch):
        prompt = [2 + (number + place) % 8 for place in range(PROMPT_TOKENS)]
        core.add_request(EngineCoreRequest(f"request-{number}", prompt, params))
    while any(request.num_output_tokens < 2 for request in core.scheduler.requests.values()):
        core.step()


def run_steps(core: EngineCore, steps: int) -> None:
    """Runs decode steps and drops their outputs."""
    for _ in range(steps):
        core.step()


def cpu_seconds(core: EngineCore) -> float:
    """CPU time of STEPS steps in the fastest round."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        run_steps(core, STEPS)
        rounds.append(time.thread_time() - started)
    return min(rounds)


def bytecodes(work: Callable[[], None]) -> int:
    """Bytecode instructions of all Python code that ``work`` runs."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


def measure(batches: list[int], logprobs: int | None, *, count_instructions: bool) -> list[Figure]:
    """One figure for each batch size."""
    core = stubbed_core(max(batches))
    counts = instructions(batches, logprobs) if count_instructions else []
    figures = []
    for batch in batches:
        fill(core, batch, logprobs)
        tokens = STEPS * batch
        seconds = cpu_seconds(core)
        figure: Figure = {"batch": batch, "logprobs": logprobs, "microseconds_per_token": seconds * 1e6 / tokens}
        figure["microseconds_per_step"] = seconds * 1e6 / STEPS
        figure["bytecodes_per_token"] = bytecodes(lambda: run_steps(core, STEPS)) / tokens
        if counts:
            figure["instructions_per_token"] = counts[len(figures)] / tokens
        figures.append(figure)
        empty(core)
    return figures


def empty(core: EngineCore) -> None:
    """Drops all requests."""
    core.abort_requests(list(core.scheduler.requests))
    core.step()


def instructions(batches: list[int], logprobs: int | None) -> list[int]:
    """Machine instructions of STEPS steps at each batch size, counted by callgrind in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "counts"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}", sys.executable]
        command += [__file__, "--count-only", "--batch", *map(str, batches)]
        command += ["--logprobs", "none" if logprobs is None else str(logprobs)]
        subprocess.run(command, check=True, capture_output=True)
        parts = [out.with_suffix(f".{number}").read_text() for number in range(1, len(batches) + 2)]
    found = [re.search(r"^totals: (\d+)", part, re.MULTILINE) for part in parts]
    switching, *counts = [int(match[1]) if match else 0 for match in found]
    return [count - switching for count in counts]


def count_only(batches: list[int], logprobs: int | None) -> None:
    """Runs under callgrind: one dump of its counts for nothing at all, then one for STEPS steps of each batch size."""
    core = stubbed_core(max(batches))
    _counted(lambda: None)
    for batch in batches:
        fill(core, batch, logprobs)
        run_steps(core, 4)
        _counted(lambda: run_steps(core, STEPS))
        empty(core)


def _counted(work: Callable[[], None]) -> None:
    control = ["callgrind_control", str(os.getpid())]
    subprocess.run([*control, "--instr=on"], check=True, capture_output=True)
    work()
    subprocess.run([*control, "--instr=off"], check=True, capture_output=True)
    subprocess.run([*control, "--dump"], check=True, capture_output=True)


def report(figures: list[Figure]) -> None:
    """Prints a table, and how each count grows with the batch."""
    names = [name for name in figures[0] if name not in ("batch", "logprobs")]
    print("batch  " + "  ".join(name.replace("_", " ").rjust(22) for name in names))
    for figure in figures:
        print(f"{figure['batch']:>5}  " + "  ".join(f"{figure[name]:>22,.1f}" for name in names))
    if len(figures) > 1:
        first, last = figures[0], figures[-1]
        for name in ("bytecodes_per_token", "instructions_per_token"):
            if name in first:
                growth = math.log(last[name] / first[name]) / math.log(last["batch"] / first["batch"]) + 1
                print(f"{name.split('_')[0]} of a step grow like batch^{growth:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256], help="(default: %(default)s)")
    parser.add_argument(
        "--logprobs", type=lambda text: None if text == "none" else int(text), help="none, or a number (default: none)"
    )
    parser.add_argument("--instructions", action="store_true", help="count machine instructions too, under valgrind")
    parser.add_argument("--count-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    if args.count_only:
        count_only(args.batch, args.logprobs)
        return
    figures = measure(sorted(args.batch), args.logprobs, count_instructions=args.instructions)
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        report(figures)


if __name__ == "__main__":
    main()
