"""Train the embedded models again: ``python -m rollspan.models.train --out DIR``.

Writes DIR/add2-sft and DIR/add2-rl. One thread, fixed seeds: the same machine and library versions give the same bytes.
Takes about three minutes of one core.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollspan.models import network as networks
from rollspan.models import task
from rollspan.models.card import StageResult, model_card
from rollspan.models.reinforcement import ReinforcementSettings, accuracy, train_reinforcement
from rollspan.models.supervised import SupervisedSettings, train_supervised

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

_PROGRESS_EVERY_SECONDS = 2.0


def progress_lines(stage: str, quantity: str, steps: int) -> Callable[[int, float], None]:
    """A reporter that prints at most one line in two seconds, and the last step always, to stderr."""
    started = time.monotonic()
    printed = started

    def report(step: int, value: float) -> None:
        nonlocal printed
        now = time.monotonic()
        if step < steps and now - printed < _PROGRESS_EVERY_SECONDS:
            return
        printed = now
        elapsed = now - started
        remaining = elapsed / step * (steps - step)
        line = f"{stage} step {step}/{steps}  {quantity} {value:.3f}  {elapsed:.0f} s, {remaining:.0f} s left"
        print(line, file=sys.stderr, flush=True)

    return report


def train(out: Path, seed: int, supervised: SupervisedSettings, reinforcement: ReinforcementSettings) -> dict[str, str]:
    """Train both stages and write both checkpoints under ``out``.

    Returns:
        for each checkpoint's name, the SHA-256 of its model.safetensors in hexadecimal.
    """
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    training, held_out = task.split_problems(seed)
    network = networks.build_network(seed)
    digests = {}

    train_supervised(network, training, supervised, seed, progress_lines("supervised", "loss", supervised.steps))
    before = StageResult(accuracy(network, held_out, None), accuracy(network, held_out, seed))
    digests["add2-sft"] = _save(network, out / "add2-sft", model_card("add2-sft", before, supervised, None, seed))

    train_reinforcement(
        network, training, reinforcement, seed, progress_lines("reinforcement", "reward", reinforcement.steps)
    )
    after = StageResult(accuracy(network, held_out, None), accuracy(network, held_out, seed))
    digests["add2-rl"] = _save(network, out / "add2-rl", model_card("add2-rl", after, supervised, reinforcement, seed))

    for name, result in (("add2-sft", before), ("add2-rl", after)):
        print(f"{name}  greedy {result.greedy:.1%}  sampled {result.sampled:.1%}  sha256 {digests[name]}")
    return digests


def _save(network: Qwen3ForCausalLM, directory: Path, card: str) -> str:
    networks.save_checkpoint(network, directory, card)
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rollspan.models.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory that gets add2-sft/ and add2-rl/")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument("--supervised-steps", type=int, default=SupervisedSettings().steps)
    parser.add_argument("--reinforcement-steps", type=int, default=ReinforcementSettings().steps)
    options = parser.parse_args(arguments)
    if options.supervised_steps < 1 or options.reinforcement_steps < 1:
        parser.error("both stages need at least one step")
    try:
        train(
            options.out,
            options.seed,
            SupervisedSettings(steps=options.supervised_steps),
            ReinforcementSettings(steps=options.reinforcement_steps),
        )
    except KeyboardInterrupt:
        print("interrupted: what was finished is in the output directory", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
