"""Memory of received weights: what an update leaves in force keeps no larger block alive."""

from __future__ import annotations

import gc
from pathlib import Path

from safetensors.torch import load_file

from engine.harness import Engine
from engine.models import TinyModel
from rollspan.trainer.transfer.shm import ShmOutgoing


def mapped_blocks() -> int:
    """Mappings of memfds that weights came in."""
    gc.collect()
    return sum("memfd:rollspan-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_weights_that_partial_updates_leave_out_do_not_keep_the_memory_of_earlier_ones(
    llama: TinyModel, other: TinyModel
) -> None:
    engine = Engine(llama)
    before = mapped_blocks()
    names = list(load_file(llama.path / "model.safetensors"))
    for number in range(6):
        source = load_file((other if number % 2 else llama).path / "model.safetensors")
        sent = {name: source[name] for name in names[number:]}
        with ShmOutgoing().offer(sent, [None], lambda _: None) as offer:  # type: ignore[list-item]
            (info,) = offer.infos
            engine.result_of("start_weight_update")
            engine.result_of("update_weights", {"backend": "shm", **info})
            engine.result_of("finish_weight_update", None, {"partial": True})
        del source, sent, offer
    answer = engine.result_of("check_weights", "checksum", None)
    engine.result_of("get_weight_digest")
    assert len(answer["checksums"]) > 6
    assert mapped_blocks() - before <= 1
