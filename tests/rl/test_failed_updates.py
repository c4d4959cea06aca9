"""An update that fails changes nothing: not a token, not the label, not the commit number; and the next one works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from counting_model import HEAD, Checkpoints, tensors, write
from counting_oracle import CountingOracle, versions
from safetensors.numpy import save_file

from rollspan.errors import RollspanError
from support.drivers import Driver, Order
from support.meter import Running

pytestmark = pytest.mark.asyncio(loop_scope="session")

FILE = "model.safetensors"
Breaker = Callable[[Path], None]


@pytest_asyncio.fixture(loop_scope="session")
async def oracle(counting: Driver, checkpoints: Checkpoints) -> CountingOracle:
    """The counting model emits token 1."""
    return await CountingOracle.begin(counting, checkpoints)


def without_a_tensor(directory: Path) -> None:
    values = tensors(2)
    del values["transformer.h.0.ln_2.bias"]
    write(directory, values)


def with_a_wrong_shape(directory: Path) -> None:
    write(directory, tensors(2) | {HEAD: tensors(2)[HEAD][:-1]})


def with_a_wrong_dtype(directory: Path) -> None:
    write(directory, tensors(2) | {HEAD: tensors(2)[HEAD].astype(np.int64)})


def with_an_unknown_name(directory: Path) -> None:
    write(directory, tensors(2) | {"transformer.h.1.ln_1.weight": np.ones(8, np.float32)})


def cut_short(directory: Path) -> None:
    file = write(directory, tensors(2)) / FILE
    file.write_bytes(file.read_bytes()[:-100])


def of_garbage(directory: Path) -> None:
    (write(directory, tensors(2)) / FILE).write_bytes(b"\xff" * 1000)


def empty(directory: Path) -> None:
    (write(directory, tensors(2)) / FILE).write_bytes(b"")


def without_weights(directory: Path) -> None:
    (write(directory, tensors(2)) / FILE).unlink()


def with_pickled_weights_only(directory: Path) -> None:
    without_weights(directory)
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def with_a_tensor_in_two_files(directory: Path) -> None:
    (write(directory, tensors(2)) / FILE).rename(directory / "a.safetensors")
    shutil.copy(directory / "a.safetensors", directory / "b.safetensors")


def with_an_index_that_promises_more(directory: Path) -> None:
    write(directory, tensors(2))
    weight_map = dict.fromkeys([*tensors(2), "transformer.extra"], FILE)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def with_an_index_out_of_the_directory(directory: Path) -> None:
    write(directory, tensors(2))
    weight_map = dict.fromkeys(tensors(2), "../emits-1/model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BREAKERS: list[Breaker] = [
    without_a_tensor,
    with_a_wrong_shape,
    with_a_wrong_dtype,
    with_an_unknown_name,
    cut_short,
    of_garbage,
    empty,
    without_weights,
    with_pickled_weights_only,
    with_a_tensor_in_two_files,
    with_an_index_that_promises_more,
    with_an_index_out_of_the_directory,
]


async def send_and_finish(driver: Driver, info: dict[str, object]) -> None:
    await driver.send_weights(info)
    await driver.finish_update("never")


async def fails(oracle: CountingOracle, info: dict[str, object], reason: str = "weights_invalid") -> str:
    """Tries the update with a request running; nothing changes. Returns the message."""
    driver, label, commit = oracle.driver, oracle.label, oracle.commit
    running = Running(driver, Order([3], 4000, stream=True))
    await running.reach(3)
    await driver.start_update()
    with pytest.raises(RollspanError) as caught:
        await send_and_finish(driver, info)
    assert caught.value.reason == reason
    assert await driver.weight_version() == label
    rollout = await running.stop()
    oracle.check(rollout)
    assert versions(rollout.only) == [label]
    after = await oracle.update(2)
    assert oracle.commit == commit + 1
    assert versions((await driver.generate(Order([3], 2))).only) == [after]
    return caught.value.message


@pytest.mark.parametrize("breaker", BREAKERS, ids=lambda breaker: breaker.__name__.replace("_", "-"))
async def test_a_broken_checkpoint(
    oracle: CountingOracle, checkpoints: Checkpoints, breaker: Breaker, request: pytest.FixtureRequest
) -> None:
    directory = checkpoints.root / f"broken-{breaker.__name__}-{oracle.driver.name}"
    breaker(directory)
    try:
        message = await fails(oracle, {"path": str(directory)})
    finally:
        shutil.rmtree(directory)
    assert message


@pytest.mark.parametrize(
    "path",
    ["/etc", "..", "emits-1/../..", "nowhere", "emits-1/config.json", "", "a\0b", 5, None],
    ids=lambda path: repr(path),
)
async def test_a_path_that_is_no_directory_under_the_root(oracle: CountingOracle, path: object) -> None:
    await fails(oracle, {"path": path})


async def test_a_link_out_of_the_root(oracle: CountingOracle, checkpoints: Checkpoints, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", tensors(2))
    link = checkpoints.root / f"link-{oracle.driver.name}"
    link.symlink_to(outside)
    try:
        await fails(oracle, {"path": str(link)})
    finally:
        link.unlink()


async def test_a_field_without_meaning_is_refused_by_name(oracle: CountingOracle) -> None:
    info: dict[str, object] = {"path": "emits-2", "names": ["lm_head.weight"]}
    assert "names" in await fails(oracle, info, "unsupported_field")


async def test_messages_name_the_tensor_at_fault(oracle: CountingOracle, checkpoints: Checkpoints) -> None:
    directory = checkpoints.root / f"named-{oracle.driver.name}"
    for breaker, name in ((without_a_tensor, "ln_2.bias"), (with_a_wrong_shape, HEAD), (with_an_unknown_name, "h.1")):
        breaker(directory)
        assert name in await fails(oracle, {"path": str(directory)})
        shutil.rmtree(directory)
        await oracle.update(1)


async def test_calls_out_of_order_are_conflicts(oracle: CountingOracle) -> None:
    driver = oracle.driver
    for call in (driver.send_weights({"path": "emits-1"}), driver.finish_update("x")):
        with pytest.raises(RollspanError) as caught:
            await call
        assert caught.value.reason == "no_update_active"
    await driver.start_update()
    with pytest.raises(RollspanError) as caught:
        await driver.start_update()
    assert caught.value.reason == "update_active"
    await driver.send_weights({"path": "emits-1"})
    await oracle.finish(1)


async def test_finishing_without_any_weights_drops_the_update(oracle: CountingOracle) -> None:
    driver, label = oracle.driver, oracle.label
    await driver.start_update()
    with pytest.raises(RollspanError) as caught:
        await driver.finish_update("never")
    assert caught.value.reason == "weights_invalid"
    assert await driver.weight_version() == label
    await oracle.update(2)


@pytest.mark.parametrize("label", ["", "a\nb", "x" * 257])
async def test_a_bad_label_leaves_the_update_open(oracle: CountingOracle, label: str) -> None:
    driver = oracle.driver
    await driver.start_update()
    await driver.send_weights({"path": "emits-2"})
    with pytest.raises(RollspanError) as caught:
        await driver.finish_update(label)
    assert caught.value.reason == "invalid_label"
    after = await oracle.finish(2)
    assert versions((await driver.generate(Order([3], 2))).only) == [after]


async def test_weights_that_were_read_but_not_finished_change_no_token(oracle: CountingOracle) -> None:
    driver, before = oracle.driver, oracle.label
    running = Running(driver, Order([3], 4000, stream=True))
    await running.reach(3)
    await driver.start_update()
    await driver.send_weights({"path": "emits-2"})
    rollout = await running.stop()
    oracle.check(rollout)
    assert versions(rollout.only) == [before]
    await oracle.finish(2)


async def test_an_update_may_come_in_parts_and_in_shards(oracle: CountingOracle, checkpoints: Checkpoints) -> None:
    driver, values = oracle.driver, tensors(2)
    names = sorted(values)
    parts = [{name: values[name] for name in names[start::2]} for start in (0, 1)]
    directories = [write(checkpoints.root / f"part-{number}-{driver.name}", part) for number, part in enumerate(parts)]
    await driver.start_update()
    for directory in directories:
        await driver.send_weights({"path": str(directory)})
    await oracle.finish(2)
    oracle.check(await driver.generate(Order([3], 3)))
    sharded = checkpoints.root / f"sharded-{driver.name}"
    sharded.mkdir()
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(part, sharded / file)
        weight_map |= dict.fromkeys(part, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    await driver.start_update()
    await driver.send_weights({"path": str(sharded)})
    await oracle.finish(2)
    oracle.check(await driver.generate(Order([3], 3)))


async def test_after_an_update_its_files_may_be_overwritten(oracle: CountingOracle, checkpoints: Checkpoints) -> None:
    """A trainer writes its next checkpoint over the last one; what is served must not follow it."""
    directory = write(checkpoints.root / f"overwritten-{oracle.driver.name}", tensors(2))
    await oracle.driver.start_update()
    await oracle.driver.send_weights({"path": str(directory)})
    overwrite = (checkpoints.emitting(5) / FILE).read_bytes()
    with (directory / FILE).open("r+b") as file:
        file.write(overwrite)
    await oracle.finish(2)
    rollout = await oracle.driver.generate(Order([3], 3))
    oracle.check(rollout)
    assert rollout.only.token_ids == [2, 2, 2]
