"""Digest of weights: the written rule, computed here once more, and independence of everything but the content."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from rollspan import cli, models
from rollspan.digest import combine, tensor_digest, untied, weight_digest
from rollspan.errors import RollspanError
from rollspan.safetensors_format import CODES

VECTORS = json.loads((Path(__file__).parents[1] / "conformance" / "digest.json").read_text())
BY_CODE = {code: dtype for dtype, code in CODES.items()}


def made(fields: dict[str, Any]) -> torch.Tensor:
    data = bytearray.fromhex(fields["hex"])
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(BY_CODE[fields["dtype"]]).reshape(fields["shape"])


def leaf_by_the_rule(name: str, code: str, shape: list[int], data: bytes) -> bytes:
    return blake3(b"\0".join([name.encode(), code.encode(), ",".join(map(str, shape)).encode(), data])).digest()


def root_by_the_rule(leaves: dict[str, bytes]) -> str:
    ordered = sorted(leaves, key=lambda name: name.encode())
    return "blake3:" + blake3(b"".join(name.encode() + b"\0" + leaves[name] for name in ordered)).hexdigest()


@pytest.mark.parametrize("case", VECTORS, ids=[case["name"] for case in VECTORS])
def test_the_vectors_are_what_the_written_rule_gives_and_what_the_functions_give(case: dict[str, Any]) -> None:
    leaves = {}
    for name, fields in case["tensors"].items():
        leaf = leaf_by_the_rule(name, fields["dtype"], fields["shape"], bytes.fromhex(fields["hex"]))
        assert leaf.hex() == fields["leaf"]
        assert tensor_digest(name, made(fields)) == leaf
        leaves[name] = leaf
    assert root_by_the_rule(leaves) == case["digest"]
    assert combine(leaves) == case["digest"]
    assert weight_digest({name: made(fields) for name, fields in case["tensors"].items()}) == case["digest"]


def test_every_dtype_has_a_vector() -> None:
    assert {fields["dtype"] for case in VECTORS for fields in case["tensors"].values()} == set(CODES.values())


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"layer.{i}.größe": torch.randn(3, i, generator=generator) for i in range(5)} | {"s": torch.tensor(2.5)}


@given(order=st.permutations(list(tensors())))
def test_the_order_of_the_tensors_does_not_matter(order: list[str]) -> None:
    whole = tensors()
    assert weight_digest({name: whole[name] for name in order}) == weight_digest(whole)


def test_leaves_of_parts_combine_to_the_digest_of_the_whole() -> None:
    whole = tensors()
    leaves = {name: tensor_digest(name, tensor) for name, tensor in whole.items()}
    first, second = dict(list(leaves.items())[:2]), dict(list(leaves.items())[2:])
    assert combine(second | first) == weight_digest(whole)


def test_the_layout_in_memory_and_the_number_of_threads_do_not_matter() -> None:
    tensor = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)
    expected = leaf_by_the_rule("a", "F32", [600, 1000], tensor.numpy().tobytes())
    padded = torch.zeros(600, 1001)
    padded[:, 1:] = tensor
    for same in (tensor, tensor.t().contiguous().t(), padded[:, 1:], tensor.clone().requires_grad_()):
        assert tensor_digest("a", same) == expected
        assert tensor_digest("a", same, threads=2) == expected
    assert tensor_digest("a", tensor.t()) == leaf_by_the_rule("a", "F32", [1000, 600], tensor.numpy().T.tobytes())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {"b": t},
        lambda t: {"a": t.view(torch.int32)},
        lambda t: {"a": t.reshape(3, 2)},
        lambda t: {"a": t.reshape(6)},
        lambda t: {
            "a": torch.cat([t.reshape(-1)[:-1], t.reshape(-1)[-1:].nextafter(torch.tensor([9.0]))]).reshape(2, 3)
        },
        lambda t: {"a": t, "b": t.clone()},
        lambda t: {},
    ],
    ids=["name", "dtype", "shape", "dimensions", "last bit", "one more", "none"],
)
def test_any_change_of_the_content_changes_the_digest(change: Any) -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert weight_digest(change(tensor)) != weight_digest({"a": tensor})


def test_equal_values_of_other_bits_are_other_weights() -> None:
    assert weight_digest({"a": torch.tensor([0.0])}) != weight_digest({"a": torch.tensor([-0.0])})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("derived", torch.ones(2), persistent=False)


def test_a_model_counts_parameters_and_persistent_buffers_and_tied_ones_once() -> None:
    model = Tied()
    expected = weight_digest({"embed.weight": model.embed.weight.detach().clone(), "kept": torch.ones(2)})
    assert weight_digest(model) == expected
    assert weight_digest(model.state_dict()) == expected
    assert list(untied(model)) == ["kept", "embed.weight"]
    model.derived.zero_()
    assert weight_digest(model) == expected


def test_equal_tensors_and_views_of_one_memory_are_not_tied() -> None:
    memory = torch.ones(4)
    named = {
        "a": memory[:2],
        "b": memory[2:],
        "c": memory,
        "d": memory.clone(),
        "e": torch.empty(0),
        "f": torch.empty(0),
    }
    assert list(untied(named)) == list(named)


def test_floating_point_tensors_are_converted_first_and_others_stay() -> None:
    named = {"a": torch.linspace(0, 1, 7), "b": torch.arange(3)}
    expected = weight_digest({"a": named["a"].to(torch.bfloat16), "b": named["b"]})
    assert weight_digest(named, torch.bfloat16) == expected != weight_digest(named)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("a\0b", torch.ones(1)),
        ("\ud800", torch.ones(1)),
        ("a", torch.ones(1, dtype=torch.complex128)),
        ("a", torch.ones(1, device="meta")),
        ("a", torch.ones(2, 2).to_sparse()),
    ],
    ids=["nul", "surrogate", "dtype", "meta", "sparse"],
)
def test_what_has_no_name_or_no_bytes_is_refused(name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(RollspanError, match=r"no possible name|no bytes to digest") as caught:
        weight_digest({name: tensor})
    assert caught.value.reason == "weights_invalid"


def test_a_digest_is_64_hexadecimal_digits_behind_its_kind() -> None:
    assert re.fullmatch(r"blake3:[0-9a-f]{64}", weight_digest({}))
    array = np.zeros(0, dtype=np.uint8)
    assert weight_digest({}) == "blake3:" + blake3(array.tobytes()).hexdigest()


def test_the_command_prints_the_digest_of_a_model_as_an_engine_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models.path("add2-rl"))
    assert cli.main(["digest", "add2-rl"]) == 0
    assert capsys.readouterr().out == f"{weight_digest(model)}\n"
    assert cli.main(["digest", "add2-rl", "--dtype", "bfloat16", "--tensors"]) == 0
    *tensors_printed, last = capsys.readouterr().out.splitlines()
    model = AutoModelForCausalLM.from_pretrained(models.path("add2-rl"), dtype=torch.bfloat16)
    assert last == weight_digest(model)
    assert tensors_printed == [f"{tensor_digest(name, tensor).hex()}  {name}" for name, tensor in untied(model).items()]


def test_the_command_says_what_it_cannot_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(SystemExit) as caught:
            cli.main(["digest", str(path)])
        assert caught.value.code == 1
        assert capsys.readouterr().err.startswith("rollspan digest: error: ")
