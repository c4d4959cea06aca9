"""AsyncLLM over a scripted engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from rollspan import launcher
from rollspan.async_llm import AsyncLLM
from rollspan.client.framed import FramedClient
from rollspan.config import EngineConfig
from rollspan.errors import RollspanError
from rollspan.output_processor import RequestFailedError
from rollspan.outputs import RequestOutput
from rollspan.protocol.messages import EngineError, FinishReason
from rollspan.sampling_params import RequestOutputKind, SamplingParams
from support.fake_engine import FakeEngine, RefusalError, output

PATIENCE = 10.0
DELTA = SamplingParams(output_kind=RequestOutputKind.DELTA)
FINAL = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.fixture
async def engine(socket_path: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(socket_path) as started:
        yield started


@pytest.fixture
async def llm(engine: FakeEngine) -> AsyncIterator[AsyncLLM]:
    async with await AsyncLLM.from_client(await FramedClient.connect(engine.path, PATIENCE)) as started:
        yield started


async def collect(llm: AsyncLLM, params: SamplingParams, request_id: str | None = None) -> list[RequestOutput]:
    return [item async for item in llm.generate([1, 2], params, request_id)]


async def test_outputs_stream_as_they_come(engine: FakeEngine, llm: AsyncLLM) -> None:
    stream = llm.generate([1, 2], DELTA, "mine")
    first = asyncio.ensure_future(anext(stream))
    name = (await engine.requests.get()).request_id
    engine.step(output(name, 5, admission=("A", 0)))
    assert (await first).outputs[0].token_ids == [5]
    engine.step(output(name, 6, finish=FinishReason.LENGTH), version="B", commit=1)
    last = await anext(stream)
    assert last.request_id == "mine"
    assert last.outputs[0].weight_commits == [{"commit": 0, "start": 0, "end": 1}, {"commit": 1, "start": 1, "end": 2}]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert engine.aborts.empty()
    assert llm.open_requests == 0


async def test_leaving_the_iterator_aborts_every_sequence(engine: FakeEngine, llm: AsyncLLM) -> None:
    stream = llm.generate([1, 2], SamplingParams(n=2, output_kind=RequestOutputKind.DELTA))
    first = asyncio.ensure_future(anext(stream))
    names = [(await engine.requests.get()).request_id for _ in range(2)]
    engine.step(output(names[0], 5))
    await first
    await stream.aclose()
    assert await engine.aborts.get() == names
    assert llm.open_requests == 0


async def test_a_cancelled_reader_aborts_its_request(engine: FakeEngine, llm: AsyncLLM) -> None:
    reader = asyncio.create_task(collect(llm, FINAL))
    name = (await engine.requests.get()).request_id
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await engine.aborts.get() == [name]


async def test_abort_answers_at_once_with_what_there_is(engine: FakeEngine, llm: AsyncLLM) -> None:
    stream = llm.generate([1, 2], DELTA, "mine")
    first = asyncio.ensure_future(anext(stream))
    name = (await engine.requests.get()).request_id
    engine.step(output(name, 5))
    await first
    assert await llm.abort("mine") == 1
    last = await anext(stream)
    assert (last.outputs[0].finish_reason, last.outputs[0].token_ids) == ("abort", [])
    assert last.outputs[0].weight_versions == [{"version": "A", "start": 0, "end": 1}]
    assert await engine.aborts.get() == [name]
    assert await llm.abort(["mine", "unknown"]) == 0


async def test_abort_without_ids_aborts_all(engine: FakeEngine, llm: AsyncLLM) -> None:
    readers = [asyncio.create_task(collect(llm, FINAL)) for _ in range(3)]
    for _ in readers:
        await engine.requests.get()
    assert await llm.abort() == 3
    for outputs in await asyncio.gather(*readers):
        assert outputs[-1].outputs[0].finish_reason == "abort"


async def test_a_refused_request_raises_the_engines_reason(engine: FakeEngine, llm: AsyncLLM) -> None:
    reader = asyncio.create_task(collect(llm, FINAL))
    name = (await engine.requests.get()).request_id
    error = EngineError("engine_paused", "generation is paused", retryable=True)
    engine.step(output(name, finish=FinishReason.ERROR, error=error))
    with pytest.raises(RollspanError, match="paused") as caught:
        await reader
    assert caught.value.reason == "engine_paused"


async def test_a_failed_sequence_aborts_its_siblings_in_the_engine(engine: FakeEngine, llm: AsyncLLM) -> None:
    reader = asyncio.create_task(collect(llm, SamplingParams(n=2)))
    first, second = [(await engine.requests.get()).request_id for _ in range(2)]
    engine.step(output(first, 4), output(second, 5))
    engine.step(output(first, finish=FinishReason.ERROR, error=EngineError("nan_logits", "not finite")))
    with pytest.raises(RequestFailedError, match="not finite") as caught:
        await reader
    assert caught.value.partial_output is not None
    assert [completion.token_ids for completion in caught.value.partial_output.outputs] == [[4], [5]]
    assert await engine.aborts.get() == [second]


async def test_bad_arguments_never_reach_the_engine(engine: FakeEngine, llm: AsyncLLM) -> None:
    with pytest.raises(RollspanError, match="token_ids"):
        await anext(llm.generate([], FINAL))
    assert engine.requests.empty()


async def test_two_open_requests_cannot_share_an_id(engine: FakeEngine, llm: AsyncLLM) -> None:
    reader = asyncio.create_task(collect(llm, FINAL, "same"))
    await engine.requests.get()
    with pytest.raises(RollspanError, match="already in use"):
        await collect(llm, FINAL, "same")
    await llm.abort("same")
    await reader


async def test_the_death_of_the_engine_reaches_every_reader_and_every_later_call(
    engine: FakeEngine, llm: AsyncLLM
) -> None:
    await llm.check_health()
    readers = [asyncio.create_task(collect(llm, FINAL)) for _ in range(3)]
    for _ in readers:
        await engine.requests.get()
    engine.hang_up()
    for outcome in await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), PATIENCE):
        assert isinstance(outcome, RollspanError)
        assert outcome.reason == "engine_dead"
    for call in (llm.check_health(), collect(llm, FINAL), llm.get_weight_version()):
        with pytest.raises(RollspanError) as caught:
            await call
        assert caught.value.reason == "engine_dead"


async def test_control_calls_are_the_engines_methods(engine: FakeEngine, llm: AsyncLLM) -> None:
    called: list[tuple[object, ...]] = []
    results: dict[str, object] = {
        "pause_generation": None,
        "resume_scheduler": None,
        "is_scheduler_paused": True,
        "start_weight_update": None,
        "update_weights": None,
        "finish_weight_update": {"weight_version": "7", "weight_commit": 1},
        "get_weight_version": "7",
        "get_weight_commit": 1,
        "set_weight_version": None,
        "reset_prefix_cache": True,
        "server_info": {"runner": "captured"},
    }

    def answer(method: str, *args: object) -> object:
        called.append((method, *args))
        return results[method]

    engine.answers = {method: partial(answer, method) for method in results}
    await llm.pause_generation("keep", clear_cache=False)
    assert await llm.is_paused()
    await llm.start_weight_update()
    await llm.update_weights({"path": "/weights"})
    assert await llm.finish_weight_update(7) == {"weight_version": "7", "weight_commit": 1}
    assert await llm.get_weight_version() == "7"
    assert await llm.get_weight_commit() == 1
    assert await llm.update_weight_version("eight") == "eight"
    assert await llm.reset_prefix_cache(reset_running_requests=True)
    assert await llm.server_info() == {"runner": "captured"}
    await llm.resume_generation()
    assert called == [
        ("pause_generation", "keep", False),
        ("is_scheduler_paused",),
        ("start_weight_update",),
        ("update_weights", {"path": "/weights"}),
        ("finish_weight_update", "7"),
        ("get_weight_version",),
        ("get_weight_commit",),
        ("set_weight_version", "eight"),
        ("reset_prefix_cache", True),
        ("server_info",),
        ("resume_scheduler",),
    ]


async def test_a_label_is_checked_before_the_engine_is_asked(llm: AsyncLLM) -> None:
    with pytest.raises(RollspanError, match="weight_version must be a string of 1 to 256 bytes"):
        await llm.finish_weight_update("")
    with pytest.raises(RollspanError, match="new_version"):
        await llm.update_weight_version("a\nb")


async def test_a_refused_update_raises_with_its_reason(engine: FakeEngine, llm: AsyncLLM) -> None:
    def refuse(info: object) -> None:
        raise RefusalError("lm_head.weight is missing", "weights_invalid")

    engine.answers["update_weights"] = refuse
    with pytest.raises(RollspanError, match=r"lm_head\.weight is missing") as caught:
        await llm.update_weights({"path": "/weights"})
    assert caught.value.reason == "weights_invalid"


async def test_shutdown_ends_open_requests_with_what_they_have(engine: FakeEngine, llm: AsyncLLM) -> None:
    stream = llm.generate([1, 2], DELTA)
    first = asyncio.ensure_future(anext(stream))
    engine.step(output((await engine.requests.get()).request_id, 5))
    await first
    await llm.shutdown()
    assert (await anext(stream)).outputs[0].finish_reason == "abort"
    await asyncio.wait_for(engine.closed.wait(), PATIENCE)
    with pytest.raises(RollspanError) as caught:
        await llm.get_weight_version()
    assert caught.value.reason == "shutting_down"


async def test_an_observer_sees_every_batch_after_it_was_processed(engine: FakeEngine, llm: AsyncLLM) -> None:
    seen: list[tuple[str | None, int]] = []
    llm.set_outputs_observer(lambda message: seen.append((message.weight_version, llm.open_requests)))
    reader = asyncio.create_task(collect(llm, FINAL))
    name = (await engine.requests.get()).request_id
    engine.step(output(name, 5, finish=FinishReason.STOP), version="B")
    await reader
    assert seen == [("B", 0)]


STILLBORN = """
import socket, sys
from rollspan.protocol import codec
from rollspan.protocol.framing import FrameKind, encode_frame
from rollspan.protocol.messages import DeadNotice

