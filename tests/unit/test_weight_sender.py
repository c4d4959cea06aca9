"""WeightSender: whole, partial and sparse updates by every transport, at one server or several, or none at all."""

from __future__ import annotations

import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rollspan.digest import weight_digest
from rollspan.errors import RollspanError
from rollspan.trainer import WeightSender, WeightSendError
from rollspan.trainer.progress import TransferBar
from support.weight_server import WeightServer

Tensors = dict[str, torch.Tensor]
SERVER_SIDE = ("disk", "http", "shm")
TRANSPORTS = (*SERVER_SIDE, "distributed")


def weights(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made = {f"layer.{i}.weight": torch.randn(40, 16, generator=generator) for i in range(4)}
    return made | {"scale": torch.randn((), generator=generator), "odd": torch.randn(3, generator=generator)}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., WeightServer]]:
    with ExitStack() as stack:

        def start(tensors: Tensors | None = None, **options: Any) -> WeightServer:
            return stack.enter_context(WeightServer(weights() if tensors is None else tensors, tmp_path, **options))

        yield start


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., WeightSender]]:
    """Makes senders and closes them."""
    with ExitStack() as stack:

        def make(*servers: WeightServer, transport: str = "shm", **options: Any) -> WeightSender:
            if transport == "disk":
                options.setdefault("directory", tmp_path)
            if transport == "http":
                options.setdefault("chunk_bytes", 3000)
            sender = WeightSender([server.url for server in servers], transport=transport, timeout=20.0, **options)
            return stack.enter_context(sender)

        yield make


def equal(one: Tensors, other: Tensors) -> bool:
    return weight_digest(one) == weight_digest(other)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_five_lines_bring_weights_to_a_server(serve: Any, tmp_path: Path, transport: str) -> None:
    server, new = serve(), weights(1)
    options = {"directory": tmp_path} if transport == "disk" else {}
    with WeightSender(server.url, transport=transport, **options) as sender:
        for step in range(2):
            new["scale"] += 1
            sent = sender.send(new, weight_version=f"step-{step}")
            assert equal(server.weights, new)
            assert (sent.weight_version, sent.weight_commits) == (f"step-{step}", (step + 1,))
            assert sent.weight_digest == weight_digest(new) == server.bodies["/finish_weight_update"]["weight_digest"]
            assert sent.num_bytes == sum(tensor.nbytes for tensor in new.values())
    assert server.joined is None
    assert not list(tmp_path.iterdir())
    assert not list(server.spool.iterdir())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_servers_get_the_same_update(serve: Any, connect: Any, transport: str) -> None:
    servers, new = [serve(), serve(), serve()], weights(1)
    sent = connect(*servers, transport=transport).send(new, "x")
    assert sent.weight_commits == (1, 1, 1)
    assert all(equal(server.weights, new) for server in servers)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("route", ["POST /start_weight_update", "POST /update_weights", "POST /finish_weight_update"])
def test_a_refusal_by_one_of_several_leaves_all_as_they_were(
    serve: Any, connect: Any, transport: str, route: str
) -> None:
    first, second = serve(), serve()
    first.fail(route, "weights_invalid")
    sender = connect(first, second, transport=transport)
    with pytest.raises(WeightSendError, match=f"{first.url}: scripted weights_invalid") as caught:
        sender.send(weights(1), "x")
    assert (caught.value.url, caught.value.reason) == (first.url, "weights_invalid")
    for server in (first, second):
        assert equal(server.weights, weights())
        assert server.staged is None
        assert not list(server.spool.iterdir())
    assert sender.send(weights(1), "x").weight_commits == (1, 1)


def test_a_refusal_after_another_has_committed_says_so(serve: Any, connect: Any) -> None:
    first, second = serve(), serve()
    second.fail("POST /finish_weight_update", "weights_invalid")
    with pytest.raises(WeightSendError, match="1 of 2 servers have the new weights already"):
        connect(first, second).send(weights(1), "x")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_partial_update_keeps_the_rest_and_states_the_digest_of_all(serve: Any, connect: Any, transport: str) -> None:
    server, part = serve(), {"scale": torch.tensor(7.0)}
    sender = connect(server, transport=transport)
    sender.send(part, partial=True)
    assert "weight_digest" not in server.bodies["/finish_weight_update"]  # of the others nothing is known
    sender.send(weights(1))
    sender.send(part, partial=True)
    assert equal(server.weights, weights(1) | part)
    assert server.bodies["/finish_weight_update"]["weight_digest"] == weight_digest(weights(1) | part)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_delta_sends_what_has_changed(serve: Any, connect: Any, transport: str) -> None:
    server, new = serve(), weights(1)
    sender = connect(server, transport=transport, keep_last=True)
    whole = sender.send(new, delta_base="last")  # nothing was sent before
    for index in (0, 39):
        new["layer.1.weight"][index, 3] += 1
        sent = sender.send(new, delta_base="last")
        assert equal(server.weights, new)
        assert (sent.num_tensors, sent.num_bytes) == (2, 8)
        assert sent.num_bytes < whole.num_bytes
    assert sender.send(new, delta_base="last").num_bytes == 8  # one element that stays
    assert equal(server.weights, new)


