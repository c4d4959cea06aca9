"""Weights from a trainer into an engine's memory by each transport, beside what memory and disk give, in GB/s.

    python benchmarks/weight_transfer.py [--gigabytes 1] [--rounds 5] [--directory /tmp] [--json] [--only disk shm]

The weights are bfloat16 in the shapes of a small transformer. ``offer`` is what a trainer does before it announces them
(write a file, fill shared memory), ``receive`` what an engine does until it has them as tensors of its own, one read of
each page included, for some transports only map them. A broadcast's sender is a second process, and its offer is part
of receiving. Below them: a copy into memory in use and into new memory, a plain read of a cached file into memory in
use, and the digest. All alternate, every other round backwards; rates are medians, with the smallest and the largest.
CPU seconds are this process's for receiving 1 GB, the smallest of the rounds: the engine's steps want the same cores.
Uploads are measured from the spool on; getting them there is the network's and the frontend's affair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from rollspan.digest import weight_digest
from rollspan.trainer.transfer import create
from rollspan.trainer.transfer.pieces import file_pieces
from rollspan.weights import transfer
from rollspan.weights.transfer.base import TransferContext, Transport

Tensors = dict[str, torch.Tensor]
Measured = dict[str, float]

SENDER = """
import json, sys, torch
from rollspan.weights.transfer.announced import Announced, packets
from rollspan.process_group import BroadcastGroup, listen
names, shapes, limit = json.loads(sys.stdin.readline())
tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in zip(names, shapes)}
listener = listen("127.0.0.1")
port = listener.getsockname()[1]
print(port, flush=True)
group = BroadcastGroup("127.0.0.1", port, 0, 2, device=torch.device("cpu"), timeout=60, listener=listener)
parts = packets([Announced(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], limit)
for line in sys.stdin:
    running = []
    for part in parts:
        flat = torch.cat([tensors[entry.name].reshape(-1).view(torch.uint8) for entry in part])
        running.append((group.broadcast(flat), flat))
        if len(running) == 2:
            group.wait(running.pop(0)[0])
    while running:
        group.wait(running.pop(0)[0])
"""


def weights(num_bytes: int) -> Tensors:
    """Random tensors of about ``num_bytes`` in all."""
    shapes = {"q": (896, 896), "k": (128, 896), "v": (128, 896), "o": (896, 896), "norm": (896,)}
    shapes |= {"gate": (4864, 896), "up": (4864, 896), "down": (896, 4864)}
    made = {"embed": torch.randn(max(num_bytes // 8 // 896, 1), 896).bfloat16()}
    layer = 0
    while sum(tensor.nbytes for tensor in made.values()) < num_bytes:
        made.update({f"layers.{layer}.{name}": torch.randn(shape).bfloat16() for name, shape in shapes.items()})
        layer += 1
    return made


class Stopwatch:
    """Measures what is done inside, by the clock and in CPU time of this process."""

    def __enter__(self) -> Stopwatch:
        self._clock, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.measured = {
            "receive": time.perf_counter() - self._clock,
            "cpu": time.process_time() - self._cpu,
        }


class Case:
    """One way for the weights; a context that holds what it needs over all rounds."""

    def __init__(self, tensors: Tensors, directory: Path, limit: int) -> None:
        self.tensors = tensors
        self.directory = directory
        self.limit = limit
        self.stack = ExitStack()

    def context(self, spool: Path | None = None, root: Path | None = None) -> TransferContext:
        facts = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        return TransferContext(root, spool, torch.device("cpu"), 0, 1, 60.0, facts)

    def outgoing(self, name: str, engine: TransferContext, **options: Any) -> Measured:
        """A transport whose trainer's side needs no server."""
        start = time.perf_counter()
        with create(name, options).offer(self.tensors, [None], lambda _: None) as offer:  # type: ignore[list-item]
            offered = time.perf_counter() - start
            with Stopwatch() as watch:
                take(transfer.create(name, engine).receive(offer.infos[0]))
        return {"offer": offered, **watch.measured}

    def disk(self) -> Measured:
        return self.outgoing("disk", self.context(root=self.directory), directory=self.directory)

    def disk_in_memory(self) -> Measured:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            return self.outgoing("disk", self.context(root=Path(name)), directory=name)

    def shm(self) -> Measured:
        return self.outgoing("shm", self.context())

    def shm_object(self) -> Measured:
        path = Path(f"/dev/shm/rollspan-benchmark-{os.getpid()}")
        start = time.perf_counter()
        write(path, self.tensors)
        offered = time.perf_counter() - start
        with Stopwatch() as watch:
            take(transfer.create("shm", self.context()).receive({"name": f"/{path.name}", "unlink": True}))
        return {"offer": offered, **watch.measured}

    def http(self) -> Measured:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            return self.upload(Path(name))

    def http_on_disk(self) -> Measured:
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            return self.upload(Path(name))

    def upload(self, spool: Path) -> Measured:
        (spool / "u").mkdir()
        write(spool / "u" / "model.safetensors", self.tensors)
        with Stopwatch() as watch:
            take(transfer.create("http", self.context(spool=spool)).receive({"upload": "u"}))
        return watch.measured

    def distributed(self) -> Measured:
        if not hasattr(self, "engine"):
            self.engine = self.stack.enter_context(self.joined())
        assert self.sender.stdin is not None
        shapes = [list(tensor.shape) for tensor in self.tensors.values()]
        kinds = ["bfloat16"] * len(shapes)
        with Stopwatch() as watch:
            self.sender.stdin.write(b"go\n")
            self.sender.stdin.flush()
            take(self.engine.receive({"names": list(self.tensors), "dtype_names": kinds, "shapes": shapes}))
        return watch.measured

    @contextlib.contextmanager
    def joined(self) -> Iterator[Transport]:
        with subprocess.Popen([sys.executable, "-c", SENDER], stdin=-1, stdout=-1) as self.sender:
            assert self.sender.stdin is not None
            assert self.sender.stdout is not None
            shapes = [list(tensor.shape) for tensor in self.tensors.values()]
            self.sender.stdin.write(json.dumps([list(self.tensors), shapes, self.limit]).encode() + b"\n")
            self.sender.stdin.flush()
            engine = transfer.create("distributed", self.context())
            port = int(self.sender.stdout.readline())
            packing = {"packed": True, "packed_buffer_size_bytes": self.limit}
            engine.init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2, **packing})
            try:
                yield engine
            finally:
                engine.close()
                self.sender.kill()

    def copy(self) -> Measured:
        if not hasattr(self, "copies"):
            self.copies = {name: tensor.clone() for name, tensor in self.tensors.items()}
        with Stopwatch() as watch:
            for name, tensor in self.tensors.items():
                self.copies[name].copy_(tensor)
        return watch.measured

    def copy_to_new_memory(self) -> Measured:
        with Stopwatch() as watch:
            take((name, tensor.clone()) for name, tensor in self.tensors.items())
        return watch.measured

    def read(self) -> Measured:
        path = self.directory / "read"
        if not hasattr(self, "buffer"):
            write(path, self.tensors)
            self.buffer = bytearray(16 << 20)
            self.stack.callback(path.unlink)
        with Stopwatch() as watch, path.open("rb", buffering=0) as file:
            while file.readinto(self.buffer):
                pass
        return watch.measured

    def digest(self) -> Measured:
        with Stopwatch() as watch:
            weight_digest(self.tensors)
        return watch.measured


