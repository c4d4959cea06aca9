"""How long running streams stand still at a weight update, by transport and mode.

    python benchmarks/weight_stall.py [MODEL ...] [--transports disk http shm distributed] [--rounds 3] [--json FILE]

A trainer sends the model's own weights to a server (`rollspan serve`'s engine and HTTP binary, on this machine) while
8 streams run. Each round has streams of its own: they get under way, one update takes place, they go on a little. Ways:

| way | what the trainer does |
|---|---|
| flight | the update, with everything running |
| pause | pause(keep), the same update, resume |
| in_place | pause(keep), the update over the weights in use, resume |

`gap` is the largest gap between two chunks of any stream around the update less the median gap of the round, `stall` is
how long the engine says that the commit kept the next step waiting. The trainer is a process that shares the cores with
the server; its work (copying, hashing, uploading) is in `update`. Rounds alternate through all ways; figures are
medians, of `gap` with the smallest and the largest. Ctrl-C prints what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from rollspan import models
from rollspan.bench.progress import Progress
from rollspan.bench.report import print_table
from rollspan.config import EngineConfig
from rollspan.http_client import HttpClient
from rollspan.launcher import (
    engine_environment,
    find_http_binary,
    private_directory,
    spool_base,
    start_engine,
    start_process,
    stop_process,
)
from rollspan.trainer import WeightSender

TRANSPORTS = ("disk", "http", "shm", "distributed")
WAYS = ("flight", "pause", "in_place")
CHUNKS = 8  # of each stream, before an update and after it
KV_BYTES = 1 << 30

TRAINER = "--trainer"


@dataclass
class Cell:
    """One model, transport and way: a list entry for each round."""

    model: str
    transport: str
    way: str
    num_bytes: int = 0
    update_seconds: list[float] = field(default_factory=list)
    gap_seconds: list[float] = field(default_factory=list)
    median_gap_seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)

    def row(self) -> list[str]:
        """As the table shows it."""
        update = statistics.median(self.update_seconds)
        phases = [statistics.median(phase[name] for phase in self.phases) for name in PHASES]
        gap, low, high = statistics.median(self.gap_seconds), min(self.gap_seconds), max(self.gap_seconds)
        return [
            self.model,
            self.transport,
            self.way,
            f"{1e3 * update:.0f}",
            f"{self.num_bytes / update / 1e9:.3g}",
            *[f"{1e3 * seconds:.1f}" for seconds in phases],
            f"{1e3 * statistics.median(self.median_gap_seconds):.1f}",
            f"{1e3 * gap:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})",
        ]


PHASES = ("receive", "verify", "prepare", "commit", "stall")
HEADER = ["model", "by", "way", "update ms", "GB/s", *[f"{name} ms" for name in PHASES], "usual gap ms", "gap ms"]


@contextlib.contextmanager
def serving(model: Path, directory: Path, threads: int) -> Iterator[str]:
    """URL of a server of the model, in which ``directory`` may be read.

    Raises:
        SystemExit: the HTTP binary is not installed, or does not start.
    """
    binary = find_http_binary()
    if binary is None:
        raise SystemExit("rollspan-http is not installed, nor named by ROLLSPAN_HTTP_BINARY")
    with ExitStack() as stack:
        sockets = stack.enter_context(private_directory())
        spool = stack.enter_context(private_directory(spool_base(model)))
        config = EngineConfig(
            model=str(model),
            weights_root=str(directory),
            weights_spool=str(spool),
            num_threads=threads,
            kv_cache_memory=KV_BYTES,
        )
        engine = start_engine(config, sockets, log_level="warning")
        stack.callback(engine.stop)
        command = [str(binary), "--engine", str(engine.socket_path), "--port", "0", "--weights-spool", str(spool)]
        command += ["--watch-stdin", "--log-level", "warn"]
        frontend = start_process(command, engine_environment(config), stdout=-1)
        stack.callback(stop_process, frontend, 5.0)
        assert frontend.stdout is not None
        url = ""
        for line in frontend.stdout:
            event = json.loads(line)
            url = f"http://{event['address']}" if event["event"] == "listening" else url
            if event["event"] == "ready":
                break
        else:
            raise SystemExit("the server did not start; its log says why")
        yield url
        frontend.stdout.close()


class Trainer:
    """A process that sends a model's weights by any transport, over and over."""

    def __init__(self, url: str, model: Path, directory: Path) -> None:
        command = [sys.executable, __file__, TRAINER, url, str(model), str(directory)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def send(self, transport: str, mode: str) -> int:
        """One update; returns its bytes.

        Raises:
            SystemExit: it failed; the trainer has said why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(transport, mode, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the update by {transport} failed")
        return int(answer)

    def close(self) -> None:
        """Ends it, as soon as it has left the server."""
        self._process.communicate()


def train(url: str, model: str, directory: str) -> None:
    """What the process does: an update for each line on its input."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        tensors |= load_file(file)
    senders: dict[str, WeightSender] = {}
    with ExitStack() as stack:
        for line in sys.stdin:
            transport, mode = line.split()
            if transport not in senders:
                options = {"directory": directory} if transport == "disk" else {}
                senders[transport] = stack.enter_context(WeightSender(url, transport=transport, **options))
            print(senders[transport].send(tensors, "same", mode=mode).num_bytes, flush=True)


class Stream:
    """A request that runs until it is left, and when its chunks came."""

    def __init__(self, client: HttpClient, prompt: list[int]) -> None:
        self.times: list[float] = []
        self._arrived = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, prompt))

    async def _read(self, client: HttpClient, prompt: list[int]) -> None:
        sampling = {"max_tokens": None, "ignore_eos": True, "temperature": 0.0}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
        async with aclosing(client.stream("/inference/v1/generate", body)) as chunks:
            async for _ in chunks:
                self.times.append(time.perf_counter())
                self._arrived.set()
        raise SystemExit("a stream came to its end during the measurement: the model's context is too short for it")

    async def more(self, count: int) -> None:
        """Waits for so many more chunks."""
        target = len(self.times) + count
        while len(self.times) < target:
            self._arrived.clear()
            arrived = asyncio.create_task(self._arrived.wait())
            await asyncio.wait({arrived, self.task}, return_when=asyncio.FIRST_COMPLETED)
            arrived.cancel()
            if self.task.done():
                self.task.result()


