"""Handles of GPU memory: checked field by field without a GPU, opened where there is one."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.transfers import context, raises
from rollspan.weights import transfer
from rollspan.weights.transfer.base import Transport

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SENDER = """
import json, sys, torch
from rollspan.trainer.transfer.cuda_ipc import handles
tensors = {"a": torch.arange(1000.0, device="cuda"), "b": torch.arange(6, device="cuda").reshape(2, 3).t()[1:]}
tensors["b"] = tensors["b"].contiguous()
print(json.dumps(handles(tensors)), flush=True)
sys.stdin.read()
"""


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


HANDLE = {
    "gpu_uuid": "0",
    "memory": encoded(b"\1\1" + bytes(64)),
    "size": 512,
    "offset": 0,
    "start": 0,
    "counter": encoded(b"/torch_12_34_0"),
    "counter_offset": 0,
    "event": "",
    "wait": False,
}
UPDATE = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[4]], "handles": [HANDLE]}


def ipc() -> Transport:
    return transfer.create("ipc", context({"a": torch.zeros(4)}))


def test_an_engine_without_a_gpu_refuses_with_the_reason() -> None:
    assert ipc().name == "cuda_ipc"
    for action in (lambda: ipc().init({"packed": False}), lambda: list(ipc().receive(UPDATE))):
        with raises("weights_invalid", "update_info.backend", "needs an engine on a GPU, this one computes on cpu"):
            action()


@pytest.mark.parametrize("field", ["ipc_handles", "ipc_handles_pickled"])
def test_pickled_handles_are_refused_by_name_before_anything_else(field: str) -> None:
    with raises("unsupported_field", f"update_info.{field}", "it holds pickled objects"):
        list(ipc().receive(UPDATE | {field: "gASV"}))
    with raises("unsupported_field", f"init_info.{field}", "it holds pickled objects"):
        ipc().init({field: "gASV"})
    with raises("unsupported_field", "init_info.packed", "known: none"):
        ipc().init({"packed": True})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu_uuid": 0}, "handles[0].gpu_uuid must be a string, got 0"),
        ({"memory": None}, "handles[0].memory must be base64 of a handle, got null"),
        ({"memory": "!"}, "handles[0].memory must be base64"),
        ({"memory": "ü"}, "handles[0].memory must be base64"),
        ({"memory": encoded(bytes(100))}, "handles[0].memory must be base64"),
        ({"event": encoded(bytes(8))}, "handles[0].event must be base64"),
        (
            {"counter": encoded(b"/etc/passwd")},
            "handles[0].counter must be base64 of the name of torch's shared memory",
        ),
        ({"counter": encoded(b"/torch_/../x")}, "handles[0].counter must be"),
        ({"counter_offset": 10_000}, "handles[0].counter_offset must be an integer from 0 to 9999"),
        ({"counter_offset": True}, "handles[0].counter_offset must be"),
        ({"offset": -1}, "handles[0].offset must be"),
        ({"size": "512"}, "handles[0].size must be"),
        ({"size": 15}, "handles[0] puts 16 bytes at 0 of a storage of 15 bytes"),
        ({"start": 500}, "handles[0] puts 16 bytes at 500 of a storage of 512 bytes"),
        ({"start": 2}, "handles[0] puts 16 bytes at 2"),
        ({"wait": 1}, "handles[0].wait must be true or false"),
    ],
)
def test_a_field_of_a_handle_that_is_wrong_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with raises("weights_invalid", "update_info.handles", message):
        list(ipc().receive(UPDATE | {"handles": [HANDLE | change]}))


@pytest.mark.parametrize("handles", [None, {}, [], [HANDLE, HANDLE]])
def test_handles_are_as_many_as_names(handles: Any) -> None:
    with raises("weights_invalid", "update_info.handles", "must be a list of 1 objects"):
        list(ipc().receive(UPDATE | {"handles": handles}))
    with raises("weights_invalid", "update_info.handles", "handles[0] must be an object, got 3"):
        list(ipc().receive(UPDATE | {"handles": [3]}))
    with raises("unsupported_field", "update_info.handles[0].device", "known: gpu_uuid"):
        list(ipc().receive(UPDATE | {"handles": [HANDLE | {"device": 0}]}))


@needs_cuda
def test_tensors_of_another_process_are_copied_and_outlive_it() -> None:
    facts = replace(context({"a": torch.zeros(4000)}), device=torch.device("cuda"))
    with subprocess.Popen([sys.executable, "-c", SENDER], stdin=-1, stdout=-1) as sender:
        try:
            assert sender.stdout is not None
            info = json.loads(sender.stdout.readline())
            received = dict(transfer.create("cuda_ipc", facts).receive(info))
        finally:
            sender.kill()
    assert torch.equal(received["a"].cpu(), torch.arange(1000.0))
    assert received["b"].tolist() == [[1, 4], [2, 5]]


@needs_cuda
def test_a_handle_of_nothing_and_another_gpu_are_refused() -> None:
    facts = replace(context({"a": torch.zeros(4)}), device=torch.device("cuda"))
    with raises("weights_invalid", "update_info.handles", "is on GPU 0, the engine on"):
        list(transfer.create("cuda_ipc", facts).receive(UPDATE))
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    with raises("weights_invalid", "update_info.handles", "handles[0] cannot be opened"):
        list(transfer.create("cuda_ipc", facts).receive(UPDATE | {"handles": [HANDLE | {"gpu_uuid": uuid}]}))
