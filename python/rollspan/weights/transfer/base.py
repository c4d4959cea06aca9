"""Transport: the one interface of all ways for tensors into the engine."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from rollspan.errors import RollspanError, shown


@dataclass(frozen=True)
class TransferContext:
    """What a transport may know of its engine.

    Attributes:
        root: directory below which weights may be read; None refuses all paths.
        spool: private directory where frontends put uploads; None where there is none.
        device: of the model.
        engine_index: rank of this engine in its set.
        num_engines: size of the set.
        timeout: seconds that a sender may be silent.
        parameters: name -> (dtype, shape) of everything that an update may bring, by the model's names.
    """

    root: Path | None
    spool: Path | None
    device: torch.device
    engine_index: int
    num_engines: int
    timeout: float
    parameters: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

    @property
    def largest_update(self) -> int:
        """Bytes that an update may announce: indices and values of every element, and some room for small models."""
        elements = sum(math.prod(shape) for _, shape in self.parameters.values())
        return 16 * elements + (64 << 20)


class Transport(ABC):
    """Hands named tensors over; knows nothing of the scheduler and changes nothing of the model.

    ``init`` and ``receive`` run on the thread that receives weights, one at a time, while generation goes on.
    :meth:`cancel` is called from another thread. Every error is a RollspanError: ``weights_invalid`` for what the
    sender got wrong, naming the field, ``transfer_failed`` for a sender that is gone or too slow.

    Attributes:
        context: what it was made with.
        name: the ``backend`` of ``init_info`` and ``update_info``.
        needs_init: whether ``init_weight_transfer_engine`` has to come first.
    """

    name: ClassVar[str]
    needs_init: ClassVar[bool] = False

    def __init__(self, context: TransferContext) -> None:
        self.context = context
        self._cancelled = threading.Event()

    def init(self, info: Mapping[str, Any]) -> None:
        """Connects with the sender; ``info`` is ``init_info`` without its ``backend``."""
        check_keys("init_info", info, ())

    @abstractmethod
    def receive(self, info: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields named tensors; ``info`` is ``update_info`` without ``backend`` and ``delta``.

        Each tensor is the engine's own: nobody else writes to its memory, and the source may vanish once the iterator
        has ended. Values are validated by the caller; names occur once.
        """

    def cancel(self) -> None:
        """Makes an :meth:`init` or :meth:`receive` in progress raise soon, and every later one as well.

        So a cancelled transport is to be closed and made anew; those that need no ``init`` are made for each update.
        """
        self._cancelled.set()

    def check_cancelled(self) -> None:
        """For loops of :meth:`receive`.

        Raises:
            RollspanError: ``update_aborted`` once :meth:`cancel` was called.
        """
        if self._cancelled.is_set():
            raise RollspanError("the update was aborted while its tensors were received", reason="update_aborted")

    def close(self) -> None:  # noqa: B027 (most transports hold nothing)
        """Gives back what :meth:`init` has taken; may be called twice."""


def check_keys(where: str, info: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Refuses keys that a transport does not know, unless they are null.

    Raises:
        RollspanError: ``unsupported_field`` naming the key.
    """
    for key, value in info.items():
        if key not in allowed and value is not None:
            known = ", ".join(allowed) or "none"
            raise RollspanError(
                f"{where}.{key} is not known here (known: {known}): leave it out, got {shown(value)}",
                reason="unsupported_field",
                param=f"{where}.{key}",
            )
