"""Uploads in the spool: used in place where they are memory, copied elsewhere, refused when wrong."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.transfers import context, every_dtype, mapped, raises, same
from rollspan.safetensors_format import make_header
from rollspan.weights import transfer
from rollspan.weights.transfer.mapped_file import in_memory

FIELD = "update_info.upload"


@pytest.fixture(params=["memory", "disk"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A spool of each kind; ``memory`` is one whose files are used in place."""
    if request.param == "disk":
        if in_memory(tmp_path.stat()):
            pytest.skip("the temporary directory is memory as well")
        yield tmp_path
    elif not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    else:
        directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        yield directory
        shutil.rmtree(directory)


def upload(spool: Path, tensors: dict[str, torch.Tensor], name: str = "u/a.safetensors") -> Path:
    path = spool / name
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    path.chmod(0o600)
    return path


def receive(spool: Path | None, upload: Any = "u", **fields: Any) -> dict[str, torch.Tensor]:
    transport = transfer.create("http", context(spool=spool))
    return dict(transport.receive({"upload": upload, **fields}))


def test_every_dtype_arrives_to_the_bit_and_the_files_may_vanish(spool: Path) -> None:
    whole = every_dtype()
    names = list(whole)
    for number in range(2):
        upload(spool, {name: whole[name] for name in names[number::2]}, f"u/part-{number}.safetensors")
    received = receive(spool)
    shutil.rmtree(spool / "u")
    assert same(received, whole)


def test_in_memory_nothing_is_copied_and_the_files_lose_their_names(spool: Path) -> None:
    whole = {"a": torch.arange(64.0), "b": torch.arange(160.0), "c": torch.ones(3), "d": torch.ones(32)}
    path = upload(spool, {})
    parts = [make_header((name, tensor.dtype, tensor.shape) for name, tensor in whole.items())]
    path.write_bytes(b"".join(parts + [tensor.numpy().tobytes() for tensor in whole.values()]))
    received = receive(spool)
    assert same(received, whole)
    in_place = "shm" in str(spool)
    assert [mapped(tensor) for tensor in received.values()] == [in_place, in_place, in_place, False]
    assert path.exists() is not in_place
    if in_place:
        with raises("upload_incomplete", FIELD, "an update has taken them"):
            receive(spool)


def test_writing_to_a_received_tensor_changes_no_file(spool: Path) -> None:
    path = upload(spool, {"a": torch.zeros(64)})
    with path.open("rb") as kept:
        receive(spool)["a"].fill_(7.0)
        assert not any(kept.read()[-256:])


@pytest.mark.parametrize("spool", ["memory"], indirect=True)
@pytest.mark.parametrize("how", ["written to", "moved"])
def test_what_others_could_still_change_is_not_used(spool: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollspan.weights.transfer.http._CLOSING_SECONDS", 0.1)
    path = upload(spool, {"a": torch.zeros(64)})
    received = transfer.create("http", context(spool=spool)).receive({"upload": "u"})
    next(received)
    descriptor = os.open(path, os.O_WRONLY)
    if how == "moved":
        os.close(descriptor)
        path.rename(path.with_suffix(".part"))
    with raises("upload_incomplete", FIELD, "a.safetensors of update_info.upload is being written to"):
        list(received)
    if how == "written to":
        os.close(descriptor)


@pytest.mark.parametrize("spool", ["memory"], indirect=True)
def test_who_has_written_a_file_may_still_be_closing_it(spool: Path) -> None:
    path = upload(spool, {"a": torch.zeros(64)})
    descriptor = os.open(path, os.O_WRONLY)
    closing = threading.Timer(0.1, os.close, [descriptor])
    closing.start()
    assert same(receive(spool), {"a": torch.zeros(64)})
    assert not path.exists()
    closing.join()


@pytest.mark.parametrize("change", ["another name", "others may write", "several engines"])
def test_files_that_are_not_private_are_copied(spool: Path, change: str) -> None:
    path = upload(spool, {"a": torch.zeros(64)})
    facts = context(spool=spool)
    if change == "another name":
        os.link(path, spool / "second")
    elif change == "others may write":
        path.chmod(0o620)
    else:
        facts = type(facts)(**{**vars(facts), "num_engines": 2})
    received = dict(transfer.create("http", facts).receive({"upload": "u"}))
    assert not mapped(received["a"])
    assert path.exists()


def test_a_failure_leaves_all_files_where_they_are(spool: Path) -> None:
    first = upload(spool, {"a": torch.zeros(64)})
    second = upload(spool, {"b": torch.zeros(64)}, "u/b.safetensors")
    os.truncate(second, second.stat().st_size - 1)
    with raises("weights_invalid", FIELD, "b.safetensors of update_info.upload cannot be read as safetensors"):
        receive(spool)
    assert first.exists()


def test_a_tensor_in_two_files_is_refused(spool: Path) -> None:
    for name in ("u/a.safetensors", "u/b.safetensors"):
        upload(spool, {"x": torch.zeros(1)}, name)
    with raises("weights_invalid", FIELD, "tensor 'x' is in more than one file of upload u"):
        receive(spool)


def test_what_is_still_being_received_is_refused(spool: Path) -> None:
    upload(spool, {"a": torch.zeros(1)})
    (spool / "u" / "b.safetensors.part").write_bytes(b"")
    with raises("upload_incomplete", FIELD, "b.safetensors.part is still being received"):
        receive(spool)


def test_a_link_out_of_the_spool_is_refused(spool: Path, tmp_path: Path) -> None:
    outside = upload(tmp_path, {"a": torch.zeros(1)}, "elsewhere/a.safetensors")
    (spool / "u").mkdir(exist_ok=True)
    (spool / "u" / "l.safetensors").symlink_to(outside)
    with raises("weights_invalid", FIELD, "l.safetensors"):
        receive(spool)


@pytest.mark.parametrize("header", [{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, [], "x"])
def test_a_header_that_is_wrong_is_refused(spool: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    upload(spool, {}).write_bytes(len(text).to_bytes(8, "little") + text)
    with raises("weights_invalid", FIELD, "cannot be read as safetensors"):
        receive(spool)


def test_cancel_ends_it_between_two_tensors(spool: Path) -> None:
    path = upload(spool, {"a": torch.zeros(64), "b": torch.zeros(64)})
    transport = transfer.create("http", context(spool=spool))
    receiving = transport.receive({"upload": "u"})
    next(receiving)
    transport.cancel()
    with raises("update_aborted", None, "aborted"):
        next(receiving)
    assert path.exists()


@pytest.mark.parametrize("name", [None, 3, "", ".", "..", ".u", "a/b", "../u", "u\0", "u\n", "ü", "x" * 129, ["u"]])
def test_what_is_no_name_of_an_upload_is_refused(tmp_path: Path, name: Any) -> None:
    with raises("weights_invalid", FIELD, "must be the name of an upload"):
        receive(tmp_path, name)


def test_an_unknown_upload_another_field_and_no_spool_are_refused(tmp_path: Path) -> None:
    with raises("upload_incomplete", FIELD, "upload u is not there: FileNotFoundError"):
        receive(tmp_path)
    with raises("unsupported_field", "update_info.path", "known: upload"):
        receive(tmp_path, path="x")
    with raises("weights_invalid", FIELD, "started without a spool"):
        receive(None)
