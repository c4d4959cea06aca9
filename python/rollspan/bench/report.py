"""How a load run is shown: a progress line while it runs, a table at the end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rollspan.bench.results import LoadResult, Spread

_BAR_WIDTH = 24
_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 10.0


def progress_text(result: LoadResult, requests: int | None, seconds: float | None, now: float) -> str:
    """One line: a bar over requests or time, output tokens a second so far, failures."""
    done = sum(record.ended is not None or record.error is not None for record in result.records)
    elapsed = max(now - result.started, 1e-9)
    share = min(1.0, done / requests if requests is not None else elapsed / max(seconds or 0.0, 1e-9))
    filled = round(share * _BAR_WIDTH)
    bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
    tokens = sum(record.tokens for record in result.records)
    text = f"concurrency {result.concurrency:>4} [{bar}] {done} requests  {tokens / elapsed:,.0f} tok/s"
    failures = sum(record.error is not None for record in result.records)
    return text + (f"  {failures} failed" if failures else "")


async def show_progress(result: LoadResult, requests: int | None, seconds: float | None, out: TextIO) -> None:
    """Keep a progress line up to date until cancelled: in place on a terminal, a line in ten seconds elsewhere."""
    terminal = out.isatty()
    try:
        while True:
            await asyncio.sleep(_TERMINAL_SECONDS if terminal else _LOG_SECONDS)
            text = progress_text(result, requests, seconds, time.perf_counter())
            out.write(f"\r\x1b[K{text}" if terminal else f"{text}\n")
            out.flush()
    finally:
        if terminal:
            out.write("\r\x1b[K")
            out.flush()


def print_report(results: Sequence[LoadResult], out: TextIO = sys.stdout) -> None:
    """Print one row for each concurrency, then one for each weight update, then the failures."""
    header = ["concurrency", "requests", "failed", "tok/s", "req/s"]
    header += ["TTFT p50", "p99", "ITL p50", "p99", "max", "latency p50", "p99"]
    rows = [header]
    for result in results:
        failed = sum(record.error is not None for record in result.records)
        row = [str(result.concurrency), str(result.succeeded), str(failed), f"{result.tokens_per_second:,.0f}"]
        row.append(f"{result.succeeded / result.seconds:.2f}")
        row += _cells(result.time_to_first_token)[:2] + _cells(result.inter_token_latency)
        rows.append(row + _cells(result.latency)[:2])
    print_table(rows, out)
    out.write("times in ms; ITL is the time between one piece of a stream and the next\n")
    updates = [["concurrency", "update", "took", "stall p50", "stall max"]]
    for result in results:
        for update in result.updates:
            stall = result.stall(update)
            row = [str(result.concurrency), update.label, f"{(update.ended - update.started) * 1000:.1f}"]
            updates.append([*row, _cells(stall)[0], _cells(stall)[2]])
    if len(updates) > 1:
        out.write("\n")
        print_table(updates, out)
        out.write("stall in ms, of the streams that ran through the update: largest gap less the median gap\n")
    for result in results:
        for reason, count in result.errors.most_common():
            out.write(f"concurrency {result.concurrency}: {count} x {reason}\n")


def _cells(spread: Spread) -> list[str]:
    return ["-" if value is None else f"{value * 1000:.1f}" for value in (spread.p50, spread.p99, spread.largest)]


def print_table(rows: Sequence[Sequence[str]], out: TextIO) -> None:
    """Print rows of equal length, the first being the header, in columns aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        out.write("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + "\n")