@contextlib.asynccontextmanager
async def streaming(client: HttpClient, count: int, vocabulary: int) -> AsyncIterator[list[Stream]]:
    """Streams that are under way."""
    prompts = [[random.randrange(vocabulary) for _ in range(16)] for _ in range(count)]
    streams = [Stream(client, prompt) for prompt in prompts]
    try:
        await asyncio.gather(*(stream.more(CHUNKS) for stream in streams))
        yield streams
    finally:
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


async def measure(url: str, trainer: Trainer, vocabulary: int, cell: Cell, streams: int) -> None:
    """One round of one cell."""
    async with HttpClient(url) as client, streaming(client, streams, vocabulary) as running:
        started = time.perf_counter()
        if cell.way != "flight":
            await client.request("POST", "/pause?mode=keep&clear_cache=false")
        mode = "in_place" if cell.way == "in_place" else "staged"
        cell.num_bytes = await asyncio.to_thread(trainer.send, cell.transport, mode)
        if cell.way != "flight":
            await client.request("POST", "/resume")
        ended = time.perf_counter()
        await asyncio.gather(*(stream.more(CHUNKS) for stream in running))
        (record,) = (await client.request("GET", "/weight_history"))["engines"]
    gaps = [list(pairwise(stream.times)) for stream in running]
    usual = statistics.median(after - before for pairs in gaps for before, after in pairs)
    around = [after - before for pairs in gaps for before, after in pairs if after >= started and before <= ended]
    commit = record["commits"][-1]
    cell.update_seconds.append(ended - started)
    cell.median_gap_seconds.append(usual)
    cell.gap_seconds.append(max(around) - usual)
    cell.phases.append({**commit["seconds"], "stall": commit["stall_seconds"]})


def run_model(name: str, args: argparse.Namespace, cells: list[Cell], progress: Progress) -> None:
    """All rounds of a model; ``cells`` is filled as they go."""
    model = models.path(name) if name in models.names() else Path(name)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollspan-stall-", dir=args.directory)))
        progress.begin(f"{model.name}: start")
        url = stack.enter_context(serving(model, directory, args.threads))
        trainer = Trainer(url, model, directory)
        stack.callback(trainer.close)
        for transport in args.transports:
            progress.begin(f"{model.name}: first update by {transport}")
            trainer.send(transport, "staged")
        mine = [Cell(model.name, transport, way) for transport in args.transports for way in args.ways]
        cells += mine
        for number in range(args.rounds):
            for cell in mine if number % 2 == 0 else reversed(mine):
                progress.begin(f"{model.name}: {cell.transport}, {cell.way}, round {number + 1}")
                asyncio.run(measure(url, trainer, vocabulary, cell, args.streams))


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == [TRAINER]:
        train(*words[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[models.DEFAULT], help="directories, or names of embedded models")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the engine")
    parser.add_argument("--directory", help="where checkpoints are written (default: the temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, also after an interrupt")
    args = parser.parse_args(words)
    cells: list[Cell] = []
    each = 1 + len(args.transports) * (1 + args.rounds * len(args.ways))
    code = 0
    try:
        with Progress(len(args.models) * each, sys.stderr) as progress:
            for name in args.models:
                run_model(name, args, cells, progress)
    except KeyboardInterrupt:
        code = 130
    measured = [cell for cell in cells if cell.phases]
    if measured:
        print_table([HEADER, *(cell.row() for cell in measured)], sys.stdout)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(cell) for cell in measured], indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