def test_a_delta_to_a_server_with_other_weights_becomes_a_whole_update(serve: Any, connect: Any, caplog: Any) -> None:
    server, new = serve(), weights(1)
    sender = connect(server, keep_last=True)
    sender.send(new)
    server.weights = weights(2)
    new["odd"][0] = 9.0
    sent = sender.send(new, delta_base="last")
    assert equal(server.weights, new)
    assert sent.num_bytes == sum(tensor.nbytes for tensor in new.values())
    assert "base_mismatch" in caplog.text


def test_a_delta_may_start_from_given_tensors_and_is_left_out_when_it_is_larger(serve: Any, connect: Any) -> None:
    server, new = serve(), weights()
    new["odd"][0] = 9.0
    assert connect(server).send(new, delta_base=weights()).num_bytes == 8
    assert equal(server.weights, new)
    sent = connect(server).send(weights(3), delta_base=new)
    assert sent.num_bytes == sum(tensor.nbytes for tensor in new.values())
    assert equal(server.weights, weights(3))


def test_a_delta_needs_what_it_starts_from(serve: Any, connect: Any) -> None:
    with pytest.raises(ValueError, match="needs a sender with keep_last=True"):
        connect(serve()).send(weights(), delta_base="last")
    with pytest.raises(ValueError, match='must be "last", a model or tensors'):
        connect(serve()).send(weights(), delta_base="first")
    with pytest.raises(RollspanError, match="'odd' has no counterpart"):
        connect(serve()).send(weights(), delta_base={**weights(), "odd": torch.zeros(4)})


class Model(nn.Module):
    _keep_in_fp32_modules_strict = ("gate",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.gate = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("derived", torch.ones(2), persistent=False)


class Compiled(nn.Module):
    """Wraps as torch.compile does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


@pytest.mark.parametrize("wrapped", ["not", "compiled", "in part"])
def test_a_model_is_sent_in_the_servers_dtype_tied_tensors_once(serve: Any, connect: Any, wrapped: str) -> None:
    model = Model()
    expected = {
        "steps": model.steps,
        "embed.weight": model.embed.weight.detach().to(torch.bfloat16),
        "gate.weight": model.gate.weight.detach(),
    }
    server = serve({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, dtype="bfloat16")
    if wrapped == "compiled":
        connect(server).send(Compiled(model))
    else:
        if wrapped == "in part":
            model.gate = Compiled(model.gate)  # type: ignore[assignment]
        connect(server).send(model)
    assert equal(server.weights, expected)


def test_the_dtype_can_be_chosen(serve: Any, connect: Any) -> None:
    server = serve(dtype="float32")
    connect(server, dtype=torch.bfloat16, digest=False).send(weights(1))
    assert equal(server.weights, {name: tensor.bfloat16().float() for name, tensor in weights(1).items()})


def test_a_mismatch_of_digests_tells_what_to_look_at(serve: Any, connect: Any) -> None:
    server = serve()
    with pytest.raises(WeightSendError, match="scripted digest_mismatch; where nothing was damaged"):
        connect(server, dtype=torch.bfloat16).send(weights(1))
    assert equal(server.weights, weights())


def test_a_tensor_that_is_not_whole_is_refused_before_anything_is_asked(serve: Any, connect: Any) -> None:
    server = serve()
    with pytest.raises(RollspanError, match=r"'x' .* is not whole in this process: gather it first"):
        connect(server).send({"x": torch.ones(1, device="meta")})
    assert not any("POST" in request for request in server.requests)


def test_an_update_that_somebody_else_has_open_is_left_alone(serve: Any, connect: Any) -> None:
    server = serve()
    server.staged = {}
    with pytest.raises(WeightSendError) as caught:
        connect(server).send(weights(1))
    assert caught.value.reason == "update_active"
    assert server.staged == {}


UPLOAD = "/weight_uploads/update-1/model.safetensors"


@pytest.mark.parametrize(
    ("transport", "path"),
    [
        *((transport, path) for transport in SERVER_SIDE for path in ("/finish_weight_update", "/server_info")),
        ("disk", "/update_weights"),
        ("shm", "/update_weights"),
        ("http", UPLOAD),
    ],
)
def test_a_lost_answer_is_asked_for_again_where_that_is_safe(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch, transport: str, path: str
) -> None:
    monkeypatch.setattr("rollspan.trainer.transfer.http.uuid.uuid4", lambda: type("Id", (), {"hex": "1"}))
    server = serve()
    server.lost.append(path)
    assert connect(server, transport=transport).send(weights(1), "x").weight_commits == (1,)
    assert equal(server.weights, weights(1))
    assert len([request for request in server.requests if request.endswith(path)]) == (5 if path == UPLOAD else 2)


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_what_cannot_be_repeated_is_an_error_and_aborted(serve: Any, connect: Any, path: str) -> None:
    server = serve()
    server.lost.append(path)
    with pytest.raises(WeightSendError) as caught:
        connect(server, transport="http").send(weights(1))
    assert caught.value.reason == "connection"
    assert server.staged is None
    assert len([request for request in server.requests if request.endswith(path)]) == 1
    assert server.requests[-1] == "POST /abort_weight_update"


def test_a_server_that_is_not_there_is_named() -> None:
    with (
        WeightSender("http://127.0.0.1:9", transport="shm", timeout=20.0) as sender,
        pytest.raises(WeightSendError, match=r"http://127\.0\.0\.1:9: .*/server_info"),
    ):
        sender.send(weights())


def test_the_key_goes_with_every_request(serve: Any, connect: Any) -> None:
    server = serve()
    connect(server, api_key="secret").send(weights(1))
    assert server.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_interrupt_aborts_the_update_and_the_next_one_succeeds(serve: Any, connect: Any, transport: str) -> None:
    server = serve()
    reached, main = threading.Event(), threading.get_ident()

    def hang() -> None:
        reached.set()
        threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
        gone.wait(20)
        raise RollspanError("gone", reason="update_aborted")

    gone = threading.Event()
    server.faults["POST /update_weights"] = [hang]
    sender = connect(server, transport=transport)
    try:
        with pytest.raises(KeyboardInterrupt):
            sender.send(weights(1), "x")
    finally:
        gone.set()
    assert reached.is_set()
    assert server.staged is None
    assert equal(server.weights, weights())
    assert sender.send(weights(1), "x").weight_commits == (1,)


def test_an_engine_that_gives_up_in_mid_broadcast_ends_the_sender(serve: Any, connect: Any) -> None:
    server = serve()
    sender = connect(server, transport="distributed", packed_bytes=1)
    sender.send(weights(1))

    def give_up() -> None:
        assert server.joined is not None
        server.joined.close()

    server.faults["POST /update_weights"] = [give_up]
    with pytest.raises(WeightSendError, match="call init_weight_transfer_engine"):
        sender.send(weights(2))
    assert sender.send(weights(2)).weight_commits == (2,)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_progress_goes_from_nothing_to_all(serve: Any, connect: Any, transport: str) -> None:
    seen: list[tuple[int, int]] = []
    connect(serve(), transport=transport, progress=lambda done, total: seen.append((done, total))).send(weights(1))
    total = sum(tensor.nbytes for tensor in weights().values())
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {entry[1] for entry in seen} == {total}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_drawn_in_place_on_a_terminal_only() -> None:
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        bar = TransferBar(out)
        for done in (0, 500_000_000, 1_000_000_000):
            bar(done, 1_000_000_000)
    assert "0.00/1.00 GB" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert file.getvalue() == ""


def test_written_directories_can_be_kept_and_wrong_options_are_refused(
    serve: Any, connect: Any, tmp_path: Path
) -> None:
    connect(serve(), transport="disk", keep=True).send(weights(1))
    (kept,) = tmp_path.iterdir()
    assert os.listdir(kept) == ["model.safetensors"]  # noqa: PTH208
    with pytest.raises(ValueError, match="transport must be one of disk, http"):
        WeightSender("http://127.0.0.1:9", transport="ftp")
    with pytest.raises(TypeError, match="directory"):
        WeightSender("http://127.0.0.1:9", transport="disk")
    with pytest.raises(ValueError, match="at least one server"):
        WeightSender([])
    with pytest.raises(ValueError, match="is not an http"):
        WeightSender("ftp://x", transport="shm")


def test_cuda_ipc_sends_nothing_that_is_not_on_a_gpu(serve: Any, connect: Any) -> None:
    server = serve()
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        connect(server, transport="cuda_ipc").send(weights(1))
    assert server.staged is None
