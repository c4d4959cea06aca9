"""A real engine process, and a frontend that says to it exactly what a test wants said."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rollspan.config import EngineConfig
from rollspan.protocol import codec
from rollspan.protocol import messages as m
from rollspan.protocol.framing import FrameKind, FrameReader, encode_frame
from rollspan.provenance import Provenance
from rollspan.sampling_params import SamplingParams

TIMEOUT = 60.0


class Process:
    """``python -m rollspan.engine.core_proc`` with its socket in a private directory of its own."""

    def __init__(self, model: str, *flags: str, config: str | None = None, **fields: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rollspan-test-"))
        self.socket_path = self.directory / "engine.sock"
        fields = {"kv_cache_memory": 1 << 20, "num_threads": 1, **fields}
        text = EngineConfig(model=model, **fields).to_json() if config is None else config
        command = [sys.executable, "-m", "rollspan.engine.core_proc", "--socket", str(self.socket_path)]
        self.popen = subprocess.Popen(
            [*command, "--config", text, "--log-level", "warning", *flags],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_until_bound(self) -> None:
        """Returns when the socket exists.

        Raises:
            AssertionError: the process has ended, or takes too long.
        """
        deadline = time.monotonic() + TIMEOUT
        while not self.socket_path.exists():
            assert time.monotonic() < deadline
            try:
                raise AssertionError(f"ended with {self.popen.wait(0.01)}")
            except subprocess.TimeoutExpired:
                pass

    def connect(self, *, greet: bool = True) -> Frontend:
        """A frontend on this engine, which has its hello unless told otherwise."""
        self.wait_until_bound()
        deadline = time.monotonic() + TIMEOUT
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self.socket_path))
            except ConnectionRefusedError:  # bound, not listening yet
                connection.close()
                assert time.monotonic() < deadline
            else:
                break
        frontend = Frontend(connection)
        if greet:
            frontend.greet()
        return frontend

    def ended(self, timeout: float = TIMEOUT) -> tuple[int, list[str]]:
        """Exit code and the lines on stderr, once the process has ended."""
        code = self.popen.wait(timeout)
        assert self.popen.stderr is not None
        return code, self.popen.stderr.read().decode().splitlines()

    def close(self) -> None:
        """Kills what is left and closes everything."""
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stderr):
            assert stream is not None
            stream.close()
        self.socket_path.unlink(missing_ok=True)
        if self.directory.exists():
            self.directory.rmdir()


class Frontend:
    """The frontend's end of one link."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: m.EngineHello | None = None
        self._reader = FrameReader()
        self._frames: list[tuple[FrameKind, bytes]] = []
        self._calls = 0
        connection.settimeout(TIMEOUT)

    def greet(self) -> m.EngineHello:
        """Says hello and waits for the engine's, which must be the first thing that it says."""
        self.send(FrameKind.CLIENT_HELLO, codec.encode_client_hello(m.ClientHello("test")))
        frame = self.next()
        assert frame is not None
        assert frame[0] is FrameKind.ENGINE_HELLO
        self.hello = codec.decode_engine_hello(frame[1])
        return self.hello

    def send(self, kind: FrameKind, payload: bytes) -> None:
        self.connection.sendall(encode_frame(kind, payload))

    def next(self) -> tuple[FrameKind, bytes] | None:
        """The next frame, None at the end of the link."""
        while not self._frames:
            try:
                data = self.connection.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._frames = self._reader.feed(data)
        return self._frames.pop(0)

    def outputs(self) -> m.EngineCoreOutputs:
        """The next OUTPUTS message; anything else fails."""
        frame = self.next()
        assert frame is not None
        assert frame[0] is FrameKind.OUTPUTS
        return codec.decode_outputs([frame[1]])

    def add(self, request_id: str, tokens: int, prompt: tuple[int, ...] = (1, 2, 3), **provenance: Any) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        request = m.EngineCoreRequest(request_id, list(prompt), params, provenance=Provenance(**provenance))
        self.send(FrameKind.ADD, codec.encode_request(request))

    def finish(self, request_id: str) -> tuple[list[int], m.EngineCoreOutput]:
        """Tokens and terminal output of a request."""
        tokens: list[int] = []
        while True:
            for output in self.outputs().outputs:
                if output.request_id == request_id:
                    tokens += output.new_token_ids
                    if output.finish_reason is not None:
                        return tokens, output

    def call(self, method: str, *args: Any) -> m.UtilityOutput:
        """Calls an engine method and waits for its answer; other messages are dropped."""
        self._calls += 1
        call = m.UtilityCall(0, self._calls, method, list(args))
        self.send(FrameKind.UTILITY, codec.encode_utility_call(call))
        while True:
            reply = self.outputs().utility_output
            if reply is not None:
                assert reply.call_id == self._calls
                return reply

    def wait_for_running(self, count: int) -> None:
        """Returns when the engine reports that many running requests."""
        while True:
            stats = self.outputs().scheduler_stats
            if stats is not None and stats["num_running_reqs"] == count:
                return

    def last_words(self) -> m.DeadNotice | None:
        """The DEAD notice that comes before the end of the link, if one does."""
        notice = None
        while (frame := self.next()) is not None:
            notice = codec.decode_dead(frame[1]) if frame[0] is FrameKind.DEAD else None
        return notice

    def close(self) -> None:
        self.connection.close()
