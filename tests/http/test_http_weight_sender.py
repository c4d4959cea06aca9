"""WeightSender against the real engine: every transport, whole, sparse and interrupted, while it generates."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from frontend_process import wait_until
from real_server import RealServer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollspan import models
from rollspan.digest import weight_digest
from rollspan.models.task import Problem
from rollspan.trainer import WeightSender, WeightSendError

TRANSPORTS = ("disk", "http", "shm", "distributed")
PROMPT = Problem(12, 34).prompt_ids
HEAD = "lm_head.weight"

TRAINER = """
import sys, torch
from safetensors.torch import load_file
from rollspan.trainer import WeightSender

def wait(done, total):
    if 0 < done < total:
        print("in the middle", flush=True)
        sys.stdin.read()

options = {"packed_bytes": 1} if sys.argv[2] == "distributed" else {"chunk_bytes": 5000}
WeightSender(sys.argv[1], transport=sys.argv[2], progress=wait, **options).send(load_file(sys.argv[3]), "dead")
"""


def record(server: RealServer) -> dict[str, Any]:
    (found,) = server.frontend.get("/weight_history").json()["engines"]
    return dict(found)


def sender(server: RealServer, transport: str, **options: Any) -> WeightSender:
    if transport == "disk":
        options["directory"] = server.engine.weights_root
    return WeightSender(server.frontend.url, transport=transport, timeout=60.0, **options)


def zero_head() -> Any:
    model = AutoModelForCausalLM.from_pretrained(models.path("add2-rl"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model


def greedy(server: RealServer) -> list[int]:
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    answer = server.frontend.generate(PROMPT, sampling_params=params)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_is_sent_whole_and_its_changes_alone(restored: RealServer, transport: str) -> None:
    server, model = restored, zero_head()
    before = record(server)["weight_commit"]
    with sender(server, transport, keep_last=True) as sending:
        sent = sending.send(model, weight_version="zeros")
        assert greedy(server) == [0] * 6
        assert sent.weight_commits == (before + 1,)
        with torch.no_grad():
            model.lm_head.weight[3] = 100.0
        sparse = sending.send(model, weight_version="sparse", delta_base="last")
        assert sparse.num_bytes < sent.num_bytes / 2
    now = record(server)
    assert now["weight_version"] == server.label() == "sparse"
    assert now["weight_digest"] == sparse.weight_digest == weight_digest(model, torch.float32)
    assert now["commits"][-1]["source"].startswith(transport)
    assert now["update"] is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_weights_outlive_their_sender(restored: RealServer, transport: str) -> None:
    with sender(restored, transport) as sending:
        sending.send(zero_head(), weight_version="zeros")
    assert greedy(restored) == [0] * 6


@pytest.mark.parametrize("transport", ["distributed", "http"])
def test_a_trainer_that_is_killed_in_mid_transfer_leaves_the_weights_as_they_were(
    restored: RealServer, transport: str
) -> None:
    server = restored
    expected, before = greedy(server), record(server)
    file = models.path("add2-sft") / "model.safetensors"
    command = [sys.executable, "-c", TRAINER, server.frontend.url, transport, str(file)]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as trainer:
        assert trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == b"in the middle\n"
            assert greedy(server) == expected
        finally:
            trainer.send_signal(signal.SIGKILL)
    if transport == "distributed":  # the update was being received, and is over with its sender
        wait_until(lambda: record(server)["update"] is None, "the end of the update")
        assert record(server)["failures"][-1]["reason"] == "transfer_failed"
    else:
        server.frontend.post("/abort_weight_update")
    assert greedy(server) == expected
    now = record(server)
    assert (now["weight_commit"], now["weight_digest"]) == (before["weight_commit"], before["weight_digest"])
    with sender(server, transport) as sending:
        sending.send(load_file(file), weight_version="alive")
    assert server.label() == "alive"


def test_wrong_weights_change_nothing(restored: RealServer) -> None:
    server, expected = restored, greedy(restored)
    whole = {name: tensor.detach() for name, tensor in zero_head().state_dict().items()}
    with sender(server, "shm") as sending:
        for wrong, message in (
            ({**whole, "extra": torch.ones(1)}, "'extra' is none of the model's parameters"),
            ({**whole, HEAD: torch.ones(2, 2)}, "has shape"),
            ({HEAD: whole[HEAD]}, "lacks"),
        ):
            with pytest.raises(WeightSendError, match=message):
                sending.send(wrong, weight_version="wrong")
        assert greedy(server) == expected
        sending.send({HEAD: whole[HEAD]}, weight_version="zeros", partial=True)
    assert greedy(server) == [0] * 6


def test_a_directory_that_the_server_may_not_read_is_refused_and_cleared(restored: RealServer, tmp_path: Path) -> None:
    elsewhere = WeightSender(restored.frontend.url, transport="disk", directory=tmp_path)
    with elsewhere as sending, pytest.raises(WeightSendError, match="is outside --weights-root") as caught:
        sending.send(zero_head())
    assert caught.value.reason == "weights_invalid"
    assert not list(tmp_path.iterdir())
