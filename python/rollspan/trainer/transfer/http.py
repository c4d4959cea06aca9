"""Weights uploaded to each server in verified chunks, for engines on machines that share nothing with the trainer."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from blake3 import blake3

from rollspan.http_client import Content
from rollspan.trainer.server import Moved, Server
from rollspan.trainer.transfer.base import Offer, Outgoing
from rollspan.trainer.transfer.pieces import file_pieces

_CLEANUP_SECONDS = 10.0


class HttpOutgoing(Outgoing):
    """Each chunk carries its digest and is sent again when its answer did not come.

    Args:
        chunk_bytes: of one request; the unit that is sent again after a failure.
    """

    name = "http"

    def __init__(self, chunk_bytes: int = 32 << 20) -> None:
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
        self._chunk_bytes = chunk_bytes

    @contextmanager
    def offer(self, tensors: Mapping[str, torch.Tensor], servers: Sequence[Server], moved: Moved) -> Iterator[Offer]:
        upload = f"update-{uuid.uuid4().hex}"
        route = f"/weight_uploads/{upload}"
        try:
            size, pieces = file_pieces(tensors)
            sent = size - sum(tensor.nbytes for tensor in tensors.values())  # the header is nobody's progress
            start = 0
            for chunk in _chunks(pieces, self._chunk_bytes):
                hasher = blake3()
                for piece in chunk:
                    hasher.update(piece)
                end = start + sum(map(len, chunk))
                headers = [
                    ("Content-Type", "application/octet-stream"),
                    ("Content-Range", f"bytes {start}-{end - 1}/{size}"),
                    ("X-Checksum", f"blake3:{hasher.hexdigest()}"),
                ]
                path = f"{route}/model.safetensors"
                calls = [server.begin("PUT", path, Content(chunk, headers), repeat=True) for server in servers]
                for server, call in zip(servers, calls, strict=True):
                    server.result(call)
                moved(max(end - max(start, sent), 0))
                start = end
            yield Offer([{"upload": upload} for _ in servers])
        finally:
            for server in servers:
                server.quietly("DELETE", route, _CLEANUP_SECONDS)


def _chunks(pieces: Iterator[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The same bytes in lists of ``size`` bytes each but for the last."""
    chunk: list[memoryview] = []
    room = size
    for piece in pieces:
        while piece:
            part, piece = piece[:room], piece[room:]
            chunk.append(part)
            room -= len(part)
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk
