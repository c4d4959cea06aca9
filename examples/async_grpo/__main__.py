"""Asynchronous GRPO on the embedded model: the weights change after every step, under rollouts that go on.

A rollout server and a trainer side by side on two CPU cores. The trainer takes rollouts as they end, corrects each
token for the weights that sampled it (``weight_commits`` and log-probs of the response), makes a step, and hands the
new weights over while generation continues. At the end it proves that the server runs exactly the final weights.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from learner import Learner, Report, Settings
from proof import across_update, fresh_tails, same
from rollouts import Collector, Sampling
from server import Server
from transformers.utils import logging as transformers_logging

from rollspan import models
from rollspan.models import task
from rollspan.trainer import WeightSender


def main() -> int:
    """Runs the example; returns 0 when the final check holds, 1 when not, 130 when interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, metavar="N", help="updates of the weights (default: 120)")
    parser.add_argument("--groups", type=int, default=16, metavar="N", help="groups of 8 rollouts a step (default: 16)")
    parser.add_argument("--max-lag", type=int, default=4, metavar="N", help="oldest tokens, in commits (default: 4)")
    parser.add_argument("--transport", default="shm", help="disk, http, shm or distributed (default: shm)")
    parser.add_argument("--figure", type=Path, default=Path("async_grpo.png"), metavar="PNG", help="curves of the run")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of problems, sampling and rehearsal")
    args = parser.parse_args()
    if args.steps < 1 or args.groups < 1 or args.max_lag < 0:
        parser.error("--steps and --groups must be at least 1, --max-lag at least 0")
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    try:
        return 0 if run(args) else 1
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> bool:
    """Trains, draws and proves; returns whether the proof holds."""
    began = time.monotonic()
    start = models.path("add2-sft")
    problems, held_out = task.split_problems()
    learner = Learner(start, Settings(max_lag=args.max_lag), args.seed)
    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="async-grpo-") as scratch:
        arguments = ["--weight-version", "step-0", "--weights-root", scratch, "--batch-invariant", "--num-threads", "1"]
        with Server(str(start), *arguments) as server:
            options = {"directory": scratch} if args.transport == "disk" else {}
            with WeightSender(server.url, transport=args.transport, **options) as sender:
                train(args, server.url, sender, learner, reports, problems)

                def publish() -> None:
                    sender.send(learner.network, weight_version="final")

                rollouts = asyncio.run(across_update(server.url, held_out[:8], publish))
        final = Path(scratch) / "final"
        learner.network.save_pretrained(final)
        with Server(str(final), "--batch-invariant", "--num-threads", "1") as server:
            tails = asyncio.run(fresh_tails(server.url, rollouts))
    show_lags(reports)
    equal = [same(rollout, tail) for rollout, tail in zip(rollouts, tails, strict=True)]
    tokens = sum(len(rollout.token_ids) - rollout.boundary for rollout in rollouts)
    print(
        f"after the last update {sum(equal)} of {len(equal)} rollouts go on as a fresh server of the final weights "
        f"does, bit for bit: {tokens} tokens and their log-probs"
    )
    try:
        from figures import draw
    except ImportError:
        print("no figure: it needs matplotlib (pip install 'rollspan[plot]')")
    else:
        draw(reports, args.figure)
        print(f"curves: {args.figure}")
    print(f"{'PASS' if all(equal) else 'FAIL'} after {time.monotonic() - began:.0f} s")
    return all(equal)


def train(
    args: argparse.Namespace,
    url: str,
    sender: WeightSender,
    learner: Learner,
    reports: list[Report],
    problems: list[task.Problem],
) -> None:
    """Steps and updates, one for one, while rollouts are in flight."""
    sampling = Sampling(max_lag=args.max_lag, groups_in_flight=args.groups)
    began = time.monotonic()
    tokens = 0
    with Collector(url, problems, sampling, args.seed) as collector:
        for step in range(1, args.steps + 1):
            groups = [collector.take() for _ in range(args.groups)]
            reports.append(learner.step(groups, commit=step - 1))
            sent = sender.send(learner.network, weight_version=f"step-{step}")
            if sent.weight_commits != (step,):
                raise RuntimeError(f"update {step} became commit {sent.weight_commits}: who else updates this server?")
            tokens += sum(len(rollout.token_ids) for group in groups for rollout in group)
            if step % 10 == 0 or step == args.steps or sys.stdout.isatty():
                show(step, args.steps, reports, tokens, time.monotonic() - began)
    print()


def show(step: int, steps: int, reports: list[Report], tokens: int, seconds: float) -> None:
    """One line of progress: in place on a terminal, every tenth step elsewhere."""
    recent = reports[-10:]
    reward = sum(report.reward for report in recent) / len(recent)
    lags: Counter[int] = sum((report.lags for report in recent), Counter())
    lag = sum(lag * count for lag, count in lags.items()) / max(sum(lags.values()), 1)
    text = f"step {step:>4}/{steps}  right {reward:.0%}  lag {lag:.1f}  {tokens / seconds:,.0f} tok/s  {seconds:.0f} s"
    print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)


def show_lags(reports: list[Report]) -> None:
    """How old the tokens were, and what became of them."""
    lags: Counter[int] = sum((report.lags for report in reports), Counter())
    total = sum(lags.values())
    print("tokens by commits behind: " + ", ".join(f"{lag}: {lags[lag] / total:.0%}" for lag in sorted(lags)))
    print(
        f"log-probs of tokens with today's weights differ by {max(report.numerics for report in reports):.1e} at most "
        f"from the trainer's own; {sum(report.left_out for report in reports)} answer tokens were too old"
    )


if __name__ == "__main__":
    sys.exit(main())
