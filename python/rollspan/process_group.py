"""BroadcastGroup: a trainer and its engines in a torch.distributed group of their own, never the global one.

Gloo carries tensors in host memory, NCCL those on a GPU. Rank 0 sends and holds the store (a TCPStore) at which all
meet. Every call that waits can be ended from another thread, which breaks the group for all of its members.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

_distributed: Any = torch.distributed  # whose types are known only in part
_PREFIX = "rollspan"
_POLL_SECONDS = 0.02
_CONNECT_SECONDS = 30.0  # for steps that need nothing but living peers


class GroupError(Exception):
    """The group cannot be joined, or is broken: a member is gone or silent, or it was aborted. The text is one line."""


class BroadcastGroup:
    """Joins on construction.

    Args:
        address: host name or IP address of rank 0.
        port: of its store.
        rank: of this member.
        size: number of members.
        device: of the tensors.
        timeout: seconds to wait for others.
        cancelled: set by whoever wants a construction in progress to end.
        listener: rank 0's listening socket at ``address`` and ``port``; the group takes it over.

    Raises:
        GroupError: not all members came in time, or ``cancelled`` was set.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        size: int,
        *,
        device: torch.device,
        timeout: float,
        cancelled: threading.Event | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._cancelled = threading.Event() if cancelled is None else cancelled
        self._aborted = threading.Event()
        self._timeout = timeout
        self._device = device
        self._deadline = time.monotonic() + timeout
        self._addresses: list[bytes] = []
        self._group: Any = None
        self._store: Any = None
        local = address if listener is not None else self._reach(address, port)
        try:
            self._store = _open_store(address, port, listener)
            self._meet(rank, size)
            store = _distributed.PrefixStore(f"{_PREFIX}/group", self._store)
            make = _gloo_group if device.type == "cpu" else _nccl_group
            self._group = make(store, rank, size, local)
            if device.type == "cpu":
                self._addresses = self._published()
        except (RuntimeError, OSError) as error:
            raise GroupError(f"the group at {address}:{port} cannot be joined: {_one_line(error)}") from None

    def _reach(self, address: str, port: int) -> str:
        """Waits until somebody listens there; returns this machine's address on the way."""
        while True:
            try:
                with socket.create_connection((address, port), timeout=1.0) as probe:
                    return str(probe.getsockname()[0])
            except OSError as error:
                self._pause(f"nobody listens at {address}:{port} ({_one_line(error)})")

    def _meet(self, rank: int, size: int) -> None:
        self._store.set(f"{_PREFIX}/joined/{rank}", b"")
        keys = [f"{_PREFIX}/joined/{other}" for other in range(size)]
        while not self._store.check(keys):
            self._pause(f"not all of the {size} members of the group came")

    def _pause(self, failure: str) -> None:
        if time.monotonic() >= self._deadline:
            raise GroupError(f"{failure} within {self._timeout:g} s")
        if self._cancelled.wait(_POLL_SECONDS):
            raise GroupError(f"{failure} before joining was cancelled")

    def _published(self) -> list[bytes]:
        """What the members say of their addresses, for :meth:`abort`."""
        keys = [key for key in self._store.list_keys() if key.startswith(f"{_PREFIX}/group/")]
        return [self._store.get(key) for key in keys]

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begins to send (rank 0) or to receive into a contiguous tensor; returns what :meth:`wait` takes.

        Broadcasts happen in the order in which they are begun.

        Raises:
            GroupError: the group is broken.
        """
        if self._aborted.is_set() or self._group is None:
            raise GroupError("the group was aborted")
        options = _distributed.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=self._timeout)
        try:
            return self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._broken(error) from None

    def wait(self, work: Any) -> None:
        """Waits until a broadcast is over.

        Raises:
            GroupError: it failed, or took longer than the timeout; the group is broken then.
        """
        try:
            if self._device.type == "cpu":
                work.wait(timedelta(seconds=self._timeout))
            else:
                self._poll(work)
        except RuntimeError as error:
            raise self._broken(error) from None

    def _poll(self, work: Any) -> None:
        """As a wait for NCCL, which has none that can be ended."""
        deadline = time.monotonic() + self._timeout
        look = time.monotonic() + 1.0
        while not work.is_completed():
            now = time.monotonic()
            if now >= deadline:
                raise RuntimeError(f"nothing came for {self._timeout:g} s")
            if now >= look:
                self._store.check([f"{_PREFIX}/joined/0"])  # fails when rank 0 is gone, which NCCL does not notice
                look = now + 1.0
            if self._aborted.wait(0.001):
                raise RuntimeError("the group was aborted")
        work.wait()  # raises what the broadcast has raised, and orders this stream behind it

    def _broken(self, error: Exception) -> GroupError:
        message = "the group was aborted" if self._aborted.is_set() else _one_line(error)
        self.abort()
        return GroupError(f"the broadcast failed: {message}")

    def abort(self) -> None:
        """Ends what is in progress, here and at the other members; from any thread, more than once."""
        self._aborted.set()
        if self._device.type == "cpu":
            _shut_down(self._addresses)
        elif self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Leaves the group; broadcasts in progress are ended."""
        self.abort()
        self._group = self._store = None


def _open_store(address: str, port: int, listener: socket.socket | None) -> Any:
    options: dict[str, Any] = {"timeout": timedelta(seconds=_CONNECT_SECONDS), "wait_for_workers": False}
    if listener is not None:
        options["master_listen_fd"] = listener.detach()
    return _distributed.TCPStore(address, port, is_master=listener is not None, **options)


def _gloo_group(store: Any, rank: int, size: int, local: str) -> Any:
    options = _distributed.ProcessGroupGloo._Options()
    options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=local)]
    options._timeout = timedelta(seconds=_CONNECT_SECONDS)
    options._threads = 2  # of one sequence of broadcasts, two are in progress at most
    return _distributed.ProcessGroupGloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, local: str) -> Any:
    """NCCL's own supervision ends the process when a peer is gone; here who waits does the supervising."""
    del local
    quiet = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)  # read when the group is made
    try:
        options = _distributed.ProcessGroupNCCL.Options()
        return _distributed.ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _shut_down(addresses: list[bytes]) -> None:
    """Shuts down this process's connections between any of the addresses that Gloo's members have published.

    Gloo has no abort: a pending operation ends only with its connection. What members publish holds their listening
    socket's address as the kernel's structure, and each connection has such an address on one of its ends.
    """
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(link).startswith("socket:"):  # noqa: PTH115 (the target is no path)
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                ends = [
                    _structure(connection.family, end()) for end in (connection.getpeername, connection.getsockname)
                ]
                if any(end and any(end in address for address in addresses) for end in ends):
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile, or not connected


def _structure(family: int, address: Any) -> bytes:
    """``sockaddr_in`` or ``sockaddr_in6`` up to the address; empty for other families."""
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack("!H", address[1]) + socket.inet_aton(address[0])
    if family == socket.AF_INET6:
        return struct.pack("=H", family) + struct.pack("!HI", *address[1:3]) + socket.inet_pton(family, address[0])
    return b""


def listen(address: str) -> socket.socket:
    """A listening socket at a free port of ``address``, for rank 0."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.bind((address, 0))
        listener.listen(128)
        stack.pop_all()
        return listener


def _one_line(error: Exception) -> str:
    """The first sentence of an error's text, without the place in torch's source that it may begin with."""
    text = re.sub(r"^\[[^]]*\.[a-z]+:\d+\] ", "", str(error).strip()) or type(error).__name__
    return text.splitlines()[0].split(". ", 1)[0][:200]
