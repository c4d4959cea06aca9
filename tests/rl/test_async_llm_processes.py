"""AsyncLLM and its engine process: whoever dies, the other one reports or ends, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollspan import models
from rollspan.async_llm import AsyncLLM
from rollspan.errors import RollspanError
from rollspan.outputs import RequestOutput
from rollspan.sampling_params import RequestOutputKind, SamplingParams

PROMPT = [1, 4, 5, 13, 6, 7, 14]
LONG = SamplingParams(max_tokens=500, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
SECOND = 1.0
PATIENCE = 60.0

CHILD = """
import time
from rollspan.async_llm import AsyncLLM

llm = AsyncLLM(num_threads=1)
while not llm.socket_path.exists():
    time.sleep(0.01)
print(llm.socket_path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def runtime_directory(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private directories are made: empty again when nothing is left behind."""
    directory = socket_path.parent
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory


async def read_all(llm: AsyncLLM, started: asyncio.Event | None = None) -> list[RequestOutput]:
    outputs = []
    async for output in llm.generate(PROMPT, LONG):
        outputs.append(output)
        if started is not None:
            started.set()
    return outputs


async def test_a_killed_engine_is_a_typed_error_on_every_open_and_every_later_call(runtime_directory: Path) -> None:
    async with AsyncLLM(num_threads=1) as llm:
        await llm.check_health()
        hello = await llm.start()
        assert hello.model.name == models.DEFAULT
        assert (await llm.get_weight_version(), await llm.get_weight_commit()) == ("default", 0)
        await llm.pause_generation("keep")
        frozen = [asyncio.create_task(read_all(llm)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await llm.is_paused()
        os.kill(hello.pid, signal.SIGKILL)
        killed = time.monotonic()
        for outcome in await asyncio.gather(*frozen, return_exceptions=True):
            assert isinstance(outcome, RollspanError)
            assert outcome.reason == "engine_dead"
        assert time.monotonic() - killed < SECOND
        for call in (llm.check_health(), llm.resume_generation(), read_all(llm)):
            with pytest.raises(RollspanError) as caught:
                await call
            assert caught.value.reason == "engine_dead"
        assert await llm.abort() == 0
    assert left_behind(runtime_directory) == []


def test_a_model_that_does_not_exist_is_refused_before_anything_starts(runtime_directory: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        AsyncLLM("no-such-model")
    with pytest.raises(RollspanError, match="max_num_seqs"):
        AsyncLLM(max_num_seqs=0)
    assert left_behind(runtime_directory) == []


def test_a_killed_program_takes_its_engine_along_even_while_that_loads_its_model(runtime_directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout as lines, socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE)
        link.connect(lines.readline().strip())
        child.kill()
        killed = time.monotonic()
        # The end of a link of our own is the end of the engine process.
        assert received(link) == b""
        assert time.monotonic() - killed < SECOND
    child.wait()
    assert left_behind(runtime_directory) == []


def received(link: socket.socket) -> bytes:
    """What comes next; nothing when the peer has ended. A connection that nobody had accepted yet is reset then."""
    try:
        return link.recv(1)
    except ConnectionResetError:
        return b""


def left_behind(directory: Path) -> list[Path]:
    return list(directory.iterdir())
