"""What ``bench throughput`` and ``bench latency`` share: flags, the engines they start, the alternating run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rollspan.bench.alternating import Batch, Cell, geometric_mean, run_cells, steps
from rollspan.bench.progress import Progress
from rollspan.bench.serve import positive
from rollspan.bench.side import OURS, PEERS, Program, Side, SideError, thread_environment
from rollspan.config import EngineConfig
from rollspan.flags import Parser, add_engine_flags, engine_config
from rollspan.launcher import engine_environment

INTERRUPTED = 130
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of both commands; those of the engine are `rollspan serve`'s, but for two that mean more here.

    Args:
        parser: one made with ``conflict_handler="resolve"``.
    """
    add_engine_flags(parser)
    parser.add_argument("--model", default=argparse.SUPPRESS, help="the same as MODEL")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--batch", metavar="B", type=positive, nargs="+", default=[1, 8, 32], help="prompts at once (default: 1 8 32)"
    )
    group.add_argument("--input-tokens", metavar="N", type=positive, default=64, help="(default: %(default)s)")
    group.add_argument("--output-tokens", metavar="N", type=positive, default=128, help="(default: %(default)s)")
    group.add_argument(
        "--logprobs",
        metavar="N",
        type=_logprobs,
        nargs="+",
        default=[None],
        help="none, or how many log-probs beside each token's own; several are compared (default: none)",
    )
    group.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument("--rounds", metavar="N", type=positive, default=3, help="of each cell (default: %(default)s)")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of the prompts (default: 0)")
    group.add_argument(
        "--threads",
        "--num-threads",
        dest="num_threads",
        metavar="N",
        type=positive,
        default=1,
        help="compute threads of every engine (default: 1)",
    )
    group.add_argument(
        "--against",
        metavar="ENGINE",
        choices=tuple(PEERS),
        nargs="+",
        default=[],
        help=f"compare with {', '.join(PEERS)}, in one alternating run",
    )
    group.add_argument(
        "--peer-python",
        metavar="[ENGINE=]PATH",
        action="append",
        default=[],
        help="interpreter that has the engines to compare with, or one of them (default: this one)",
    )
    group.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write all figures there as one object, after each batch size; - or nothing: on stdout, at the end, "
        "instead of the table",
    )


@dataclass(slots=True)
class Comparison:
    """What was measured, as far as it got. ``names``: our engine first, then those it is compared with."""

    settings: dict[str, Any]
    names: list[str]
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    interrupted: bool = False
    failure: str | None = None

    @property
    def exit_code(self) -> int:
        """0, 1 after a failure, 130 after Ctrl-C."""
        return INTERRUPTED if self.interrupted else 1 if self.failure is not None else 0

    @property
    def measured(self) -> list[Cell]:
        """Cells with at least one round of every engine."""
        return [cell for cell in self.cells if all(cell.answers.get(name) for name in self.names)]


def compare(parser: Parser, args: argparse.Namespace, op: str, finished: Callable[[Comparison], None]) -> Comparison:
    """Starts the engines and runs all cells; an interrupt or a failure ends it with the figures so far.

    Args:
        op: ``generate`` or ``trace``.
        finished: called with the figures so far after each batch size.
    """
    flags = vars(args)
    config = engine_config(parser, {name: value for name, value in flags.items() if name != "seed"})
    facts = _model_facts(config)
    pythons = _pythons(parser, args)
    names = [OURS, *dict.fromkeys(args.against)]
    length = args.input_tokens + args.output_tokens
    settings = {
        "model": config.model,
        "dtype": facts.dtype,
        **{name: flags[name] for name in ("batch", "logprobs", "input_tokens", "output_tokens", "temperature")},
        "rounds": args.rounds,
        "seed": args.seed,
        "threads": args.num_threads,
        "options": _engine_options(flags),
    }
    load = {
        "model": config.model,
        "dtype": facts.dtype,
        "threads": args.num_threads,
        "max_model_len": config.max_model_len or length,
        "max_batch": max(args.batch),
        "kv_bytes": max(2**30, 2 * facts.kv_bytes_per_token * length * max(args.batch)),
    }
    result = Comparison(settings, names)
    batch = Batch(args.input_tokens, args.output_tokens, args.temperature, facts.vocabulary_size, args.seed)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_terminated_as_interrupted())
            sides = []
            for name in names:
                options = settings["options"] if name == OURS else {}
                side = Side(_program(name, config, pythons, args.num_threads), {**load, "options": options})
                sides.append(stack.enter_context(side))
            for side in sides:
                print(f"loading {Path(config.model).name} into {side.name}", file=sys.stderr)
                result.engines[side.name] = side.loaded()
            total = len(args.batch) * steps(len(sides), len(args.logprobs), args.rounds)
            progress = stack.enter_context(Progress(total, sys.stderr))
            for size in args.batch:
                run_cells(
                    sides,
                    batch,
                    op=op,
                    size=size,
                    logprobs=args.logprobs,
                    rounds=args.rounds,
                    cells=result.cells,
                    watch=progress.begin,
                )
                finished(result)
    except KeyboardInterrupt:
        result.interrupted = True
    except SideError as error:
        result.failure = str(error)
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
    return result


