"""The registry of transports, and the one that reads directories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.transfers import context, every_dtype, raises, same
from rollspan.weights import transfer
from rollspan.weights.transfer.base import Transport


def test_transports_are_found_by_name_and_others_are_refused_by_field() -> None:
    assert transfer.create("disk", context()).name == "disk"
    for name in ("tcp", "", None, 3, ["disk"]):
        with raises("weights_invalid", "update_info.backend", "must be one of disk"):
            transfer.canonical(name, "update_info.backend")


def test_importing_the_registry_imports_no_transport() -> None:
    code = "import sys, rollspan.weights.transfer; print(*[m for m in sys.modules if 'weights.transfer.' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rollspan.weights.transfer.base"]


def disk(root: Path | None) -> Transport:
    return transfer.create("disk", context(root=root))


def test_every_dtype_arrives_to_the_bit_from_shards(tmp_path: Path) -> None:
    whole = every_dtype()
    names = list(whole)
    (tmp_path / "a").mkdir()
    for number in range(3):
        save_file({name: whole[name] for name in names[number::3]}, tmp_path / "a" / f"part-{number}.safetensors")
    received = dict(disk(tmp_path).receive({"path": "a"}))
    shutil.rmtree(tmp_path / "a")
    assert same(received, whole)


def test_no_root_means_no_reading(tmp_path: Path) -> None:
    with raises("weights_invalid", "update_info.path", "--weights-root"):
        list(disk(None).receive({"path": str(tmp_path)}))


def test_other_fields_are_refused_by_name(tmp_path: Path) -> None:
    with raises("unsupported_field", "update_info.file", "known: path"):
        list(disk(tmp_path).receive({"path": ".", "file": 1}))


def test_a_file_that_is_cut_in_mid_transfer_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000), "b": torch.zeros(100_000)}, tmp_path / "x.safetensors")
    receiving = disk(tmp_path).receive({"path": "."})
    next(receiving)
    os.truncate(tmp_path / "x.safetensors", 5000)
    with raises("weights_invalid", "update_info.path", "it ends too early"):
        list(receiving)


def test_cancel_ends_a_reading_between_two_chunks_and_stays(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10), "b": torch.zeros(10)}, tmp_path / "x.safetensors")
    transport = disk(tmp_path)
    receiving = transport.receive({"path": "."})
    next(receiving)
    transport.cancel()
    for iterator in (receiving, transport.receive({"path": "."})):
        with raises("update_aborted", None, "aborted"):
            next(iterator)


def test_init_is_not_needed_but_harmless() -> None:
    transport = disk(None)
    assert not transport.needs_init
    transport.init({})
    with raises("unsupported_field", "init_info.rank", "known: none"):
        transport.init({"rank": 1})
    transport.close()
    transport.close()
