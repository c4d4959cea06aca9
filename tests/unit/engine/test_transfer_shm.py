"""Shared memory: sealed memfds used in place, objects of shm_open copied, whatever becomes of their owner."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine.transfers import context, every_dtype, mapped, raises, same
from rollspan.weights import transfer
from rollspan.weights.transfer.shm import SEALS, SHARED_MEMORY

WRONG_NAMES = ("x", "", "/", "//x", "/a/b", "/..", "/.", "/../x", "/a\0", "/a\n", 3, ["/x"], "/" + "x" * 256, "/\ud800")

HELD_BY_A_CHILD = """
import fcntl, os, sys
data = sys.stdin.buffer.read()
fd = os.memfd_create("w", os.MFD_ALLOW_SEALING)
os.write(fd, data)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 14)
print(fd, flush=True)
os.close(0)
import signal
signal.pause()
"""


@pytest.fixture
def memfd() -> Iterator[Callable[..., dict[str, int]]]:
    """Makes a memfd of this process and returns the ``update_info`` for it."""
    held: list[int] = []

    def make(data: bytes, seals: int = SEALS) -> dict[str, int]:
        held.append(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.write(held[-1], data)
        fcntl.fcntl(held[-1], fcntl.F_ADD_SEALS, seals)
        return {"pid": os.getpid(), "fd": held[-1], "size": len(data)}

    yield make
    for descriptor in held:
        os.close(descriptor)


@pytest.fixture
def shared() -> Iterator[Callable[[bytes], str]]:
    """Makes an object of shm_open and returns its name."""
    made: list[Path] = []

    def make(data: bytes) -> str:
        made.append(SHARED_MEMORY / f"rollspan-test-{uuid.uuid4().hex}")
        made[-1].write_bytes(data)
        return f"/{made[-1].name}"

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def receive(info: dict[str, Any]) -> dict[str, torch.Tensor]:
    return dict(transfer.create("shm", context()).receive(info))


def test_every_dtype_arrives_to_the_bit_in_both_forms(memfd: Any, shared: Any) -> None:
    whole = every_dtype()
    assert same(receive(memfd(save(whole))), whole)
    name = shared(save(whole))
    assert same(receive({"name": name}), whole)
    assert (SHARED_MEMORY / name[1:]).exists()


def test_a_memfd_is_used_in_place_and_an_object_is_copied(memfd: Any, shared: Any) -> None:
    data = save({"a": torch.arange(64.0)}, metadata={"fill": "." * 36})
    data_offset = 8 + int.from_bytes(data[:8], "little")
    padding = b" " * (-data_offset % 64)
    data = (data_offset - 8 + len(padding)).to_bytes(8, "little") + data[8:data_offset] + padding + data[data_offset:]
    assert mapped(receive(memfd(data))["a"])
    assert not mapped(receive({"name": shared(data)})["a"])


def test_tensors_of_a_memfd_outlive_the_process_that_made_it() -> None:
    whole = {"a": torch.arange(50_000.0), "b": torch.ones(7, dtype=torch.bfloat16)}
    data = save(whole)
    with subprocess.Popen([sys.executable, "-c", HELD_BY_A_CHILD], stdin=-1, stdout=-1) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(data)
            child.stdin.close()
            number = int(child.stdout.readline())
            receiving = transfer.create("shm", context()).receive({"pid": child.pid, "fd": number, "size": len(data)})
            received = dict([next(receiving)])
            child.send_signal(signal.SIGKILL)
            child.wait()
            received |= dict(receiving)
        finally:
            child.kill()
    assert same(received, whole)


def test_writing_to_a_received_tensor_changes_no_memfd(memfd: Any) -> None:
    info = memfd(save({"a": torch.zeros(64)}))
    receive(info)["a"].fill_(7.0)
    assert torch.equal(receive(info)["a"], torch.zeros(64))


@pytest.mark.parametrize("lacking", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
def test_a_memfd_that_could_still_change_is_refused(memfd: Any, lacking: int) -> None:
    info = memfd(save({"a": torch.zeros(64)}), SEALS & ~lacking)
    with raises("weights_invalid", "update_info.fd", "lacks the seals SHRINK, GROW and WRITE"):
        receive(info)


def test_a_memfd_of_another_size_than_told_is_refused(memfd: Any) -> None:
    info = memfd(save({"a": torch.zeros(64)}))
    with raises("weights_invalid", "update_info.size", f"has {info['size']} bytes, not {info['size'] + 1}"):
        receive(info | {"size": info["size"] + 1})


@pytest.mark.parametrize("data", [b"\0" * 8, b"\xff" * 64, save({"a": torch.zeros(64)})[:-1]])
def test_a_memfd_that_is_not_safetensors_is_refused(memfd: Any, data: bytes) -> None:
    with raises("weights_invalid", "update_info.fd", "is not valid safetensors"):
        receive(memfd(data))


def test_a_descriptor_that_is_no_memfd_is_refused_unopened(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(save({"a": torch.zeros(64)}))
    one, other = socket.socketpair()
    first, second = os.pipe()
    with one, other, (tmp_path / "x").open("rb") as file, Path("/dev/null").open("rb") as device:
        for number in (one.fileno(), first, file.fileno(), device.fileno()):
            with raises("weights_invalid", "update_info.fd", "is no memfd"):
                receive({"pid": os.getpid(), "fd": number, "size": 8})
    os.close(first)
    os.close(second)


def test_a_process_or_descriptor_that_does_not_exist_is_named() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with raises("weights_invalid", "update_info.pid", f"process {child.pid} does not exist here"):
        receive({"pid": child.pid, "fd": 0, "size": 8})
    with raises("weights_invalid", "update_info.fd", "descriptor 99999 of process"):
        receive({"pid": os.getpid(), "fd": 99999, "size": 8})


@pytest.mark.parametrize(
    ("info", "field"),
    [
        ({}, "pid"),
        ({"pid": 0, "fd": 1, "size": 8}, "pid"),
        ({"pid": True, "fd": 1, "size": 8}, "pid"),
        ({"pid": "self", "fd": 1, "size": 8}, "pid"),
        ({"pid": 2**64, "fd": 1, "size": 8}, "pid"),
        ({"pid": 1, "fd": -1, "size": 8}, "fd"),
        ({"pid": 1, "fd": "../../1/mem", "size": 8}, "fd"),
        ({"pid": 1, "fd": 1, "size": 7}, "size"),
        ({"pid": 1, "fd": 1, "size": 8.0}, "size"),
        ({"pid": 1, "fd": 1, "size": 8, "unlink": True}, "unlink"),
        ({"name": "/x", "pid": 1}, "pid"),
        ({"name": "/x", "size": 1}, "size"),
        ({"name": "/x", "unlink": 1}, "unlink"),
        *(({"name": name}, "name") for name in WRONG_NAMES),
    ],
)
def test_a_field_that_is_wrong_is_refused_by_name(info: dict[str, Any], field: str) -> None:
    with raises("weights_invalid", f"update_info.{field}", f"update_info.{field} "):
        receive(info)


def test_an_unknown_field_is_refused_by_name() -> None:
    with raises("unsupported_field", "update_info.path", "known: pid, fd, size, name, unlink"):
        receive({"name": "/x", "path": "/x"})


def test_an_object_is_removed_after_it_was_read_if_asked_and_never_on_failure(shared: Any) -> None:
    name = shared(save({"a": torch.zeros(4), "b": torch.zeros(4)}))
    path = SHARED_MEMORY / name[1:]
    receiving = transfer.create("shm", context()).receive({"name": name, "unlink": True})
    next(receiving)
    assert path.exists()
    list(receiving)
    assert not path.exists()
    broken = shared(save({"a": torch.zeros(4)})[:-1])
    with raises("weights_invalid", "update_info.name", "its header says 16"):
        receive({"name": broken, "unlink": True})
    assert (SHARED_MEMORY / broken[1:]).exists()


def test_an_object_that_took_the_name_meanwhile_is_not_removed(shared: Any) -> None:
    name = shared(save({"a": torch.zeros(4)}))
    path = SHARED_MEMORY / name[1:]
    receiving = transfer.create("shm", context()).receive({"name": name, "unlink": True})
    next(receiving)
    path.unlink()
    path.write_bytes(b"another")
    list(receiving)
    assert path.read_bytes() == b"another"


def test_one_of_several_engines_may_not_remove_what_all_read(shared: Any) -> None:
    name = shared(save({"a": torch.zeros(4)}))
    transport = transfer.create("shm", replace(context(), num_engines=2))
    with raises("weights_invalid", "update_info.unlink", "several engines"):
        list(transport.receive({"name": name, "unlink": True}))


def test_an_object_that_is_cut_while_it_is_read_is_an_error(shared: Any) -> None:
    name = shared(save({"a": torch.zeros(64), "b": torch.zeros(64)}))
    receiving = transfer.create("shm", context()).receive({"name": name})
    next(receiving)
    os.truncate(SHARED_MEMORY / name[1:], 100)
    with raises("weights_invalid", "update_info.name", "it ends too early"):
        list(receiving)


def test_a_missing_object_and_a_link_are_refused(shared: Any, tmp_path: Path) -> None:
    with raises("weights_invalid", "update_info.name", "No such file or directory"):
        receive({"name": f"/rollspan-{uuid.uuid4().hex}"})
    name = shared(b"")
    path = SHARED_MEMORY / name[1:]
    (tmp_path / "x").write_bytes(save({"a": torch.zeros(4)}))
    path.unlink()
    path.symlink_to(tmp_path / "x")
    with raises("weights_invalid", "update_info.name", "symbolic links"):
        receive({"name": name})


@pytest.mark.parametrize("form", ["memfd", "object"])
def test_cancel_ends_it_between_two_tensors(memfd: Any, shared: Any, form: str) -> None:
    data = save({"a": torch.zeros(64), "b": torch.zeros(64)})
    transport = transfer.create("shm", context())
    receiving = transport.receive(memfd(data) if form == "memfd" else {"name": shared(data)})
    next(receiving)
    transport.cancel()
    with raises("update_aborted", None, "aborted"):
        next(receiving)


def test_no_descriptor_is_left_open_once_the_tensors_are_gone(memfd: Any) -> None:
    def count() -> int:
        gc.collect()  # failures of other tests hold frames, and with them what was being received
        links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum(str(link).startswith("/memfd:test") for link in links)

    info = memfd(save({"a": torch.zeros(64)}))
    before = count()
    for _ in range(5):
        receive(info)
    assert count() == before
