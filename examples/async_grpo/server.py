"""``rollspan serve`` as a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType


class Server:
    """A rollout server that ends with this object's context, and with this process however it dies.

    Args:
        arguments: of ``rollspan serve``, without a port: any free one is taken.

    Raises:
        RuntimeError: it did not start; its log is on stderr.
    """

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "rollspan.cli", "serve", *arguments, "--port", "0", "--events"]
        command += ["--watch-stdin", "--log-level", "warning"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self.url: str = event["url"]
                return
        sys.stderr.write(self._process.stderr.read())
        raise RuntimeError(f"the server ended with exit code {self._process.wait()}")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
