"""``rollspan bench serve``: throughput and latency of a running server, and what weight updates cost its streams."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rollspan.bench.load import Extent, Load, UpdatePlan, Workload, generate_once
from rollspan.bench.report import print_report, show_progress
from rollspan.bench.results import LoadResult, RequestRecord
from rollspan.http_client import HttpClient, HttpError

SUMMARY = "throughput and latency of a running server"
DESCRIPTION = """\
Drive a running server's /inference/v1/generate (rollspan's, or vLLM's with its scale-out endpoints on) with so many
requests at once, and print tokens a second, time to first token and inter-token latency. Ctrl-C prints what it has.
"""

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``rollspan bench serve``."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="root of the server (default: %(default)s)")
    parser.add_argument(
        "--concurrency",
        metavar="N[,N...]",
        type=_positive_list,
        default=[1, 8, 64],
        help="requests at once, one run for each number (default: 1,8,64)",
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--num-requests", metavar="N", type=positive, help="requests a run (default: 4 for each one at once)"
    )
    extent.add_argument("--duration", metavar="S", type=_seconds, help="start no new request after so many seconds")
    parser.add_argument("--prompt-tokens", metavar="N", type=positive, default=32, help="(default: %(default)s)")
    parser.add_argument("--output-tokens", metavar="N", type=positive, default=128, help="(default: %(default)s)")
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="streamed or collected (default: stream)"
    )
    parser.add_argument(
        "--logprobs", metavar="N", type=int, help="log-probs to ask for with each token (default: none)"
    )
    parser.add_argument("--temperature", metavar="T", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument(
        "--vocabulary-size",
        metavar="N",
        type=positive,
        default=16,
        help="prompts are random ids below this (default: 16, which every model has)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of prompts and sampling (default: 0)")
    parser.add_argument(
        "--warmup", metavar="N", type=int, default=1, help="requests before the clock runs (default: 1)"
    )
    parser.add_argument(
        "--weight-update",
        metavar="PATH[,PATH...]",
        type=lambda text: [path for path in text.split(",") if path],
        help="update the weights from these directories in turn while the load runs; paths as the server sees them",
    )
    parser.add_argument(
        "--update-interval", metavar="S", type=_seconds, default=1.0, help="time between updates (default: 1)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - for stdout instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; returns 0, 1 when anything failed, 130 when it was interrupted."""
    try:
        results, interrupted = asyncio.run(_run(args))
    except (HttpError, ValueError) as error:
        print(f"rollspan bench serve: error: {args.url}: {error}", file=sys.stderr)
        return 1
    if args.json != "-":
        print_report(results)
    if args.json is not None:
        text = json.dumps(
            {"url": args.url, "settings": _settings(args), "runs": [r.as_json() for r in results]}, indent=2
        )
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
    if interrupted:
        return _INTERRUPTED
    return 1 if any(result.errors for result in results) else 0


async def _run(args: argparse.Namespace) -> tuple[list[LoadResult], bool]:
    workload = Workload(
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        stream=args.stream,
        logprobs=args.logprobs,
        temperature=args.temperature,
        vocabulary_size=args.vocabulary_size,
        seed=args.seed,
    )
    updates = UpdatePlan(args.weight_update, args.update_interval) if args.weight_update else None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, _interrupt, loop, stop)
    results: list[LoadResult] = []
    try:
        await _warm_up(args.url, workload, args.warmup)
        for concurrency in args.concurrency:
            if stop.is_set():
                break
            requests = args.num_requests
            if requests is None and args.duration is None:
                requests = 4 * concurrency
            load = Load(args.url, workload, Extent(requests, args.duration), concurrency)
            results.append(load.result)
            watch = partial(show_progress, requests=requests, seconds=args.duration, out=sys.stderr)
            await load.run(stop, updates, watch)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return results, stop.is_set()


def _interrupt(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    stop.set()
    # A second Ctrl-C ends the program the usual way.
    loop.remove_signal_handler(signal.SIGINT)


async def _warm_up(url: str, workload: Workload, requests: int) -> None:
    async with HttpClient(url) as client:
        for number in range(requests):
            record = RequestRecord(started=time.perf_counter())
            await generate_once(client, workload, -1 - number, record)


def _settings(args: argparse.Namespace) -> dict[str, object]:
    left_out = {"url", "json", "command", "concurrency"}
    return {name: value for name, value in vars(args).items() if name not in left_out}


def positive(text: str) -> int:
    """A flag's value that must be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _positive_list(text: str) -> Sequence[int]:
    return [positive(part) for part in text.split(",")]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return value
