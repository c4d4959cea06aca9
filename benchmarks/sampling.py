"""Sampling a batch: the native sampler, its torch twin, torch.multinomial and a full sort, on one thread.

    python benchmarks/sampling.py [--repeats 9] [--vocabulary 32000 151936] [--batch 32 128] [--scale 2]

Logits are normal with standard deviation ``--scale``: flatter than a language model's, which is the harder case for
truncation. Times are thread CPU milliseconds: the best of the repeats and, in brackets, the median; candidates
alternate. multinomial and sort do what a plain implementation would: softmax (after a sort, a cumulative sum and masks
for top-k and top-p), a draw, log_softmax and gather where a log-prob is wanted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollspan.kernels.sampling import make_rows, sample

CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "temperature, log-prob": {"temperature": 0.8, "num_top": 0},
    "temperature, 5 log-probs": {"temperature": 0.8, "num_top": 5},
    "greedy": {"temperature": 0.0},
    "greedy, log-prob": {"temperature": 0.0, "num_top": 0},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 50, top-p 0.9, log-prob": {"top_k": 50, "top_p": 0.9, "num_top": 0},
}


def plain(logits: Tensor, case: dict[str, Any]) -> Callable[[], object]:
    """What a plain implementation would run."""
    temperature, top_k, top_p = (
        case.get(name, default) for name, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0))
    )

    def run() -> object:
        scaled = logits / (temperature or 1.0)
        if top_k or top_p < 1:
            ordered, order = scaled.sort(dim=-1, descending=True)
            if top_k:
                ordered[:, top_k:] = -torch.inf
            shares = torch.softmax(ordered, dim=-1)
            ordered[shares.cumsum(dim=-1) - shares >= top_p] = -torch.inf
            scaled = torch.empty_like(scaled).scatter_(1, order, ordered)
        if "min_p" in case:
            scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + np.log(case["min_p"]), -torch.inf)
        tokens = torch.multinomial(torch.softmax(scaled, -1), 1) if temperature else scaled.argmax(-1, keepdim=True)
        if "num_top" not in case:
            return tokens
        logprobs = torch.log_softmax(scaled, dim=-1)
        return logprobs.gather(1, tokens), logprobs.topk(case["num_top"], dim=-1) if case["num_top"] else None

    return run


def candidates(logits: Tensor, case: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    rows = make_rows(len(logits), seed=np.arange(len(logits)), **case)
    for backend in ("native", "torch"):
        yield backend, lambda backend=backend: sample(logits, rows, backend=backend)  # type: ignore[misc]
    yield ("sort" if "top_k" in case or "top_p" in case else "multinomial"), plain(logits, case)


def measure(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32_000, 151_936])
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--scale", type=float, default=2.0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for vocabulary in arguments.vocabulary:
        for batch in arguments.batch:
            logits = (torch.randn(batch, vocabulary) * arguments.scale).to(getattr(torch, arguments.dtype))
            print(f"\n{batch} rows of {vocabulary} {arguments.dtype}, ms")
            for name, case in CASES.items():
                runs = dict(candidates(logits, case))
                times: dict[str, list[float]] = {candidate: [] for candidate in runs}
                for _ in range(arguments.repeats):
                    for candidate, work in runs.items():
                        times[candidate].append(measure(work))
                cells = (f"{c} {min(t):8.2f} ({statistics.median(t):8.2f})" for c, t in times.items())
                print(f"{name:30}  " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
