"""The command line of ``rollspan verify``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rollspan.bench.progress import Progress
from rollspan.bench.report import print_table
from rollspan.config import DTYPES, LOGPROBS_MODES
from rollspan.flags import Parser
from rollspan.verify.recording import RecordingError, Rollout, read_recordings
from rollspan.verify.sources import SourceError, Sources
from rollspan.verify.verdict import Verdict, Verifier

DESCRIPTION = """\
Score recorded rollouts again: every output token under the weights that its span names, on keys and values of the
weights that computed them, with plain transformers. Tells for each span how far the reported log-probs are from those,
and for each boundary where the log-probs allow it to be. Exit code 0: all spans are true; 1: some are not, or cannot be
verified; 2: wrong usage.

A recording is a file of JSON lines, {"request": BODY, "response": BODY} of POST /inference/v1/generate, with log-probs
("logprobs": 0). Responses with "return_kv_versions": true say which weights computed the KV; without it, both are tried
for updates in mid-rollout: that the KV was kept, and that it was computed anew.
"""
EPILOG = """\
examples:
  rollspan verify rollouts.jsonl --checkpoint step-1=ckpt/1 --checkpoint step-2=ckpt/2
  curl localhost:8000/weight_history > history.json
  rollspan verify rollouts.jsonl --history history.json --checkpoint ckpt/1 --checkpoint ckpt/2   by digest
"""


def run(words: Sequence[str]) -> int:
    """Run ``rollspan verify WORDS``; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(words)
    if args.tolerance is not None and not 0 <= args.tolerance < math.inf:
        parser.error(f"--tolerance must be a number of at least 0, got {args.tolerance}")
    if args.models_in_memory < 2:
        parser.error(f"--models-in-memory must be at least 2, got {args.models_in_memory}")
    try:
        sources = Sources(args.checkpoint, args.history, dtype=args.dtype, most=args.models_in_memory)
        recorded = [entry for path in args.recordings for entry in read_recordings(path)]
    except (SourceError, OSError) as error:
        parser.error(str(error))
    if not recorded:
        parser.error("the recordings hold no rollout")
    verifier = Verifier(sources, raw_logprobs=args.logprobs_mode == "raw", tolerance=args.tolerance)
    verdicts: list[Verdict] = []
    interrupted = False
    try:
        with Progress(len(recorded), sys.stderr) as progress:
            for place, entry in recorded:
                progress.begin(place)
                verdicts.append(_verdict(verifier, place, entry))
    except KeyboardInterrupt:
        interrupted = True
    _tell(args, verdicts, len(recorded))
    if interrupted:
        return 130
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _parser() -> Parser:
    parser = Parser(prog="rollspan verify", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("recordings", metavar="ROLLOUTS", type=Path, nargs="+", help="file of recorded rollouts")
    parser.add_argument(
        "--checkpoint",
        metavar="[LABEL=]DIR",
        action="append",
        required=True,
        help="directory with the weights called LABEL, or with those whose digest the history names; repeat it",
    )
    parser.add_argument("--history", metavar="FILE", type=Path, help="answer of GET /weight_history: commit to digest")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="type that the server ran with (default: each checkpoint's own)"
    )
    parser.add_argument(
        "--logprobs-mode", choices=LOGPROBS_MODES, default="processed", help="the server's (default: processed)"
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="largest difference of two log-probs that counts as none (default: 0.001 in float32, 0.1 in bfloat16, "
        "0.02 in float16)",
    )
    parser.add_argument(
        "--models-in-memory", metavar="N", type=int, default=4, help="checkpoints kept loaded at once (default: 4)"
    )
    parser.add_argument("--all", action="store_true", help="list the spans of rollouts that hold, too")
    parser.add_argument("--json", metavar="FILE", help="write the verdicts there as one JSON object; - is stdout")
    return parser


def _verdict(verifier: Verifier, place: str, entry: Rollout | RecordingError) -> Verdict:
    if isinstance(entry, RecordingError):
        return Verdict(place, holds=False, problem=str(entry))
    return verifier.verify(entry)


def _tell(args: argparse.Namespace, verdicts: list[Verdict], total: int) -> None:
    if args.json != "-":
        _print(verdicts, total, sys.stdout, everything=args.all)
    if args.json is not None:
        text = json.dumps(_as_json(verdicts, total)) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text)


def _as_json(verdicts: list[Verdict], total: int) -> dict[str, Any]:
    return {
        "holds": len(verdicts) == total and all(verdict.holds for verdict in verdicts),
        "rollouts": total,
        "verified": len(verdicts),
        "failed": sum(not verdict.holds for verdict in verdicts),
        "tokens": sum(verdict.tokens for verdict in verdicts),
        "max_abs_error": max((verdict.max_abs_error for verdict in verdicts), default=0.0),
        "verdicts": [verdict.as_json() for verdict in verdicts],
    }


def _print(verdicts: list[Verdict], total: int, out: TextIO, *, everything: bool) -> None:
    rows = [["rollout", "version", "commit", "tokens", "log-probs off by", "neighbour's worse by", "boundary"]]
    for verdict in verdicts:
        if verdict.holds and not everything:
            continue
        places = {change.position: change for change in verdict.boundaries}
        for span in verdict.spans:
            change = places.get(span.start)
            where = "" if change is None else f"{change.position}, log-probs allow {change.earliest} to {change.latest}"
            if change is not None and change.earliest == change.latest:
                where = f"{change.position}, proved"
            margin = "" if span.rival_margin is None else f"{span.rival_margin:.2g}"
            row = [verdict.place, str(span.version), str(span.commit), f"{span.start} to {span.end - 1}"]
            rows.append([*row, f"{span.max_abs_error:.1e}", margin, where])
    if len(rows) > 1:
        print_table(rows, out)
    for verdict in verdicts:
        if not verdict.holds:
            out.write(f"{verdict.place}: {verdict.problem}\n")
    failed = sum(not verdict.holds for verdict in verdicts)
    boundaries = [change for verdict in verdicts for change in verdict.boundaries]
    proved = sum(change.earliest == change.latest for change in boundaries)
    kinds = {kind: sum(verdict.kv == kind for verdict in verdicts) for kind in ("recorded", "kept", "recomputed")}
    stopped = "" if len(verdicts) == total else f" (stopped: {total} are recorded)"
    tokens = sum(verdict.tokens for verdict in verdicts)
    largest = max((verdict.max_abs_error for verdict in verdicts), default=0.0)
    result = f"{failed} rollouts FAILED" if failed else "all spans are true"
    histories = ", ".join(f"{kind} in {count}" for kind, count in kinds.items() if count)
    out.write(f"{len(verdicts)} rollouts{stopped}, {tokens} tokens: {result}\n")
    out.write(f"log-probs off by {largest:.1e} at most; {len(boundaries)} boundaries, {proved} proved to the token; ")
    out.write(f"KV {histories}\n")