#: Name -> method of :class:`Case`, what of it is a transport first.
CASES: dict[str, Callable[[Case], Measured]] = {
    "disk": Case.disk,
    "disk, in memory": Case.disk_in_memory,
    "http, spool in memory": Case.http,
    "http, spool on disk": Case.http_on_disk,
    "shm, memfd": Case.shm,
    "shm, object": Case.shm_object,
    "distributed, gloo": Case.distributed,
    "copy": Case.copy,
    "copy to new memory": Case.copy_to_new_memory,
    "read a cached file": Case.read,
    "digest": Case.digest,
}


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for piece in file_pieces(tensors)[1]:
            while piece:
                piece = piece[file.write(piece) :]
    path.chmod(0o600)


def take(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Holds all tensors at once, as an engine does, and reads each of their pages."""
    held = dict(tensors)
    for tensor in held.values():
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--packed-bytes", type=int, default=256 << 20, help="of one broadcast (default: 256 MiB)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name begins with one of these words")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tensors = weights(int(arguments.gigabytes * 1e9))
    total = sum(tensor.nbytes for tensor in tensors.values())
    chosen = [name for name in CASES if not arguments.only or name.startswith(tuple(arguments.only))]
    directory = Path(tempfile.mkdtemp(dir=arguments.directory))
    results: dict[str, list[Measured]] = {name: [] for name in chosen}
    cases = {name: Case(tensors, directory, arguments.packed_bytes) for name in chosen}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        held: list[AbstractContextManager[Any]] = [case.stack for case in cases.values()]
        for each in held:
            stack.enter_context(each)
        for number in range(-1, arguments.rounds):  # the first warms up
            for name in chosen[:: -1 if number % 2 else 1]:
                measured = CASES[name](cases[name])
                if number >= 0:
                    results[name].append(measured)
                if not arguments.json:
                    sys.stderr.write(f"\r\x1b[Kround {number + 1} of {arguments.rounds}: {name}")
    report(results, total, as_json=arguments.json)


def report(results: dict[str, list[Measured]], total: int, *, as_json: bool) -> None:
    figures: dict[str, Any] = {}
    for name, rounds in results.items():
        figures[name] = {"cpu_seconds_per_gigabyte": min(measured["cpu"] for measured in rounds) / total * 1e9}
        for phase in ("offer", "receive"):
            if phase in rounds[0]:
                speeds = [total / measured[phase] / 1e9 for measured in rounds]
                found = {"median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)}
                figures[name][f"{phase}_gigabytes_per_second"] = found
    if as_json:
        print(json.dumps({"bytes": total, "cases": figures}, indent=1))
        return
    sys.stderr.write("\r\x1b[K")
    print(f"{total / 1e9:.2f} GB; GB/s: median (smallest to largest)")
    print(f"{'':24}{'offer':>24}{'receive':>24}{'CPU s for 1 GB':>18}")
    for name, found in figures.items():
        cells = (found.get(f"{phase}_gigabytes_per_second") for phase in ("offer", "receive"))
        shown = [f"{c['median']:.2f} ({c['min']:.2f} to {c['max']:.2f})" if c else "" for c in cells]
        print(f"{name:24}{shown[0]:>24}{shown[1]:>24}{found['cpu_seconds_per_gigabyte']:>18.2f}")


if __name__ == "__main__":
    main()
