"""The trainer's side of the weight transports, one module each; ``rollspan.weights.transfer`` has the other."""

from __future__ import annotations

import importlib
from typing import Any

from rollspan.trainer.transfer.base import Outgoing

#: Name of a transport -> its module here and its class there. Modules are imported when they are needed.
_TRANSPORTS = {
    "disk": ("disk", "DiskOutgoing"),
    "http": ("http", "HttpOutgoing"),
    "shm": ("shm", "ShmOutgoing"),
    "distributed": ("distributed", "DistributedOutgoing"),
    "cuda_ipc": ("cuda_ipc", "CudaIpcOutgoing"),
}


def create(name: str, options: dict[str, Any]) -> Outgoing:
    """A transport by its name, with options of its own.

    Raises:
        ValueError: there is no such transport.
        TypeError: it has no such option.
    """
    if name not in _TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(_TRANSPORTS)}, got {name!r}")
    module, kind = _TRANSPORTS[name]
    found: Outgoing = getattr(importlib.import_module(f"{__name__}.{module}"), kind)(**options)
    return found
