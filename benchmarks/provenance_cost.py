"""What provenance costs: generating with bounds and KV versions asked for, against nothing asked for.

`python benchmarks/provenance_cost.py` generates with the embedded model in this process, engine and output processing
in one thread. Both sides run in turns, in pairs whose order alternates: each turn opens a batch, runs its prompts, and
takes decode steps. It prints

- the tokens per second of CPU time of each side's fastest turn, and the median over pairs of what asking takes more;
- how many bytecode instructions of Python a token takes on either side: these do not depend on what else the machine
  does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from host_work import bytecodes

from rollspan import LLM, Provenance, RequestOutputKind, SamplingParams

PROMPT_TOKENS = 64
STEPS = 64
"""Decode steps of a turn: some blocks of each sequence."""

SIDES = {
    "off": Provenance(),
    "on": Provenance(max_weight_lag=4, return_kv_versions=True, allow_stale_prefix=True),
}


def turn(llm: LLM, batch: int, provenance: Provenance, count: Callable[[Callable[[], None]], float]) -> float:
    """What ``count`` makes of STEPS decode steps of so many sequences."""
    params = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
    for number in range(batch):
        prompt = [2 + (number + place) % 8 for place in range(PROMPT_TOKENS)]
        llm.add_request(prompt, params, f"request-{number}", provenance=provenance)
    for _ in range(-(-batch * PROMPT_TOKENS // llm.hello.limits.max_num_batched_tokens) + 2):
        llm.step()

    def run() -> None:
        for _ in range(STEPS):
            llm.step()

    figure = count(run)
    llm.abort()
    while llm.has_unfinished_requests():
        llm.step()
    return figure


def cpu_seconds(run: Callable[[], None]) -> float:
    """CPU time of this thread."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


def measure(batch: int, pairs: int) -> dict[str, float]:
    """Figures of one batch size."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with LLM(num_threads=1, max_num_seqs=batch, async_scheduling=False) as llm:
        for asked in SIDES.values():
            turn(llm, batch, asked, cpu_seconds)
        for pair in range(pairs):
            for side in sorted(SIDES, reverse=pair % 2 == 1):
                seconds[side].append(turn(llm, batch, SIDES[side], cpu_seconds))
        codes = {side: turn(llm, batch, asked, bytecodes) for side, asked in SIDES.items()}
    tokens = STEPS * batch
    more = statistics.median(on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)) - 1
    return {
        "batch": batch,
        **{f"tokens_per_second_{side}": tokens / min(times) for side, times in seconds.items()},
        "percent_more": 100 * more,
        "percent_more_of_the_fastest": 100 * (min(seconds["on"]) / min(seconds["off"]) - 1),
        **{f"bytecodes_per_token_{side}": count / tokens for side, count in codes.items()},
    }


def main() -> None:
    """Prints one line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 128], help="sequences at a time")
    parser.add_argument("--pairs", type=int, default=20, help="turns of each side")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    figures = [measure(batch, args.pairs) for batch in args.batch]
    if args.json:
        print(json.dumps(figures))
        return
    for figure in figures:
        print(
            f"batch {figure['batch']:4.0f}: {figure['tokens_per_second_off']:9.0f} tokens/s off, "
            f"{figure['tokens_per_second_on']:9.0f} on: {figure['percent_more']:+.2f} % CPU time (median of pairs), "
            f"{figure['percent_more_of_the_fastest']:+.2f} % (fastest turns); "
            f"{figure['bytecodes_per_token_off']:.1f} and {figure['bytecodes_per_token_on']:.1f} bytecodes a token"
        )


if __name__ == "__main__":
    main()
