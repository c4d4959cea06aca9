"""``rollspan demo``: rollouts whose weights change in mid-generation, and proof that the spans tell the truth.

Starts ``rollspan serve`` on the embedded model, streams a dozen rollouts, publishes other weights twice while they run,
shows which weights sampled which token, and scores every token again under both checkpoints.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from rollspan import models
from rollspan.demo_server import DemoError, Server
from rollspan.demo_view import Painter, Rollout, count_sums, table
from rollspan.flags import Parser
from rollspan.http_client import HttpClient, HttpError
from rollspan.models import task

if TYPE_CHECKING:
    from rollspan.verify.replay import Boundary, Replayer, Segment, SegmentReplay

CHECKPOINTS = {"sft-0": "add2-sft", "rl-1": "add2-rl", "sft-2": "add2-sft"}
"""Labels in the order in which their weights are published, and the embedded model each stands for."""
TOLERANCE = 1e-3
"""Largest difference, in nats, between a reported log-prob and the same computed again."""
ATTEMPTS = 3
MAX_TOKENS = 500
"""Prompt and output fit the model's 512 positions."""


class Progress:
    """How far the rollouts are, for the display and for the weight updates that wait for it."""

    def __init__(self, rollouts: Sequence[Rollout], tokens: int, show: Callable[[str], None]) -> None:
        self._rollouts = rollouts
        self._tokens = tokens
        self._show = show
        self._changed = asyncio.Event()
        self._filled = -1
        self.label = next(iter(CHECKPOINTS))

    def changed(self) -> None:
        """Call after every chunk."""
        self._changed.set()
        done = sum(len(rollout.token_ids) for rollout in self._rollouts)
        total = self._tokens * len(self._rollouts)
        filled = done * 30 // total
        if filled == self._filled:
            return
        self._filled = filled
        self._show(f"  [{'#' * filled}{'-' * (30 - filled)}] {done}/{total} tokens, weights {self.label}")

    @property
    def slowest(self) -> int:
        """Tokens of the rollout that has fewest."""
        return min(len(rollout.token_ids) for rollout in self._rollouts)

    async def reached(self, tokens: int) -> None:
        """Wait until every rollout has so many tokens."""
        while self.slowest < tokens:
            self._changed.clear()
            await self._changed.wait()


