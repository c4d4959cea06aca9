"""Weight transports: each yields named tensors and knows nothing of the scheduler or the model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rollspan.errors import RollspanError, shown
from rollspan.weights.transfer.base import TransferContext, Transport

#: Name of a transport -> its module here and its class there. Modules are imported when they are needed.
_TRANSPORTS = {
    "disk": ("disk", "DiskTransport"),
    "http": ("http", "HttpTransport"),
    "shm": ("shm", "ShmTransport"),
    "distributed": ("distributed", "DistributedTransport"),
    "cuda_ipc": ("cuda_ipc", "CudaIpcTransport"),
}
#: Other names that clients use.
_ALIASES = {"nccl": "distributed", "gloo": "distributed", "ipc": "cuda_ipc"}


def canonical(name: Any, param: str) -> str:
    """The transport's own name for ``name``, which a request gave in the field ``param``.

    Raises:
        RollspanError: ``weights_invalid``: there is no such transport.
    """
    found = _ALIASES.get(name, name) if isinstance(name, str) else None
    if found not in _TRANSPORTS:
        known = ", ".join([*_TRANSPORTS, *_ALIASES])
        raise RollspanError(f"{param} must be one of {known}, got {shown(name)}", reason="weights_invalid", param=param)
    return found


def backend_of(init_info: Mapping[str, Any], default: str) -> str:
    """The transport that ``init_info`` means: the one it names, ``distributed`` for an address, else ``default``.

    Raises:
        RollspanError: ``weights_invalid``: there is no such transport.
    """
    name = init_info.get("backend")
    if name is None:
        name = "distributed" if init_info.get("master_address") is not None else default
    return canonical(name, "init_info.backend")


def create(name: str, context: TransferContext) -> Transport:
    """A transport by its name or an alias of it.

    Raises:
        RollspanError: ``weights_invalid``: there is no such transport.
    """
    module, kind = _TRANSPORTS[canonical(name, "backend")]
    found: Transport = getattr(importlib.import_module(f"{__name__}.{module}"), kind)(context)
    return found
