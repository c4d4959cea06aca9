"""The kernels of the extension module, if there is one: the one place that imports it for them.

``ROLLSPAN_PURE_PYTHON=1`` goes without it. ``ROLLSPAN_ISA`` (``avx512``, ``avx2`` or ``portable``) chooses the
instruction set instead of the best that the CPU has; the results have the same bits.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType

from rollspan.version import __version__


@functools.cache
def _load() -> ModuleType | None:
    if os.environ.get("ROLLSPAN_PURE_PYTHON") == "1":
        return None
    try:
        from rollspan import _native
    except ImportError:
        return None
    if _native.__version__ != __version__:
        return None
    if isa := os.environ.get("ROLLSPAN_ISA"):
        _native.set_kernel_isa(isa)
    return _native


def available() -> bool:
    """Whether there is an extension module of this version, and it is wanted."""
    return _load() is not None


def module() -> ModuleType:
    """The extension module.

    Raises:
        RuntimeError: there is none; ask :func:`available` first.
    """
    if (loaded := _load()) is None:
        raise RuntimeError("the extension module rollspan._native is not installed, or not of this version")
    return loaded


def isa() -> str:
    """The instruction set that the kernels run with: ``avx512``, ``avx2`` or ``portable``; ``none`` without them."""
    return str(module().kernel_isa()) if available() else "none"


def set_num_threads(threads: int) -> None:
    """Threads that a kernel call may use, the calling one included. Results do not depend on it."""
    if available():
        module().set_kernel_threads(threads)
