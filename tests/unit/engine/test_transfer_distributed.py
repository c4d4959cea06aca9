"""Broadcasts between a trainer and an engine: whole, packed, repeated, cut short from either side."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.transfers import context, every_dtype, raises, same
from rollspan.process_group import BroadcastGroup, GroupError, listen
from rollspan.weights import transfer
from rollspan.weights.transfer.announced import Announced, packets
from rollspan.weights.transfer.base import Transport

CPU = torch.device("cpu")
HOST = "127.0.0.1"
Tensors = dict[str, torch.Tensor]

TRAINER = """
import sys, time, torch
from rollspan.process_group import BroadcastGroup, listen
listener = listen("127.0.0.1")
print(listener.getsockname()[1], flush=True)
port = listener.getsockname()[1]
group = BroadcastGroup("127.0.0.1", port, 0, 2, device=torch.device("cpu"), timeout=60, listener=listener)
group.wait(group.broadcast(torch.arange(1000.0)))
print("sent", flush=True)
time.sleep(60)
"""


class Pair:
    """A trainer's group and an engine's transport that have met."""

    def __init__(self, parameters: Tensors, timeout: float = 20.0, **init: Any) -> None:
        listener = listen(HOST)
        port = listener.getsockname()[1]
        self.engine = transfer.create("gloo", context(parameters, timeout=timeout))
        info = {"master_address": HOST, "master_port": port, "world_size": 2, **init}
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(self.engine.init, info)
            self.trainer = BroadcastGroup(HOST, port, 0, 2, device=CPU, timeout=timeout, listener=listener)
            joining.result()

    def send(self, *buffers: torch.Tensor) -> threading.Thread:
        def run() -> None:
            for buffer in buffers:
                self.trainer.wait(self.trainer.broadcast(buffer))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def close(self) -> None:
        self.engine.close()
        self.trainer.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(parameters: Tensors, timeout: float = 20.0, **init: Any) -> Pair:
        made.append(Pair(parameters, timeout, **init))
        return made[-1]

    yield make
    for each in made:
        each.close()


def announce(tensors: Tensors) -> dict[str, list[Any]]:
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_every_dtype_arrives_to_the_bit_one_by_one(pair: Callable[..., Pair]) -> None:
    whole = every_dtype()
    both = pair(whole)
    sending = both.send(*map(flat, whole.values()))
    assert same(dict(both.engine.receive(announce(whole))), whole)
    sending.join()


@pytest.mark.parametrize("limit", [1, 40, 100, 1 << 30])
def test_every_dtype_arrives_to_the_bit_packed(pair: Callable[..., Pair], limit: int) -> None:
    whole = every_dtype()
    both = pair(whole, packed=True, packed_buffer_size_bytes=limit, packed_num_buffers=2)
    buffers: list[list[torch.Tensor]] = [[]]
    for tensor in whole.values():
        if sum(part.nbytes for part in buffers[-1]) > limit:
            buffers.append([])
        buffers[-1].append(flat(tensor))
    sending = both.send(*map(torch.cat, buffers))
    assert same(dict(both.engine.receive(announce(whole))), whole)
    sending.join()


def test_the_next_update_may_leave_out_what_is_as_before(pair: Callable[..., Pair]) -> None:
    both = pair({"a": torch.zeros(4)})
    with raises("weights_invalid", "update_info.names", "required in the first update"):
        list(both.engine.receive({}))
    for value in (1.0, 2.0):
        whole = {"a": torch.full((4,), value)}
        sending = both.send(whole["a"])
        assert same(dict(both.engine.receive(announce(whole) if value == 1.0 else {"names": []})), whole)
        sending.join()


@given(sizes=st.lists(st.integers(0, 50), max_size=20), limit=st.integers(1, 100))
def test_packets_hold_all_tensors_in_order_and_are_over_the_limit_only_by_their_last(
    sizes: list[int], limit: int
) -> None:
    tensors = [Announced(str(index), torch.uint8, (size,)) for index, size in enumerate(sizes)]
    parts = packets(tensors, limit)
    assert [tensor for part in parts for tensor in part] == tensors
    for part in parts:
        assert sum(tensor.nbytes for tensor in part[:-1]) <= limit
    for part in parts[:-1]:
        assert sum(tensor.nbytes for tensor in part) > limit


def ends(action: Callable[[], Any], reason: str, message: str) -> None:
    """Asserts that the call fails like this, and not by a timeout of the group."""
    start = time.monotonic()
    with raises(reason, None, message):
        action()
    assert time.monotonic() - start < 15.0


def test_cancel_ends_a_blocked_broadcast_on_both_sides_for_good(pair: Callable[..., Pair]) -> None:
    whole = {"a": torch.zeros(100), "b": torch.zeros(5_000_000)}
    both = pair(whole, timeout=60.0)
    receiving = both.engine.receive(announce(whole))
    sending = both.send(whole["a"])
    next(receiving)
    sending.join()
    timer = threading.Timer(0.2, both.engine.cancel)
    timer.start()
    ends(lambda: list(receiving), "update_aborted", "aborted")
    with pytest.raises(GroupError, match="Connection closed by peer"):
        both.trainer.wait(both.trainer.broadcast(whole["b"]))
    with raises("transfer_failed", "update_info.backend", "call init_weight_transfer_engine"):
        list(both.engine.receive(announce(whole)))


def test_a_receiver_that_gives_up_in_the_middle_ends_the_sender_too(pair: Callable[..., Pair]) -> None:
    whole = {name: torch.zeros(5_000_000) for name in "abc"}
    both = pair(whole, timeout=60.0)
    receiving = both.engine.receive(announce(whole))
    work = both.trainer.broadcast(whole["a"])
    next(receiving)
    both.trainer.wait(work)
    work = both.trainer.broadcast(whole["b"])
    receiving.close()  # type: ignore[attr-defined]
    with pytest.raises(GroupError):
        both.trainer.wait(both.trainer.broadcast(whole["c"]))


def test_a_trainer_that_aborts_is_told_from_one_that_is_silent(pair: Callable[..., Pair]) -> None:
    whole = {"a": torch.zeros(100)}
    both = pair(whole, timeout=60.0)
    timer = threading.Timer(0.2, both.trainer.abort)
    timer.start()
    ends(lambda: list(both.engine.receive(announce(whole))), "transfer_failed", "Connection closed by peer")
    silent = pair(whole, timeout=0.5)
    ends(lambda: list(silent.engine.receive(announce(whole))), "transfer_failed", "the broadcast failed")


def test_a_trainer_that_is_killed_in_mid_transfer_is_an_error_at_once() -> None:
    whole = {"a": torch.arange(1000.0), "b": torch.zeros(1_000_000)}
    engine = transfer.create("distributed", context(whole, timeout=60.0))
    with subprocess.Popen([sys.executable, "-c", TRAINER], stdout=-1) as trainer:
        try:
            assert trainer.stdout is not None
            port = int(trainer.stdout.readline())
            engine.init({"master_address": HOST, "master_port": port, "world_size": 2})
            receiving = engine.receive(announce(whole))
            assert same(dict([next(receiving)]), {"a": whole["a"]})
            assert trainer.stdout.readline() == b"sent\n"
            timer = threading.Timer(0.2, trainer.send_signal, (signal.SIGKILL,))
            timer.start()
            ends(lambda: list(receiving), "transfer_failed", "the broadcast failed: Connection closed by peer")
        finally:
            trainer.kill()
    engine.close()


@pytest.mark.parametrize("missing", ["store", "member"])
def test_joining_can_be_cancelled_and_ends_by_itself(missing: str) -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    store: Any = None
    if missing == "member":
        store = torch.distributed.TCPStore(HOST, port, is_master=True, wait_for_workers=False)
    info = {"master_address": HOST, "master_port": port, "world_size": 3}
    message = "nobody listens at" if missing == "store" else "not all of the 3 members of the group came"
    engine = transfer.create("distributed", context(timeout=0.5))
    ends(lambda: engine.init(info), "transfer_failed", message)
    engine = transfer.create("distributed", context(timeout=60.0))
    timer = threading.Timer(0.3, engine.cancel)
    timer.start()
    ends(lambda: engine.init(info), "update_aborted", "aborted")
    del store


def joined() -> Transport:
    return transfer.create("distributed", context({"a": torch.zeros(4)}))


INIT = {"master_address": HOST, "master_port": 1, "world_size": 2}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"master_address": None}, "master_address"),
        ({"master_address": "a\nb"}, "master_address"),
        ({"master_address": "x" * 256}, "master_address"),
        ({"master_port": 0}, "master_port"),
        ({"master_port": "1"}, "master_port"),
        ({"world_size": 1}, "world_size"),
        ({"world_size": None}, "world_size"),
        ({"world_size": True}, "world_size"),
        ({"rank_offset": 0}, "rank_offset"),
        ({"rank_offset": 2}, "rank_offset"),
        ({"packed": 1}, "packed"),
        ({"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes"),
        ({"packed_num_buffers": "2"}, "packed_num_buffers"),
    ],
)
def test_a_field_of_init_that_is_wrong_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with raises("weights_invalid", f"init_info.{field}", f"init_info.{field} must be "):
        joined().init(INIT | change)


def test_an_engine_without_a_rank_of_its_own_and_other_ways_to_meet_are_refused() -> None:
    second = transfer.create("nccl", type(context())(None, None, CPU, 1, 2, 20.0, {}))
    with raises("weights_invalid", "init_info.world_size", "engine 1 would have rank 2"):
        second.init(INIT)
    with raises("unsupported_field", "init_info.nccl_unique_id_b64", "give master_address and master_port"):
        joined().init({"nccl_unique_id_b64": "AAAA", "world_size": 2})
    with raises("unsupported_field", "init_info.group", "known: master_address"):
        joined().init(INIT | {"group": "x"})


GOOD = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[4]]}


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"names": "a"}, "names", "must be a list"),
        ({"names": [1]}, "names", "names[0] must be another string, got 1"),
        ({"names": ["a", "a"], "dtype_names": ["int8"] * 2, "shapes": [[1]] * 2}, "names", "names[1] must be another"),
        ({"dtype_names": []}, "dtype_names", "has 0 entries, update_info.names 1"),
        ({"dtype_names": ["F32"]}, "dtype_names", "must be one of bool, "),
        ({"dtype_names": [["float32"]]}, "dtype_names", "must be one of bool, "),
        ({"shapes": [[4], [4]]}, "shapes", "has 2 entries"),
        ({"shapes": [4]}, "shapes", "shapes[0] must be a list of sizes, got 4"),
        ({"shapes": [[-4]]}, "shapes", "must be a list of sizes"),
        ({"shapes": [[True]]}, "shapes", "must be a list of sizes"),
        ({"shapes": [[2**40]]}, "shapes", "an update of this model has at most"),
        ({"shapes": [[0, 2**40, 2**40]]}, "shapes", "must be a list of sizes"),
        ({"packed": "yes"}, "packed", "must be true or false"),
    ],
)
def test_a_field_of_update_that_is_wrong_is_refused_by_name(
    pair: Callable[..., Pair], change: dict[str, Any], field: str, message: str
) -> None:
    both = pair({"a": torch.zeros(4)})
    with raises("weights_invalid", f"update_info.{field}", message):
        list(both.engine.receive(GOOD | change))
    sending = both.send(torch.ones(4))  # nothing was received, so the group is as it was
    assert same(dict(both.engine.receive(GOOD)), {"a": torch.ones(4)})
    sending.join()


def test_an_update_before_init_is_refused() -> None:
    engine = joined()
    assert engine.needs_init
    with raises("transfer_failed", "update_info.backend", "call init_weight_transfer_engine"):
        list(engine.receive(GOOD))


def test_the_global_group_stays_untouched(pair: Callable[..., Pair]) -> None:
    pair({"a": torch.zeros(4)})
    assert not torch.distributed.is_initialized()
