"""Trainers that can be killed wherever they are told to stop.

As a program this has all imports done, and forks a trainer for each line on its input: a JSON object of the fields of
:class:`Stop`, and ``url``, ``transport``, ``options``, ``token``, ``label``. It answers with one line when that trainer
stands where it was told to, has come to its end, or has failed.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Stop:
    """Where a trainer stops.

    Attributes:
        call: method and beginning of a path, like ``"POST /finish_weight_update"``, or ``"broadcast"``; empty: nowhere.
        number: which call of this kind, from 0.
        sent: the request has gone out, its answer is not read.
    """

    call: str = ""
    number: int = 0
    sent: bool = False


class Trainers:
    """The program, for tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def run(self, stop: Stop, **fields: Any) -> dict[str, Any]:
        """Starts a trainer; returns ``pid`` when it has stopped, or ``sent`` when it has come to its end."""
        return await asyncio.to_thread(self._run, json.dumps({**asdict(stop), **fields}))

    def _run(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return dict(answer)

    def close(self) -> None:
        """Ends the program and what is left of its trainers."""
        self._process.kill()
        self._process.communicate()


def _main() -> None:
    import counting_model
    import torch

    from rollspan.process_group import BroadcastGroup
    from rollspan.trainer import WeightSender
    from rollspan.trainer.server import Server

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def tell(**fields: Any) -> None:
        print(json.dumps({"pid": os.getpid(), **fields}), flush=True)  # noqa: T201 (the protocol with the test)

    def stand() -> None:
        tell()
        threading.Event().wait()

    def stop_at(stop: Stop) -> None:
        left = stop.number

        def here(call: str) -> bool:
            nonlocal left
            if not stop.call or not call.startswith(stop.call):
                return False
            left -= 1
            return left == -1

        begin: Callable[..., Any] = Server.begin
        broadcast: Callable[..., Any] = BroadcastGroup.broadcast

        def stopping_begin(server: Server, method: str, path: str, body: Any = None, **options: Any) -> Any:
            if here(f"{method} {path}"):
                connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
                if stop.sent:
                    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
                stand()
            return begin(server, method, path, body, **options)

        def stopping_broadcast(group: BroadcastGroup, tensor: torch.Tensor) -> Any:
            if here("broadcast"):
                stand()
            return broadcast(group, tensor)

        Server.begin = stopping_begin  # type: ignore[method-assign]
        BroadcastGroup.broadcast = stopping_broadcast  # type: ignore[method-assign]

    def train(order: dict[str, Any]) -> None:
        stop_at(Stop(order["call"], order["number"], order["sent"]))
        tensors = {name: torch.tensor(value) for name, value in counting_model.tensors(order["token"]).items()}
        with WeightSender(order["url"], transport=order["transport"], **order["options"]) as sender:
            tell(sent=asdict(sender.send(tensors, weight_version=order["label"])))

    for line in sys.stdin:
        if os.fork():
            continue
        try:
            train(json.loads(line))
        except Exception as error:  # noqa: BLE001 (the test has to be told)
            tell(error=repr(error))
        finally:
            os._exit(0)


if __name__ == "__main__":
    _main()
