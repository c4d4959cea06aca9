"""Weights in a sealed memfd, which engines on this machine use where it is."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rollspan.trainer.server import Moved, Server
from rollspan.trainer.transfer.base import Offer, Outgoing
from rollspan.trainer.transfer.disk import write_all
from rollspan.trainer.transfer.pieces import file_pieces
from rollspan.weights.transfer.shm import SEALS


class ShmOutgoing(Outgoing):
    """Needs no options; the engines must run as this user and see this process by its id."""

    name = "shm"
    repeatable = True

    @contextmanager
    def offer(self, tensors: Mapping[str, torch.Tensor], servers: Sequence[Server], moved: Moved) -> Iterator[Offer]:
        size, pieces = file_pieces(tensors)
        descriptor = os.memfd_create("rollspan-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            for number, piece in enumerate(pieces):
                write_all(descriptor, piece)
                moved(len(piece) if number else 0)  # the first is the header
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            yield Offer([{"pid": os.getpid(), "fd": descriptor, "size": size} for _ in servers])
        finally:
            os.close(descriptor)
