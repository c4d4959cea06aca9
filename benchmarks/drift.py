"""How far the engine's log-probs are from a trainer's forward pass of the same tokens, and what it costs to make it 0.

`python benchmarks/drift.py MODEL [--plot drift.png] [--json drift.json]` samples from MODEL (a directory, or the name
of an embedded model) in each dtype, at each batch size and with prompts whole and in pieces, and compares the log-prob
of every sampled token with that of a plain transformers forward pass of its sequence: one sequence at a time, full
length, no cache, with transformers' own attentions (`sdpa`, `eager`). Then the same with `--batch-invariant`, where the
other side is `rollspan.trainer.score`. MKL's mode belongs to a process, so that each configuration runs in its own.

The cost of `--batch-invariant` is the CPU time of generating, best of the rounds, which alternate.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 96
OUTPUT_TOKENS = 64
BUDGETS = {"whole": 4096, "in pieces": 64}


@dataclass(frozen=True)
class Cell:
    """|delta log-prob| over all sampled tokens of one batch against one reference; seconds of CPU time to generate."""

    dtype: str
    batch_invariant: bool
    batch: int
    prompts: str
    reference: str
    maximum: float
    mean: float
    equal: bool
    cpu_seconds: float


def measure(model: str, dtype: str, batches: Sequence[int], *, batch_invariant: bool) -> Iterator[Cell]:
    """All cells of one configuration; runs in a process of its own."""
    from rollspan import LLM, SamplingParams, models

    path = models.resolve(model)
    references: dict[str, Any] | None = None
    for name, budget in BUDGETS.items():
        config: dict[str, Any] = {"dtype": dtype, "batch_invariant": batch_invariant, "num_threads": 1}
        llm = LLM(path, max_num_batched_tokens=budget, max_num_seqs=min(64, budget), max_model_len=256, **config)
        references = references or _references(path, dtype, batch_invariant=batch_invariant)
        for batch in batches:
            rng = random.Random(batch)
            vocabulary = llm.hello.limits.vocab_size
            prompts = [[rng.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
            params = [
                SamplingParams(temperature=1.0, seed=i, logprobs=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
                for i in range(batch)
            ]
            started = time.process_time()
            outputs = [result.outputs[0] for result in llm.generate(prompts, params)]
            seconds = time.process_time() - started
            found = [
                [entry[token].logprob for entry, token in zip(output.logprobs or [], output.token_ids, strict=True)]
                for output in outputs
            ]
            sequences = [prompt + output.token_ids for prompt, output in zip(prompts, outputs, strict=True)]
            for reference, score in references.items():
                deltas = [
                    abs(mine - theirs)
                    for log_probs, ids in zip(found, sequences, strict=True)
                    for mine, theirs in zip(log_probs, score(ids)[PROMPT_TOKENS - 1 :], strict=True)
                ]
                yield Cell(
                    dtype,
                    batch_invariant,
                    batch,
                    name,
                    reference,
                    max(deltas),
                    sum(deltas) / len(deltas),
                    not any(deltas),
                    seconds,
                )
        llm.shutdown()


def _references(path: Path, dtype: str, *, batch_invariant: bool) -> dict[str, Any]:
    """Functions from token ids to the log-probs of all but the first, by name."""
    import torch
    from transformers import AutoModelForCausalLM

    from rollspan import trainer

    def score(model: Any, ids: list[int]) -> list[float]:
        with torch.no_grad():
            if batch_invariant:
                return trainer.score(model, [ids])[0].tolist()
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
            return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    trainer.register()
    found: dict[str, Any] = {}
    for attention in (trainer.NAME,) if batch_invariant else ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=attention)
        found["rollspan.trainer" if batch_invariant else attention] = functools.partial(score, model.eval())
    return found


def run(arguments: argparse.Namespace) -> list[Cell]:
    """All configurations, each in a process of its own, in alternation; the least CPU time of the rounds counts."""
    from rollspan import numerics

    best: dict[tuple[Any, ...], Cell] = {}
    for _ in range(arguments.rounds):
        for dtype in arguments.dtypes:
            for flag in (False, True):
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                environment.pop(numerics.VARIABLE, None)
                command = [sys.executable, __file__, arguments.model, "--worker", dtype, "--invariant", str(int(flag))]
                command += ["--batches", *map(str, arguments.batches)]
                result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                for line in result.stdout.splitlines():
                    cell = Cell(**json.loads(line))
                    key = (cell.dtype, cell.batch_invariant, cell.batch, cell.prompts, cell.reference)
                    if key not in best or cell.cpu_seconds < best[key].cpu_seconds:
                        best[key] = cell
    return list(best.values())


def tables(cells: list[Cell]) -> str:
    """Drift and cost as two tables."""
    lines = [
        "| dtype | batch-invariant | prompts | batch | against | max abs delta log-prob | mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in cells:
        numbers = "0 (same bits) | 0" if c.equal else f"{c.maximum:.1e} | {c.mean:.1e}"
        flag = "yes" if c.batch_invariant else "no"
        lines.append(f"| {c.dtype} | {flag} | {c.prompts} | {c.batch} | {c.reference} | {numbers} |")
    seconds = {(c.dtype, c.batch, c.batch_invariant): c.cpu_seconds for c in cells if c.prompts == "whole"}
    lines += ["", "| dtype | batch | tok/s of CPU time | batch-invariant | time ratio |", "|---|---|---|---|---|"]
    for (dtype, batch, flag), plain in seconds.items():
        if not flag and (dtype, batch, True) in seconds:
            tokens, invariant = batch * OUTPUT_TOKENS, seconds[dtype, batch, True]
            rates = f"{tokens / plain:.0f} | {tokens / invariant:.0f}"
            lines.append(f"| {dtype} | {batch} | {rates} | {invariant / plain:.2f} |")
    return "\n".join(lines)


def plot(cells: list[Cell], path: Path) -> None:
    """Largest and mean drift over the batch size, one panel a dtype; 0 is a place of its own on the axis."""
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(c.dtype for c in cells))
    figure, panels = pyplot.subplots(
        1, len(dtypes), figsize=(5.5 * len(dtypes), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    labels: dict[str, Any] = {}
    for panel, dtype in zip(panels[0], dtypes, strict=True):
        mine = [c for c in cells if c.dtype == dtype]
        for reference, prompts in dict.fromkeys((c.reference, c.prompts) for c in mine):
            line = [c for c in mine if (c.reference, c.prompts) == (reference, prompts)]
            places = range(len(line))
            (drawn,) = panel.plot(places, [c.maximum for c in line], marker="o")
            panel.plot(places, [c.mean for c in line], "--", color=drawn.get_color(), marker=".")
            panel.set_xticks(list(places), [str(c.batch) for c in line])
            flag = " (--batch-invariant)" if line[0].batch_invariant else ""
            labels[f"{reference}{flag}, prompts {prompts}"] = drawn
        panel.set_title(dtype)
        panel.set_xlabel("batch size")
    panels[0][0].set_yscale("symlog", linthresh=1e-8)
    panels[0][0].set_ylim(-2e-9, 3 * max(c.maximum for c in cells))
    panels[0][0].set_ylabel("|delta log-prob|: solid max, dashed mean")
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(path, dpi=140)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="directory in Hugging Face layout, or the name of an embedded model")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each configuration")
    parser.add_argument("--json", type=Path, help="file for the cells")
    parser.add_argument("--plot", type=Path, help="file for the plot (PNG; needs matplotlib)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--invariant", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        for cell in measure(
            arguments.model, arguments.worker, arguments.batches, batch_invariant=bool(arguments.invariant)
        ):
            print(json.dumps(asdict(cell)), flush=True)
        return 0
    cells = run(arguments)
    print(tables(cells))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    if arguments.plot:
        plot(cells, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
