"""Reading safetensors with plain reads: the tensors that the library reads, wrong files refused, never a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file

from rollspan.safetensors_format import DTYPES, SafetensorsError
from rollspan.weights.transfer.safetensors_file import read_safetensors


def tensors() -> dict[str, torch.Tensor]:
    """A tensor of every dtype, an empty one and a scalar."""
    made = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    return made | {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "größe": torch.ones(1)}


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with this header, which need not be right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_every_dtype_and_shape_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a", metadata={"format": "pt"})
    expected, found = load_file(tmp_path / "a"), dict(read_safetensors(tmp_path / "a"))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert torch.equal(_bytes(tensor), _bytes(expected[name]))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor


def test_large_tensors_are_read_like_small_ones_and_are_their_own(tmp_path: Path) -> None:
    whole = {"large": torch.arange(3_000_000).reshape(3, -1), "odd": torch.arange(5_000_001, dtype=torch.uint8)}
    save_file(whole, tmp_path / "a")
    first, second = dict(read_safetensors(tmp_path / "a")), dict(read_safetensors(tmp_path / "a"))
    first["large"].zero_()
    for name, tensor in whole.items():
        assert torch.equal(second[name], tensor)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1, "a": 2}', "a name occurs twice"),
        ([], "no JSON object"),
        ({"a": None}, "tensor 'a' has no possible dtype, shape and place"),
        ({"a": []}, "tensor 'a' has no possible"),
        ({"a": {}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"dtype": "F33"}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"dtype": ["F32"]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"shape": [-2]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"shape": [2.0]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"shape": [True, 2]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"shape": "2"}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"shape": [3]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"shape": [2**40, 2**40]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"data_offsets": [8, 0]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"data_offsets": [0]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"data_offsets": [0, 8, 9]}}, "tensor 'a' has no possible"),
        ({"a": ENTRY | {"data_offsets": [4, 12]}}, "tensor 'a' starts at byte 4 instead of 0"),
        ({"a": ENTRY, "b": ENTRY}, "tensor 'b' starts at byte 0 instead of 8"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, "tensor 'b' starts at byte 12 instead of 8"),
        ({}, "holds 8 bytes of data, its header says 0"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 16]}}, "holds 8 bytes of data, its header says 16"),
    ],
    ids=range(25),
)
def test_a_header_that_is_wrong_is_refused_before_anything_is_read(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(SafetensorsError, match=message):
        next(read_safetensors(write(tmp_path / "a", header, b"\0" * 8)))


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 100, (10**9).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(SafetensorsError, match=r"ends too early|larger than it may be"):
        list(read_safetensors(tmp_path / "a"))


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_crash(tmp_path: Path) -> None:
    save_file({f"t{index}": torch.zeros(100_000) for index in range(4)}, tmp_path / "a")
    reading = read_safetensors(tmp_path / "a")
    next(reading)
    os.truncate(tmp_path / "a", 1000)
    with pytest.raises(SafetensorsError, match="it ends too early"):
        list(reading)


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10_000), "b": torch.zeros(10_000)}, tmp_path / "a")
    reading = read_safetensors(tmp_path / "a")
    next(reading)
    (tmp_path / "new").write_bytes(b"junk")
    (tmp_path / "new").replace(tmp_path / "a")
    assert float(next(reading)[1].sum()) == 0.0


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(SafetensorsError, match="no regular file"):
        list(read_safetensors(tmp_path / "a"))


@given(data=st.data())
def test_a_damaged_header_is_refused_or_means_what_the_library_reads(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = bytearray(save({"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}))
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, header_end - 1))] = data.draw(st.sampled_from(b'0123456789{}[]",:abFI \xff\0'))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(whole)
    try:
        found = dict(read_safetensors(path))
    except SafetensorsError:
        return
    try:
        expected = load(bytes(whole))
    except SafetensorError:
        raise AssertionError("the library refuses this file") from None
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
