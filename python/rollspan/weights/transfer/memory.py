"""Host memory for tensors that are being received."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch

_HUGE_PAGES_FROM = 4 << 20  # bytes; below, a good part of a 2 MiB page would stay empty


def new_tensor(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose contents are yet to be written, in huge pages where it is large and the kernel has some.

    New memory costs more CPU time by its page faults than by the copying, and huge pages have few of them; steps of
    the engine compute on the same cores meanwhile.
    """
    size = torch.Size(shape)
    count = size.numel() * dtype.itemsize
    if count < _HUGE_PAGES_FROM:
        return torch.empty(size, dtype=dtype)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):  # no Linux, or a kernel without them: it is memory all the same
        pass
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(size)
