"""Weights broadcast to all engines at once: Gloo from host memory, NCCL from a GPU."""

from __future__ import annotations

import concurrent.futures
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import torch

from rollspan.process_group import BroadcastGroup, GroupError, listen
from rollspan.trainer.server import Moved, Server, WeightSendError
from rollspan.trainer.transfer.base import Offer, Outgoing
from rollspan.weights.transfer.announced import Announced, packets

_SHUTDOWN = "/shutdown_weight_transfer_engine"
_SHUTDOWN_SECONDS = 10.0


class DistributedOutgoing(Outgoing):
    """This process is rank 0 of a group of its own; the engines join it at the first update, and after a failure.

    Args:
        device: of the group's tensors; cuda needs all engines on GPUs, with NCCL, and none of them on this GPU.
        address: of this machine as the engines see it; by default the one from which the first server is reached.
        packed_bytes: of tensors that are broadcast together.
        timeout: seconds to wait for an engine.
    """

    name = "distributed"

    def __init__(
        self,
        device: str | torch.device = "cpu",
        address: str | None = None,
        packed_bytes: int = 256 << 20,
        timeout: float = 600.0,
    ) -> None:
        self._device = torch.device(device)
        self._address = address
        self._packed_bytes = packed_bytes
        self._timeout = timeout
        self._group: BroadcastGroup | None = None

    def connect(self, servers: Sequence[Server]) -> None:
        if self._group is not None:
            return
        address = self._address or _local_address(servers[0].url)
        listener = listen(address)
        counts = [server.num_engines or 1 for server in servers]
        info = {
            "backend": self.name,
            "master_address": address,
            "master_port": listener.getsockname()[1],
            "world_size": 1 + sum(counts),
            "packed": True,
            "packed_buffer_size_bytes": self._packed_bytes,
        }
        calls = []
        refused = threading.Event()
        try:
            for index, server in enumerate(servers):
                own = {**info, "rank_offset": 1 + sum(counts[:index])}
                calls.append(server.begin("POST", "/init_weight_transfer_engine", {"init_info": own}))
                calls[-1].add_done_callback(lambda done: refused.set() if _failed(done) else None)
            self._group = BroadcastGroup(
                address,
                info["master_port"],
                0,
                info["world_size"],
                device=self._device,
                timeout=self._timeout,
                cancelled=refused,
                listener=listener,
            )
            for server, call in zip(servers, calls, strict=True):
                server.result(call)
        except BaseException as error:
            self._leave()
            refusals = [(server, call) for server, call in zip(servers, calls, strict=False) if _refused(call)]
            for server, call in zip(servers, calls, strict=False):
                if (server, call) not in refusals:
                    server.quietly("POST", _SHUTDOWN, _SHUTDOWN_SECONDS)  # it may still be waiting for the others
                    call.cancel()
            for server, call in refusals:  # a server's own words tell more than what the group noticed of it
                server.result(call)
            if isinstance(error, GroupError):
                raise WeightSendError(str(error), url=servers[0].url, reason="transfer_failed") from None
            raise

    @contextmanager
    def offer(self, tensors: Mapping[str, torch.Tensor], servers: Sequence[Server], moved: Moved) -> Iterator[Offer]:
        if self._group is None:
            raise RuntimeError("connect first")
        entries = [Announced(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        info = {
            "names": [entry.name for entry in entries],
            "dtype_names": [str(entry.dtype).removeprefix("torch.") for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
        }
        parts = packets(entries, self._packed_bytes)
        offer = _Broadcast([info for _ in servers], self._group, parts, tensors, self._device, moved)
        try:
            yield offer
        except BaseException:
            self._leave()  # engine and trainer are not at the same place any more
            raise

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self, servers: Sequence[Server]) -> None:
        if self._group is not None:
            for server in servers:
                server.quietly("POST", _SHUTDOWN, _SHUTDOWN_SECONDS)
        self._leave()


class _Broadcast(Offer):
    def __init__(
        self,
        infos: Sequence[Mapping[str, Any]],
        group: BroadcastGroup,
        parts: list[list[Announced]],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        moved: Moved,
    ) -> None:
        super().__init__(infos)
        self._group = group
        self._parts = parts
        self._tensors = tensors
        self._device = device
        self._moved = moved

    def transmit(self, calls: Sequence[concurrent.futures.Future[Any]]) -> None:
        for call in calls:
            call.add_done_callback(lambda done: self._group.abort() if _failed(done) else None)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self._send)
            try:
                sending.result()  # while a broadcast itself is waited for, this thread would not see Ctrl-C
            except BaseException:
                self._group.abort()
                raise

    def _send(self) -> None:
        running: list[tuple[Any, torch.Tensor]] = []
        for part in self._parts:
            flat = [self._tensors[entry.name].contiguous().reshape(-1).view(torch.uint8) for entry in part]
            buffer = (flat[0] if len(flat) == 1 else torch.cat(flat)).to(self._device)
            running.append((self._group.broadcast(buffer), buffer))
            if len(running) == 2:
                self._finish(running.pop(0))
        while running:
            self._finish(running.pop(0))

    def _finish(self, broadcast: tuple[Any, torch.Tensor]) -> None:
        work, buffer = broadcast
        self._group.wait(work)
        self._moved(buffer.nbytes)


def _failed(call: concurrent.futures.Future[Any]) -> bool:
    return call.cancelled() or call.exception() is not None


def _refused(call: concurrent.futures.Future[Any]) -> bool:
    return call.done() and _failed(call)


def _local_address(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=10.0) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WeightSendError(f"cannot be reached: {error}", url=url, reason="connection") from None
