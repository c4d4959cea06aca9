"""``rollspan bench throughput``: output tokens a second of the engine alone, and its ratio to other engines."""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any, TextIO

from rollspan.bench.alternating import Cell, Middle
from rollspan.bench.comparison import Comparison, add_arguments, as_json, compare, title, write
from rollspan.bench.report import print_table
from rollspan.flags import Parser

SUMMARY = "tokens a second of the engine alone, also against transformers and vLLM"
DESCRIPTION = """\
Run batches of random prompts through an engine without a server, and print output tokens a second, the prompts' time
included. With --against another engine runs the same prompts from the same model directory, each engine in a process
and an interpreter of its own, in one run that alternates between them; the ratio is ours over theirs, round by round.
Every number is the median, with the smallest and the largest round. Ctrl-C prints what it has.

  rollspan bench throughput
  rollspan bench throughput ./qwen --batch 1 8 32 128 --logprobs none 0
  rollspan bench throughput ./qwen --against vllm transformers --peer-python vllm=/opt/vllm/bin/python
"""

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]


def run(parser: Parser, args: argparse.Namespace) -> int:
    """Runs the benchmark; returns 0, 1 when an engine failed, 130 when it was interrupted."""
    result = compare(parser, args, "generate", lambda so_far: write(args, _json(so_far), last=False))
    if args.json != "-" and result.measured:
        print_report(result, sys.stdout)
    write(args, _json(result), last=True)
    return result.exit_code


def print_report(result: Comparison, out: TextIO) -> None:
    """Prints one row for each cell, then what log-probs cost."""
    ours, *peers = result.names
    header = ["batch", "log-probs", ours, *(text for peer in peers for text in (peer, "ratio"))]
    rows = [[*header, *(f"{name} CPU" for name in result.names)]]
    cells = result.measured
    for cell in cells:
        row = [str(cell.size), "off" if cell.logprobs is None else str(cell.logprobs)]
        row.append(_speed(cell, ours))
        for peer in peers:
            row += [_speed(cell, peer), _shown(Middle.of(cell.ratios(ours, peer)), ".2f")]
        for name in result.names:
            used = cell.cpu_microseconds(name)
            row.append("-" if used is None else f"{used:,.0f}")
        rows.append(row)
    out.write(title(result) + "\n")
    print_table(rows, out)
    out.write("output tokens a second: median round (slowest..fastest); ratio: ours over theirs, round by round;\n")
    out.write("CPU: µs a token of all of an engine's processes, in its best round\n")
    costs = [(cell, costs) for cell in cells if (costs := logprobs_cost(cell, result, cells))]
    if costs:
        out.write("\nextra time with log-probs\n")
        rows = [["batch", "log-probs", *result.names]]
        for cell, cost in costs:
            rows.append([str(cell.size), str(cell.logprobs), *(f"{cost[name]:+.1%}" for name in result.names)])
        print_table(rows, out)
    for peer in peers:
        shares = [share for cell in cells if (share := cell.agreement(ours, peer)) is not None]
        if shares and result.settings["temperature"] == 0:
            out.write(f"same first token as {peer}: {statistics.fmean(shares):.1%} of the prompts\n")


def logprobs_cost(cell: Cell, result: Comparison, cells: list[Cell]) -> dict[str, float] | None:
    """For each engine, the median over rounds of the time with log-probs over that without, less 1."""
    without = next((other for other in cells if other.size == cell.size and other.logprobs is None), None)
    if cell.logprobs is None or without is None:
        return None
    costs = {}
    for name in result.names:
        pairs = zip(without.tokens_per_second(name), cell.tokens_per_second(name), strict=False)
        costs[name] = statistics.median(off / on for off, on in pairs) - 1
    return costs


def _json(result: Comparison) -> dict[str, Any]:
    cells = result.measured
    return as_json(result, [_cell_json(cell, result, cells) for cell in cells])


def _cell_json(cell: Cell, result: Comparison, cells: list[Cell]) -> dict[str, Any]:
    ours, *peers = result.names
    found: dict[str, Any] = {"batch": cell.size, "logprobs": cell.logprobs, "tokens_per_second": {}}
    for name in result.names:
        speeds = cell.tokens_per_second(name)
        found["tokens_per_second"][name] = {**Middle.of(speeds).as_json(), "rounds": speeds}
    found["cpu_microseconds_per_token"] = {name: cell.cpu_microseconds(name) for name in result.names}
    cost = logprobs_cost(cell, result, cells)
    if cost is not None:
        found["logprobs_cost"] = cost
    if peers:
        found["ratio"] = {peer: Middle.of(cell.ratios(ours, peer)).as_json() for peer in peers}
        if result.settings["temperature"] == 0:
            found["same_first_token"] = {peer: cell.agreement(ours, peer) for peer in peers}
    return found


def _speed(cell: Cell, name: str) -> str:
    middle = Middle.of(cell.tokens_per_second(name))
    return _shown(middle, ",.0f" if middle.median >= 100 else ",.1f")


def _shown(middle: Middle, form: str) -> str:
    return f"{middle.median:{form}} ({middle.low:{form}}..{middle.high:{form}})"
