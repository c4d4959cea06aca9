"""Weights by way of a directory that trainer and engines see."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from rollspan.trainer.server import Moved, Server
from rollspan.trainer.transfer.base import Offer, Outgoing
from rollspan.trainer.transfer.pieces import file_pieces


class DiskOutgoing(Outgoing):
    """Writes each update into a directory of its own.

    Args:
        directory: under the servers' ``--weights-root``, at the same path there.
        keep: leave what was written; else it is deleted once the engines have read it.
    """

    name = "disk"
    repeatable = True

    def __init__(self, directory: str | os.PathLike[str], keep: bool = False) -> None:
        self._directory = Path(directory).resolve()
        self._keep = keep

    @contextmanager
    def offer(self, tensors: Mapping[str, torch.Tensor], servers: Sequence[Server], moved: Moved) -> Iterator[Offer]:
        target = self._directory / f"update-{uuid.uuid4().hex}"
        target.mkdir(parents=True)
        done = False
        try:
            _, pieces = file_pieces(tensors)
            with (target / "model.safetensors").open("wb", buffering=0) as file:
                for number, piece in enumerate(pieces):
                    write_all(file.fileno(), piece)
                    moved(len(piece) if number else 0)  # the first is the header
            yield Offer([{"path": str(target)} for _ in servers])
            done = True
        finally:
            if not (done and self._keep):
                shutil.rmtree(target, ignore_errors=True)


def write_all(descriptor: int, data: memoryview) -> None:
    """Writes all of ``data`` at the descriptor's position.

    Raises:
        OSError: there is no room.
    """
    while data:
        data = data[os.write(descriptor, data) :]