with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    link = listener.accept()[0]
    link.recv(4096)
    link.sendall(encode_frame(FrameKind.DEAD, codec.encode_dead(DeadNotice("weights_invalid", "no such tensor"))))
    sys.stdin.read()
"""


@pytest.mark.parametrize(("program", "message"), [(STILLBORN, "no such tensor"), ("", "ended before it was ready")])
async def test_an_engine_that_cannot_start_says_why_and_leaves_nothing_behind(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    def start(config: EngineConfig, directory: Path) -> launcher.EngineProcess:
        path = launcher.engine_socket(directory, 0)
        return launcher.EngineProcess(launcher.start_process([sys.executable, "-c", program, str(path)]), path)

    runtime_directory = socket_path.parent
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_directory))
    monkeypatch.setattr(launcher, "start_engine", start)
    llm = AsyncLLM(num_threads=1)
    assert llm.socket_path is not None
    for _ in range(2):
        with pytest.raises(RollspanError, match=message) as caught:
            await llm.start()
        assert caught.value.reason == "engine_dead"
    await llm.shutdown()
    assert not any(os.scandir(runtime_directory))
    with pytest.raises(RollspanError, match="shut down"):
        await llm.start()


def test_importing_the_package_and_the_client_side_loads_no_torch() -> None:
    code = "import sys, rollspan, rollspan.async_llm; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_alone_loads_none_of_it() -> None:
    code = "import sys, rollspan; print([name for name in sys.modules if name.startswith('rollspan.')])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