class Demo:
    """The demo's acts, in order."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._tokens: int = arguments.tokens
        self._seed: int = arguments.seed
        self._frontend: str = arguments.frontend
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._painter = Painter(
            colours=terminal and not os.environ.get("NO_COLOR"), width=shutil.get_terminal_size((100, 24)).columns
        )
        self._live = terminal
        generator = random.Random(self._seed)
        _, held_out = task.split_problems()
        self._problems = generator.sample(held_out, arguments.rollouts)
        self._rollouts = [Rollout(number, problem) for number, problem in enumerate(self._problems)]

    async def run(self) -> bool:
        """Run the demo; returns whether every check passed.

        Raises:
            DemoError, HttpError: it could not be run.
        """
        began = time.monotonic()
        first = next(iter(CHECKPOINTS))
        arguments = [CHECKPOINTS[first], "--weight-version", first, "--weights-root", str(models.root())]
        server = await Server.start([*arguments, "--frontend", self._frontend])
        try:
            self._say(f"starting: rollspan serve {' '.join(arguments[:3])} ...")
            # The replay needs torch: it is imported while the server starts, so that it doesn't hold up the streams.
            loading = asyncio.create_task(asyncio.to_thread(_load_replayer))
            url = await server.wait_ready()
            self._say(f"ready after {time.monotonic() - began:.1f} s at {url}")
            replayer = await loading
            generating = time.monotonic()
            await self._generate(url)
            seconds = time.monotonic() - generating
        except BaseException:
            # What went wrong is more telling than how the server ends after it.
            with contextlib.suppress(DemoError):
                await server.stop()
            raise
        await server.stop()
        total = sum(len(rollout.token_ids) for rollout in self._rollouts)
        self._say(f"{len(self._rollouts)} rollouts, {total} tokens in {seconds:.1f} s; the server is stopped\n")
        passed = self._check(replayer)
        self._say(f"{'PASS' if passed else 'FAIL'} after {time.monotonic() - began:.1f} s")
        return passed

    async def _generate(self, url: str) -> None:
        """Generate until both updates landed in mid-rollout: longer rollouts each time, for very busy machines."""
        async with HttpClient(url) as client:
            for attempt in range(1, ATTEMPTS + 1):
                if attempt > 1:
                    self._tokens = min(2 * self._tokens, MAX_TOKENS)
                    self._say(f"  the rollouts were faster than the updates: again, with {self._tokens} tokens each")
                    await self._stage(client, first := next(iter(CHECKPOINTS)))
                    await self._publish(client, first)
                await self._generate_once(client)
                if all(len(rollout.versions) == len(CHECKPOINTS) for rollout in self._rollouts):
                    return

    async def _generate_once(self, client: HttpClient) -> None:
        self._rollouts = [Rollout(number, problem) for number, problem in enumerate(self._problems)]
        progress = Progress(self._rollouts, self._tokens, self._show_progress)
        labels = list(CHECKPOINTS)[1:]
        await self._stage(client, labels[0])
        streams = [self._stream(client, rollout, progress) for rollout in self._rollouts]
        tasks = [asyncio.create_task(work) for work in (*streams, self._update_weights(client, labels, progress))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for pending in tasks:
                pending.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._end_progress()

    async def _stream(self, client: HttpClient, rollout: Rollout, progress: Progress) -> None:
        body = {
            "request_id": f"rollout-{rollout.number}",
            "token_ids": rollout.problem.prompt_ids,
            "sampling_params": {
                "max_tokens": self._tokens,
                "ignore_eos": True,
                "temperature": 1.0,
                "seed": self._seed + rollout.number,
                "logprobs": 0,
            },
            "stream": True,
            "stream_options": {"include_weight_versions": True},
        }
        async with aclosing(client.stream("/inference/v1/generate", body)) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    rollout.take(choice)
                progress.changed()

    async def _update_weights(self, client: HttpClient, labels: Sequence[str], progress: Progress) -> None:
        """Publish the checkpoints of ``labels``, each a quarter of a rollout after the last; nothing is paused.

        Each is staged beforehand, the first one before the rollouts begin, so that only the switch must come in time.
        """
        quarter = self._tokens // 4
        for number, label in enumerate(labels, start=1):
            if number > 1:
                await self._stage(client, label)
            await progress.reached(min(progress.slowest + quarter, 3 * quarter))
            commit = await self._publish(client, label)
            progress.label = label
            if not self._live:
                self._say(f"  weights {label} ({CHECKPOINTS[label]}) are commit {commit}")

    async def _stage(self, client: HttpClient, label: str) -> None:
        await client.request("POST", "/start_weight_update")
        await client.request("POST", "/update_weights", {"update_info": {"path": CHECKPOINTS[label]}})

    async def _publish(self, client: HttpClient, label: str) -> int:
        answer = await client.request("POST", "/finish_weight_update", {"weight_version": label})
        return int(answer["weight_commit"])

    def _check(self, replayer: Replayer) -> bool:
        self._say(self._painter.dim(f"{self._painter.legend}; a space is <bos>, a semicolon <eos>"))
        failures: list[str] = []
        exact = boundaries = ruled_out = 0
        largest = 0.0
        sums: dict[str, tuple[int, int]] = {}
        for rollout in self._rollouts:
            failures += [f"rollout {rollout.number}: {problem}" for problem in self._faults(rollout)]
            if failures:
                continue
            reported = rollout.logprobs
            replays, changes = replayer.replay(
                rollout.problem.prompt_ids, rollout.token_ids, _segments(rollout), reported, TOLERANCE
            )
            errors = [_largest_error(replay, reported) for replay in replays]
            misses = [_misses(replay, reported) for replay in replays]
            self._show_rollout(rollout, replays, changes, errors, misses)
            for replay, error, missed in zip(replays, errors, misses, strict=True):
                place = f"rollout {rollout.number}, tokens {replay.segment.start} to {replay.segment.end - 1}"
                if error > TOLERANCE:
                    failures.append(
                        f"{place}: log-probs differ from those of {replay.segment.weights} by up to {error:.2g}"
                    )
                elif missed == 0 and replay.segment.end - replay.segment.start > 20:
                    failures.append(f"{place}: the other checkpoint explains them as well as {replay.segment.weights}")
            largest = max(largest, *errors)
            ruled_out += sum(misses)
            boundaries += len(changes)
            exact += sum(change.earliest == change.latest for change in changes)
            for label, (right, total) in count_sums(rollout).items():
                before = sums.get(label, (0, 0))
                sums[label] = (before[0] + right, before[1] + total)
        if not failures:
            self._show_verdict(sums, largest, ruled_out, exact, boundaries)
        for failure in failures:
            self._say(f"wrong: {failure}")
        return not failures

    def _faults(self, rollout: Rollout) -> list[str]:
        """What is wrong with a rollout before any token is scored again."""
        problems = []
        count = len(rollout.token_ids)
        if count != self._tokens or len(rollout.logprobs) != count:
            problems.append(f"{count} tokens and {len(rollout.logprobs)} log-probs instead of {self._tokens}")
        named = [span["version"] for span in rollout.versions]
        if named != list(CHECKPOINTS):
            problems.append(f"versions {named} instead of {list(CHECKPOINTS)}: an update missed the rollout")
        commits = [{"start": span["start"], "end": span["end"]} for span in rollout.commits]
        if commits != [{"start": span["start"], "end": span["end"]} for span in rollout.versions]:
            problems.append(f"weight_commits {rollout.commits} lie otherwise than weight_versions {rollout.versions}")
        spelled = [span["version"] for span in rollout.versions for _ in range(span["start"], span["end"])]
        if rollout.chunk_versions != spelled:
            problems.append("the chunks' weight_versions differ from those of the whole output")
        return problems

    def _show_rollout(
        self,
        rollout: Rollout,
        replays: Sequence[SegmentReplay],
        changes: Sequence[Boundary],
        errors: Sequence[float],
        misses: Sequence[int],
    ) -> None:
        self._say(self._painter.bold(f"rollout {rollout.number}"))
        self._say(self._painter.tokens(rollout))
        rows = [["version", "commit", "tokens", "log-probs off by", "other checkpoint wrong", "boundary"]]
        notes = ["", *(_boundary_note(change) for change in changes)]
        for replay, commit, error, missed, note in zip(replays, rollout.commits, errors, misses, notes, strict=True):
            segment = replay.segment
            count = segment.end - segment.start
            tokens = f"{segment.start} to {segment.end - 1}"
            rows.append(
                [str(segment.weights), str(commit["commit"]), tokens, f"{error:.1e}", f"{missed} of {count}", note]
            )
        heading, *lines = table(rows).split("\n")
        self._say(self._painter.dim(heading))
        for replay, line in zip(replays, lines, strict=True):
            self._say(self._painter.version(str(replay.segment.weights), line))

    def _show_verdict(
        self, sums: dict[str, tuple[int, int]], largest: float, ruled_out: int, exact: int, boundaries: int
    ) -> None:
        shares = [
            self._painter.version(label, f"{label} ({CHECKPOINTS[label]}) {right} of {total}")
            for label, (right, total) in sums.items()
        ]
        total = sum(len(rollout.token_ids) for rollout in self._rollouts)
        self._say(f"\nsums right: {', '.join(shares)}")
        self._say(
            f"{total} log-probs agree with the version that the spans name, off by {largest:.1e} at most "
            f"(allowed {TOLERANCE:g}); the other checkpoint is wrong about {ruled_out} of them"
        )
        self._say(
            f"{boundaries} boundaries are where the spans say: {exact} proved to the token, "
            f"{boundaries - exact} next to tokens that both checkpoints explain"
        )

    def _say(self, text: str) -> None:
        print(text, flush=True)

    def _show_progress(self, text: str) -> None:
        if self._live:
            print(f"\r\x1b[K{text}", end="", flush=True)

    def _end_progress(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", flush=True)


def _load_replayer() -> Replayer:
    from rollspan.verify.replay import Checkpoints, Replayer

    checkpoints = Checkpoints({label: models.path(name) for label, name in CHECKPOINTS.items()})
    for label in CHECKPOINTS:
        checkpoints.model(label)  # now, while nobody waits for it
    return Replayer(checkpoints)


def _segments(rollout: Rollout) -> list[Segment]:
    from rollspan.verify.replay import Segment

    return [Segment(span["version"], span["start"], span["end"]) for span in rollout.versions]


def _largest_error(replay: SegmentReplay, reported: Sequence[float]) -> float:
    stated = reported[replay.segment.start : replay.segment.end]
    return max(abs(score - value) for score, value in zip(replay.named, stated, strict=True))


def _misses(replay: SegmentReplay, reported: Sequence[float]) -> int:
    """How many of a span's tokens the best other checkpoint is wrong about."""
    stated = reported[replay.segment.start : replay.segment.end]
    return min(
        sum(abs(score - value) > TOLERANCE for score, value in zip(scores, stated, strict=True))
        for scores in replay.others
    )


def _boundary_note(change: Boundary) -> str:
    if change.earliest == change.latest:
        return f"{change.position}, proved"
    return f"{change.position}, log-probs allow {change.earliest} to {change.latest}"


def main(words: Sequence[str]) -> int:
    """Run ``rollspan demo WORDS``; returns 0 when every check passed, 1 when not, 130 when interrupted."""
    parser = Parser(prog="rollspan demo", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=12, metavar="N", help="rollouts at once (default: 12)")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="tokens of each (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of problems and sampling (default: 0)")
    parser.add_argument("--frontend", choices=("auto", "rust", "python"), default="auto", help="see rollspan serve")
    arguments = parser.parse_args(words)
    if not 1 <= arguments.rollouts <= 256:
        parser.error("--rollouts must be from 1 to 256")
    if not 30 <= arguments.tokens <= MAX_TOKENS:
        parser.error(f"--tokens must be from 30 to {MAX_TOKENS}")
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo with parsed arguments: ``rollouts``, ``tokens``, ``seed``, ``frontend``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server too, as Ctrl-C does
    try:
        return 0 if asyncio.run(Demo(arguments).run()) else 1
    except (DemoError, HttpError) as error:
        print(f"rollspan demo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
