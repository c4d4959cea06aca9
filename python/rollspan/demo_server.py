"""``rollspan serve`` as the demo's child process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence

START_SECONDS = 120.0
STOP_SECONDS = 10.0
_KEPT_LOG_LINES = 20


class DemoError(Exception):
    """The demo cannot go on; the message is for the user."""


class Server:
    """``rollspan serve`` as a child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._log: list[str] = []
        self._reading = asyncio.create_task(self._read_log())

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> Server:
        command = [
            sys.executable,
            "-m",
            "rollspan.cli",
            "serve",
            *arguments,
            "--port",
            "0",
            "--events",
            "--watch-stdin",
        ]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe))

    async def wait_ready(self) -> str:
        """The server's URL, once it answers requests.

        Raises:
            DemoError: it ended, or wasn't ready in time.
        """
        try:
            return await asyncio.wait_for(self._ready_url(), START_SECONDS)
        except asyncio.TimeoutError:
            raise DemoError(f"the server was not ready within {START_SECONDS:.0f} s:\n{self._last_words()}") from None

    async def _ready_url(self) -> str:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                return str(event["url"])
        await self._reading
        await self._process.wait()
        raise DemoError(f"the server did not start:\n{self._last_words()}")

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._log.append(line.decode(errors="replace").rstrip())
            del self._log[:-_KEPT_LOG_LINES]

    def _last_words(self) -> str:
        return "\n".join(f"  {line}" for line in self._log)

    async def stop(self) -> None:
        """End the server and wait for it.

        Raises:
            DemoError: it ended badly, or had to be killed.
        """
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except asyncio.TimeoutError:
            self._process.kill()
            code = await self._process.wait()
        await self._reading
        if code != 0:
            raise DemoError(f"the server ended with exit code {code}:\n{self._last_words()}")