def as_json(result: Comparison, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The object of ``--json``: ``ratio`` holds, for each engine compared with, the geometric mean over all cells."""
    planned = len(result.settings["batch"]) * len(result.settings["logprobs"])
    complete = result.exit_code == 0 and len(cells) == planned
    whole = {"settings": result.settings, "engines": result.engines, "cells": cells, "complete": complete}
    ratios = {
        name: geometric_mean([cell["ratio"][name]["median"] for cell in cells]) for name in result.names[1:] if cells
    }
    return {**whole, "ratio": ratios} if ratios else whole


def write(args: argparse.Namespace, result: dict[str, Any], *, last: bool) -> None:
    """Writes the object where ``--json`` says: a file whenever there is more, so that a killed run has figures too."""
    text = json.dumps(result, indent=2)
    if args.json == "-" and last:
        print(text)
    elif args.json not in (None, "-"):
        Path(args.json).write_text(text + "\n")


def title(result: Comparison) -> str:
    """One line that says what was measured."""
    s = result.settings
    sampling = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    threads = "1 thread" if s["threads"] == 1 else f"{s['threads']} threads"
    work = f"{s['input_tokens']} tokens in, {s['output_tokens']} out, {sampling}"
    return f"{Path(s['model']).name}, {s['dtype']}: {work}, {threads}, {s['rounds']} alternating rounds"


@dataclass(frozen=True, slots=True)
class _ModelFacts:
    dtype: str
    vocabulary_size: int
    kv_bytes_per_token: int


def _model_facts(config: EngineConfig) -> _ModelFacts:
    whole = json.loads((config.model_directory() / "config.json").read_text())
    text = whole.get("text_config") or whole
    dtype = config.dtype
    if dtype == "auto":
        dtype = str(text.get("dtype") or text.get("torch_dtype") or whole.get("torch_dtype") or "float32")
    layers = text.get("num_hidden_layers") or text.get("n_layer") or 32
    heads = text.get("num_attention_heads") or text.get("n_head") or 32
    width = text.get("head_dim") or (text.get("hidden_size") or text.get("n_embd") or 4096) // heads
    per_token = 2 * layers * (text.get("num_key_value_heads") or heads) * width * _BYTES.get(dtype, 4)
    return _ModelFacts(dtype, int(text["vocab_size"]), per_token)


def _engine_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's flags that were given, but for those that every engine gets."""
    shared = {"model", "dtype", "num_threads", "max_model_len", "seed"}
    return {name: flags[name] for name in EngineConfig.__dataclass_fields__ if name in flags and name not in shared}


def _program(name: str, config: EngineConfig, pythons: Mapping[str, str], threads: int) -> Program:
    if name == OURS:
        return Program(OURS, "rollspan_llm", sys.executable, thread_environment(threads, engine_environment(config)))
    foreign = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return Program(name, PEERS[name], pythons[name], thread_environment(threads, foreign))


def _pythons(parser: Parser, args: argparse.Namespace) -> dict[str, str]:
    pythons = dict.fromkeys(PEERS, sys.executable)
    for word in args.peer_python:
        name, separator, path = word.partition("=")
        if separator and name in PEERS:
            pythons[name] = path
        elif separator and not Path(word).exists():
            parser.error(f"--peer-python {word}: there are {', '.join(PEERS)}")
        else:
            pythons.update(dict.fromkeys(PEERS, word))
    return pythons


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: engines that rest would stay behind otherwise."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _logprobs(text: str) -> int | None:
    if text == "none":
        return None
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be none or at least 0, got {text}")
    return value
