"""One decode step of the engine's forward pass, in the forms that it went through.

`python benchmarks/step.py [--models tiny small] [--batch 1 8 32 128]` builds the models of `make_models.py` with random
weights and times, on one thread: the model's own forward (eager), the captured function with the same bits (captured),
with fused kernels (fused), and with repacked bfloat16 weights besides (packed). All have the engine's paged attention,
over 128 keys a sequence; sampling and scheduling are not part of it. A figure is the least CPU time of the thread over
some rounds in which the forms take turns.

`--profile MODEL BATCH` shows instead which lines of the generated function take how long.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from make_models import SHAPES
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from rollspan.kernels.attention_batch import AttentionBatch
from rollspan.runner.attention import NAME, PagedCache, StepContext
from rollspan.runner.graph import CapturedForward, CaptureOptions, capture

LENGTH = 128
BLOCK = 16
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FUSED = frozenset({"norms", "rotations", "gates"})


def build(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights."""
    config = Qwen3Config(**asdict(SHAPES[name]), tie_word_embeddings=True, max_position_embeddings=4096)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)
    return model.eval().requires_grad_(False)


def decode_batch(sequences: int) -> AttentionBatch:
    """One new token for each sequence of LENGTH keys."""
    blocks = LENGTH // BLOCK
    table = 1 + torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    return AttentionBatch(
        query_start=torch.arange(sequences + 1, dtype=torch.int32),
        seq_lens=torch.full((sequences,), LENGTH, dtype=torch.int32),
        block_table=table,
        slot_mapping=table[:, -1].long() * BLOCK + BLOCK - 1,
        max_query_len=1,
        max_seq_len=LENGTH,
    )


def forms(model: PreTrainedModel, context: StepContext) -> dict[str, Callable[..., torch.Tensor]]:
    """The forward pass in each form, by name."""

    def eager(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        output = model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows, rollspan_step=context
        )
        return output.logits[0]  # type: ignore[no-any-return]

    options = {
        "captured": CaptureOptions(exact=True),
        "fused": CaptureOptions(fusions=FUSED),
        "packed": CaptureOptions(),
    }
    found: dict[str, Callable[..., torch.Tensor]] = {"eager": eager}
    for name, each in options.items():
        forward = capture(model, context, each)
        if forward is None:
            raise SystemExit("the model cannot be captured")
        found[name] = forward.forward
    return found


def measure(run: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Least CPU time of each, in microseconds; they take turns."""
    least = dict.fromkeys(run, float("inf"))
    end = time.monotonic() + seconds
    for function in run.values():
        function()
    while time.monotonic() < end:
        for name, function in run.items():
            for _ in range(3):
                start = time.thread_time_ns()
                function()
                least[name] = min(least[name], (time.thread_time_ns() - start) / 1e3)
    return least


def profile(forward: CapturedForward, arguments: tuple[torch.Tensor, ...], rounds: int) -> None:
    """Prints the time of each callable of the generated function, the time to read the clock taken off."""
    spent: dict[str, list[int]] = collections.defaultdict(list)
    namespace = forward.program.namespace
    plain = {name: value for name, value in namespace.items() if callable(value) and name != "forward"}

    def timed(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*positional: object, **named: object) -> object:
            start = time.perf_counter_ns()
            result = function(*positional, **named)
            spent[name].append(time.perf_counter_ns() - start)
            return result

        return call

    namespace.update({name: timed(name.rsplit("_", 1)[0], function) for name, function in plain.items()})
    for _ in range(rounds):
        forward.forward(*arguments)
    namespace.update(plain)
    total = 0.0
    lines = []
    for name, times in spent.items():
        calls = len(times) // rounds
        least = sum(sorted(times)[: len(times) // 2]) / (len(times) // 2) * calls / 1e3
        total += least
        lines.append((least, f"{name:24s} {calls:4d} calls {least:9.1f} us  {least / calls:8.2f} us each"))
    print("\n".join(line for _, line in sorted(lines, reverse=True)))
    print(f"{'together':24s} {'':10s} {total:9.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "small"], choices=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row of the table (default: 4)")
    parser.add_argument("--json", action="store_true", help="one object a row on standard output")
    parser.add_argument("--profile", nargs=2, metavar=("MODEL", "BATCH"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [args.profile[0]] if args.profile else args.models
    print("| model | batch | eager us | captured | fused | packed | eager / packed |\n|---|---|---|---|---|---|---|")
    for name in names:
        model = build(name, DTYPES[args.dtype])
        context = StepContext(PagedCache(1 + max(args.batch) * (LENGTH // BLOCK), BLOCK))
        forward = forms(model, context)
        for sequences in [int(args.profile[1])] if args.profile else args.batch:
            context.batch = decode_batch(sequences)
            ids = torch.arange(sequences)[None] % SHAPES[name].vocab_size
            arguments = (ids, torch.full((1, sequences), LENGTH - 1), torch.arange(sequences))
            with torch.inference_mode():
                if args.profile:
                    whole = capture(model, context)
                    if whole is not None:
                        profile(whole, arguments, 300 if name == "tiny" else 40)
                    return
                run = {key: functools.partial(each, *arguments) for key, each in forward.items()}
                least = measure(run, args.seconds)
            ratio = least["eager"] / least["packed"]
            figures = " | ".join(f"{least[key]:,.0f}" for key in forward)
            print(f"| {name} | {sequences} | {figures} | {ratio:.2f} |", flush=True)
            if args.json:
                print(json.dumps({"model": name, "batch": sequences, "ratio": ratio, **least}), file=sys.stderr)


if __name__ == "__main__":
    main()
