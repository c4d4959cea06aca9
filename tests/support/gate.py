"""A transport whose sender is the test: it hands over one tensor after the other, fails, or keeps silent."""

from __future__ import annotations

import queue
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from rollspan.weights import transfer
from rollspan.weights.transfer.base import Transport

WAIT = 60.0


class Gate:
    """The sender's end.

    Attributes:
        joined: ``init_info`` of each that has joined.
        closed: transports that were closed.
        deaf: it does not notice when it is cancelled.
    """

    def __init__(self) -> None:
        self.joined: list[dict[str, Any]] = []
        self.closed = 0
        self.deaf = False
        self.waiting = threading.Event()
        self._said: queue.Queue[Any] = queue.Queue()

    def clear(self) -> None:
        """Takes back what nobody has fetched."""
        self._said = queue.Queue()
        self.waiting.clear()

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hands tensors over: what the engine gets is its own."""
        for name, tensor in tensors.items():
            self._said.put((name, tensor.clone()))

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Hands one tensor over as it is."""
        self._said.put((name, tensor))

    def end(self) -> None:
        """That was all for this update_weights."""
        self._said.put(None)

    def fail(self, error: Exception) -> None:
        """The sender breaks."""
        self._said.put(error)

    def await_reader(self) -> None:
        """Returns when all that was sent is taken and the engine waits for more."""
        assert self.waiting.wait(WAIT)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes engines know the transport."""
        module = types.ModuleType("gate")
        module.GateTransport = self._transport()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "rollspan.weights.transfer.gate", module)
        monkeypatch.setitem(transfer._TRANSPORTS, "gate", ("gate", "GateTransport"))

    def _transport(gate) -> type[Transport]:  # noqa: N805 (a transport has a self of its own)
        class GateTransport(Transport):
            name = "gate"

            def init(self, info: Mapping[str, Any]) -> None:
                if info.get("silent"):
                    self._next()
                gate.joined.append(dict(info))

            def receive(self, info: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
                while (item := self._next()) is not None:
                    yield item

            def _next(self) -> Any:
                said = gate._said
                try:
                    item = said.get_nowait()
                except queue.Empty:
                    gate.waiting.set()
                    item = said.get(timeout=WAIT)
                    gate.waiting.clear()
                self.check_cancelled()
                if isinstance(item, Exception):
                    raise item
                return item

            def cancel(self) -> None:
                super().cancel()
                if gate.deaf:
                    return
                said, gate._said = gate._said, queue.Queue()  # what was sent is nobody's any more
                said.put(None)

            def close(self) -> None:
                gate.closed += 1

        return GateTransport
