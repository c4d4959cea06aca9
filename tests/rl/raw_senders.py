"""Trainers as bare as can be: each brings tensors to the update that is open by one transport, call by call."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from blake3 import blake3
from counting_model import Tensors
from safetensors.numpy import save, save_file

from rollspan.http_client import Content
from rollspan.process_group import BroadcastGroup, listen
from rollspan.weights.transfer.shm import SEALS, SHARED_MEMORY
from support.drivers import Driver, HttpDriver

LOCAL = "127.0.0.1"
GROUP_SECONDS = 60.0
Fields = dict[str, Any]


class RawSender(ABC):
    """One transport. ``send`` returns when the engine has answered, and nothing of what was sent is left here then.

    Attributes:
        driver: through which the calls go.
        root: a directory that the engine may read.
        halfway: awaited once while tensors are on their way, where the transport has such a time.
    """

    name: ClassVar[str]

    def __init__(self, driver: Driver, root: Path) -> None:
        self.driver = driver
        self.root = root
        self.halfway: Callable[[], Any] | None = None

    @abstractmethod
    async def send(self, tensors: Tensors, **fields: Any) -> None:
        """Sends tensors; ``fields`` go into ``update_info`` as well."""

    async def join(self) -> None:  # noqa: B027 (most transports join nothing)
        """Meets the engine, before an update is started."""

    async def close(self) -> None:  # noqa: B027
        """Leaves the engine."""

    async def _be_halfway(self) -> None:
        if self.halfway is not None:
            await self.halfway()


class DiskSender(RawSender):
    """A directory that is deleted afterwards."""

    name = "disk"

    async def send(self, tensors: Tensors, **fields: Any) -> None:
        directory = self.root / f"sent-{secrets.token_hex(8)}"
        directory.mkdir()
        try:
            save_file(tensors, directory / "model.safetensors")
            await self.driver.send_weights({"backend": "disk", "path": str(directory), **fields})
        finally:
            shutil.rmtree(directory)


class HttpSender(RawSender):
    """An upload in three pieces of which the last comes first."""

    name = "http"

    async def send(self, tensors: Tensors, **fields: Any) -> None:
        assert isinstance(self.driver, HttpDriver)
        upload, data = secrets.token_hex(8), save(tensors)
        third = len(data) // 3
        for start, end in ((2 * third, len(data)), (0, third), (third, 2 * third)):
            piece = data[start:end]
            headers = [
                ("Content-Range", f"bytes {start}-{end - 1}/{len(data)}"),
                ("X-Checksum", f"blake3:{blake3(piece).hexdigest()}"),
            ]
            await self.driver.upload(upload, "model.safetensors", Content([memoryview(piece)], headers))
            if start == 0:
                await self._be_halfway()
        await self.driver.send_weights({"backend": "http", "upload": upload, **fields})


class MemfdSender(RawSender):
    """A sealed memfd, closed afterwards."""

    name = "memfd"

    async def send(self, tensors: Tensors, **fields: Any) -> None:
        data = save(tensors)
        descriptor = os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            assert os.write(descriptor, data) == len(data)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            info = {"backend": "shm", "pid": os.getpid(), "fd": descriptor, "size": len(data), **fields}
            await self.driver.send_weights(info)
        finally:
            os.close(descriptor)


class NamedSender(RawSender):
    """An object of shm_open, which the engine removes."""

    name = "named"

    async def send(self, tensors: Tensors, **fields: Any) -> None:
        name = f"rollspan-test-{secrets.token_hex(8)}"
        path = SHARED_MEMORY / name
        path.write_bytes(save(tensors))
        try:
            await self.driver.send_weights({"backend": "shm", "name": f"/{name}", "unlink": True, **fields})
            assert not path.exists()
        finally:
            path.unlink(missing_ok=True)


class BroadcastSender(RawSender):
    """Rank 0 of a Gloo group that the engine joins once; tensors go out one by one."""

    name = "broadcast"
    _group: BroadcastGroup | None = None

    async def join(self) -> None:
        listener = listen(LOCAL)
        port = listener.getsockname()[1]
        info = {"master_address": LOCAL, "master_port": port, "world_size": 2}
        joining = asyncio.create_task(self.driver.init_transfer(info))
        self._group = await asyncio.to_thread(
            BroadcastGroup, LOCAL, port, 0, 2, device=torch.device("cpu"), timeout=GROUP_SECONDS, listener=listener
        )
        await joining

    async def send(self, tensors: Tensors, **fields: Any) -> None:
        assert self._group is not None
        info = {
            "names": list(tensors),
            "dtype_names": [str(values.dtype) for values in tensors.values()],
            "shapes": [list(values.shape) for values in tensors.values()],
        }
        receiving = asyncio.create_task(self.driver.send_weights({"backend": "distributed", **info, **fields}))
        for number, values in enumerate(tensors.values()):
            if number == len(tensors) // 2:
                await self._be_halfway()
            work = self._group.broadcast(torch.from_numpy(values.reshape(-1).view("uint8")))
            await asyncio.to_thread(self._group.wait, work)
        await receiving

    async def close(self) -> None:
        if self._group is not None:
            await self.driver.shut_down_transfer()
            self._group.close()


SENDERS: dict[str, type[RawSender]] = {
    sender.name: sender for sender in (DiskSender, HttpSender, MemfdSender, NamedSender, BroadcastSender)
}


def senders_for(driver: Driver) -> list[str]:
    """The transports that a client has: uploads go to an HTTP server."""
    return [name for name in SENDERS if name != "http" or isinstance(driver, HttpDriver)]
