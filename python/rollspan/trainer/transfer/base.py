"""Outgoing: the one interface of all ways for tensors out of a trainer."""

from __future__ import annotations

import concurrent.futures
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from rollspan.trainer.server import Moved, Server


class Offer:
    """Tensors that lie ready for the engines.

    Attributes:
        infos: ``update_info`` for each server.
    """

    def __init__(self, infos: Sequence[Mapping[str, Any]]) -> None:
        self.infos = infos

    def transmit(self, calls: Sequence[concurrent.futures.Future[Any]]) -> None:
        """Hands them over while the calls that announced them, one for each server, are in progress.

        Raises:
            Exception: it failed; where a call failed as well, that is the cause.
        """


class Outgoing(ABC):
    """A transport; its options are the arguments of its constructor.

    Attributes:
        name: as in ``update_info.backend``.
        repeatable: an announcement may reach a server twice.
    """

    name: ClassVar[str]
    repeatable: ClassVar[bool] = False

    def connect(self, servers: Sequence[Server]) -> None:  # noqa: B027 (most need none)
        """Meets the engines, unless they are met already.

        Raises:
            WeightSendError: a server refused it.
        """

    @abstractmethod
    def offer(
        self, tensors: Mapping[str, torch.Tensor], servers: Sequence[Server], moved: Moved
    ) -> AbstractContextManager[Offer]:
        """Makes tensors ready; leaving the context takes them back.

        Args:
            tensors: by name, on any device, not necessarily contiguous.
            servers: that will fetch them.
            moved: told of progress, ``total_bytes(tensors)`` in all.

        Raises:
            WeightSendError: a server refused them.
            OSError: there is no room.
        """

    def close(self, servers: Sequence[Server]) -> None:  # noqa: B027 (most hold nothing)
        """Gives back what is held; may be called twice."""
