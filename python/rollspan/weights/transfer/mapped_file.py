"""Safetensors used where they lie, in a file that is memory already and that nobody can change any more."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import torch

from rollspan.weights.transfer.safetensors_file import read_entries

#: Tensors that begin elsewhere are copied: what a matrix product gives may depend on this.
ALIGNMENT = 64


def map_safetensors(descriptor: int, check: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in the order of their bytes, each a view of one mapping, which lives as long as any of them.

    The file must be sealed or private: where it is cut while it is mapped, the kernel kills the process. Who writes to
    a tensor writes to a copy of that page; the file stays.

    Args:
        descriptor: of the open file; it may be closed afterwards.
        check: called before each tensor; what it raises ends the reading.

    Raises:
        SafetensorsError: not a regular file, or not valid.
        OSError: it cannot be read or mapped.
    """
    with FileIO(descriptor, closefd=False) as stream:
        stream.seek(0)
        entries = read_entries(stream)
        data = stream.tell()
    mapping: torch.Tensor | None = None
    for entry in entries:
        check()
        count, start = entry.end - entry.start, data + entry.start
        if not count:
            yield entry.name, torch.empty(entry.shape, dtype=entry.dtype)
            continue
        if mapping is None:
            mapping = torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        flat = mapping[start : start + count]
        if start % ALIGNMENT:
            flat = flat.clone()
        yield entry.name, flat.view(entry.dtype).reshape(entry.shape)


def in_memory(status: os.stat_result) -> bool:
    """Whether a file lies on a tmpfs, by what ``stat`` says of it."""
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    # "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAG...] - TYPE SOURCE OPTIONS", see proc(5).
    return any(line.split(" ", 3)[2] == device and line.partition(" - ")[2].startswith("tmpfs ") for line in mounts)
