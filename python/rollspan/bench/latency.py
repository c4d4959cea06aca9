"""``rollspan bench latency``: time to the first token and between tokens of one batch, of the engine alone."""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import pairwise
from typing import Any, TextIO

from rollspan.bench.alternating import Cell, Middle
from rollspan.bench.comparison import Comparison, add_arguments, as_json, compare, title, write
from rollspan.bench.report import print_table
from rollspan.bench.results import Spread
from rollspan.flags import Parser

SUMMARY = "time to first token and between tokens of the engine alone, also against others"
DESCRIPTION = """\
Run batches of random prompts through an engine without a server, and print when their tokens came: time to the first
token, time between one token of a sequence and its next (ITL), and the time of the whole batch, over all sequences and
rounds. With --against other engines run the same batches in turn; the ratio is their time for a batch over ours, round
by round. Ctrl-C prints what it has.

  rollspan bench latency --batch 1 8
  rollspan bench latency ./qwen --against transformers
"""

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0, 1 when an engine failed, 130 when it was interrupted."""
    result = compare(parser, args, "trace", lambda so_far: write(args, _json(so_far), last=False))
    if args.json != "-" and result.measured:
        print_report(result, sys.stdout)
    write(args, _json(result), last=True)
    return result.exit_code


def print_report(result: Comparison, out: TextIO) -> None:
    """Prints one row for each cell and engine."""
    ours = result.names[0]
    rows = [["batch", "log-probs", "engine", "TTFT p50", "p99", "ITL p50", "p99", "max", "batch p50", "max"]]
    rows[0] += ["ratio"] if len(result.names) > 1 else []
    for cell in result.measured:
        for name in result.names:
            first, between, whole = _spreads(cell, name)
            row = [str(cell.size), "off" if cell.logprobs is None else str(cell.logprobs), name]
            row += [_milliseconds(value) for value in (first.p50, first.p99)]
            row += [_milliseconds(value) for value in (between.p50, between.p99, between.largest)]
            row += [_milliseconds(value) for value in (whole.p50, whole.largest)]
            if name != ours:
                ratio = Middle.of(cell.ratios(ours, name))
                row.append(f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})")
            elif len(result.names) > 1:
                row.append("")
            rows.append(row)
    out.write(title(result) + "\n")
    print_table(rows, out)
    out.write("times in ms\n")


def _spreads(cell: Cell, name: str) -> tuple[Spread, Spread, Spread]:
    sequences = [times for answer in cell.answers[name] for times in answer["times"]]
    first = Spread.of([times[0] for times in sequences])
    between = Spread.of([after - before for times in sequences for before, after in pairwise(times)])
    return first, between, Spread.of([answer["seconds"] for answer in cell.answers[name]])


def _json(result: Comparison) -> dict[str, Any]:
    return as_json(result, [_cell_json(cell, result) for cell in result.measured])


def _cell_json(cell: Cell, result: Comparison) -> dict[str, Any]:
    ours, *peers = result.names
    found: dict[str, Any] = {"batch": cell.size, "logprobs": cell.logprobs}
    for key, place in (("time_to_first_token_ms", 0), ("inter_token_latency_ms", 1), ("batch_ms", 2)):
        found[key] = {name: _spreads(cell, name)[place].milliseconds() for name in result.names}
    if peers:
        found["ratio"] = {peer: Middle.of(cell.ratios(ours, peer)).as_json() for peer in peers}
        found["first_token_ratio"] = {
            peer: statistics.median([times[0] for answer in cell.answers[peer] for times in answer["times"]])
            / statistics.median([times[0] for answer in cell.answers[ours] for times in answer["times"]])
            for peer in peers
        }
    return found


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.1f}"
