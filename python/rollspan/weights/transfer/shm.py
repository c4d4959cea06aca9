"""Weights in memory that a trainer on the same machine shares: a sealed memfd, or a POSIX shared memory object."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from rollspan.errors import RollspanError, shown
from rollspan.safetensors_format import SafetensorsError
from rollspan.weights.transfer.base import Transport, check_keys
from rollspan.weights.transfer.mapped_file import map_safetensors
from rollspan.weights.transfer.safetensors_file import read_stream

SHARED_MEMORY = Path("/dev/shm")
#: With these a memfd can neither change nor shrink as long as it lives, whoever holds it.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class ShmTransport(Transport):
    """Safetensors in shared memory.

    ``update_info`` is ``{"pid", "fd", "size"}`` for a memfd of ``size`` bytes that process ``pid`` of the same user
    holds open as ``fd``, with the seals SHRINK, GROW and WRITE: used where it is, without a copy, and alive as long as
    its tensors are, whatever becomes of that process. Or ``{"name": "/x"}`` for an object of ``shm_open``, with
    ``"unlink": true`` to remove it afterwards: copied, for nobody can prove that it stays as it is.
    """

    name = "shm"

    def receive(self, info: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        check_keys("update_info", info, ("pid", "fd", "size", "name", "unlink"))
        if info.get("name") is not None:
            _refuse_together(info, ("pid", "fd", "size"), "name")
            return self._copy(info["name"], _flag(info, "unlink"))
        _refuse_together(info, ("unlink",), "pid")
        return self._map(_number(info, "pid", 1), _number(info, "fd", 0), _number(info, "size", 8))

    def _map(self, pid: int, number: int, size: int) -> Iterator[tuple[str, torch.Tensor]]:
        descriptor = _open_memfd(pid, number)
        try:
            try:
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            except OSError:
                raise _invalid(f"descriptor {number} of process {pid} is no memfd", "fd") from None
            if seals & SEALS != SEALS:
                raise _invalid(f"memfd {number} of process {pid} lacks the seals SHRINK, GROW and WRITE", "fd")
            if (found := os.fstat(descriptor).st_size) != size:
                raise _invalid(f"memfd {number} of process {pid} has {found} bytes, not {size}", "size")
            yield from map_safetensors(descriptor, self.check_cancelled)
        except SafetensorsError as error:
            raise _invalid(f"memfd {number} of process {pid} is not valid safetensors: {error}", "fd") from None
        finally:
            os.close(descriptor)

    def _copy(self, name: Any, unlink: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if unlink and self.context.num_engines > 1:
            raise _invalid("update_info.unlink: several engines read it, so none may remove it", "unlink")
        path = _object_path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with FileIO(descriptor) as stream:
                opened = os.fstat(descriptor)
                yield from read_stream(stream, self.check_cancelled)
        except (OSError, SafetensorsError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise _invalid(f"shared memory {shown(name)} cannot be read as safetensors: {reason}", "name") from None
        if unlink:
            try:
                if os.path.samestat(opened, path.lstat()):  # the name may be another's by now
                    path.unlink()
            except OSError as error:
                raise _invalid(f"shared memory {shown(name)} cannot be removed: {error.strerror}", "unlink") from None


def _invalid(message: str, field: str) -> RollspanError:
    return RollspanError(message, reason="weights_invalid", param=f"update_info.{field}")


def _number(info: Mapping[str, Any], field: str, least: int) -> int:
    value = info.get(field)
    if type(value) is not int or not least <= value < 2**63:
        allowed = f"an integer of at least {least}"
        raise _invalid(
            f"update_info.{field} must be {allowed} (or name an object of shm_open), got {shown(value)}", field
        )
    return value


def _flag(info: Mapping[str, Any], field: str) -> bool:
    value = info.get(field)
    if value is not None and not isinstance(value, bool):
        raise _invalid(f"update_info.{field} must be true or false, got {shown(value)}", field)
    return bool(value)


def _refuse_together(info: Mapping[str, Any], fields: tuple[str, ...], other: str) -> None:
    for field in fields:
        if info.get(field) is not None:
            raise _invalid(f"update_info.{field} does not go with the form that update_info.{other} is of", field)


def _open_memfd(pid: int, number: int) -> int:
    """Opens another process's memfd anew; what is no memfd is not opened, for that alone can have effects."""
    link = f"/proc/{pid}/fd/{number}"
    try:
        # What a descriptor of a memfd leads to is called "/memfd:NAME (deleted)", see memfd_create(2).
        if os.readlink(link).startswith("/memfd:") and stat.S_ISREG(os.stat(link).st_mode):  # noqa: PTH115, PTH116
            return os.open(link, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        kind = "fd" if os.path.exists(f"/proc/{pid}") else "pid"  # noqa: PTH110
        text = f"process {pid}" if kind == "pid" else f"descriptor {number} of process {pid}"
        raise _invalid(f"{text} does not exist here (engine and trainer must see the same processes)", kind) from None
    except OSError as error:
        text = f"descriptor {number} of process {pid} cannot be opened: {error.strerror}"
        raise _invalid(f"{text} (engine and trainer must run as the same user)", "pid") from None
    raise _invalid(f"descriptor {number} of process {pid} is no memfd", "fd")


def _object_path(name: Any) -> Path:
    """Where Linux keeps the object that ``shm_open`` calls ``name``."""
    bare = name[1:] if isinstance(name, str) and name.startswith("/") else ""
    if (
        not 1 <= len(bare.encode(errors="surrogatepass")) <= 255
        or not bare.isprintable()
        or "/" in bare
        or bare in (".", "..")
    ):
        allowed = 'the name of an object of shm_open: "/" and 1 to 255 bytes, printable, without another slash'
        raise _invalid(f"update_info.name must be {allowed}, got {shown(name)}", "name")
    return SHARED_MEMORY / bare
