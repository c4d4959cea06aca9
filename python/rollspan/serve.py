"""``rollspan serve`` and ``rollspan engine``: from arguments to running processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollspan.config import EngineConfig
from rollspan.flags import (
    LOG_LEVEL,
    Parser,
    add_engine_flags,
    add_frontend_flags,
    add_set_flags,
    engine_config,
    frontend_arguments,
)
from rollspan.launcher import (
    Frontend,
    LaunchError,
    choose_frontend,
    engine_command,
    engine_environment,
    engine_socket,
    private_directory,
    spool_base,
    start_engine,
    start_process,
)
from rollspan.supervisor import Supervisor
from rollspan.version import __version__

SERVE_EPILOG = """\
examples:
  rollspan serve                                       the embedded model, on http://127.0.0.1:8000
  rollspan serve ./qwen --dtype bfloat16 --port 9000   a Hugging Face causal LM from a directory
  rollspan serve ./qwen --weights-root /checkpoints    ... whose weights may be updated from below /checkpoints
  rollspan serve ./qwen --data-parallel-size 4         ... four engines with the same weights behind one address

ask it for a rollout, in another terminal:
  curl http://127.0.0.1:8000/inference/v1/generate -H 'Content-Type: application/json' \\
    -d '{"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16}}'

Ctrl-C stops it; a second Ctrl-C at once.
"""

ENGINE_EPILOG = """\
examples:
  rollspan engine ./qwen --socket /run/rollspan/engine-0.sock
  rollspan-http --engine /run/rollspan/engine-0.sock --port 8000      its frontend, started apart
"""


def serve(arguments: Sequence[str]) -> int:
    """Runs ``rollspan serve``: engines and an HTTP server until a signal; returns the exit code."""
    parser = Parser(
        prog="rollspan serve",
        description="Start an engine, or several, and an HTTP server on them, and watch over all.",
        epilog=SERVE_EPILOG,
    )
    add_engine_flags(parser)
    add_set_flags(parser)
    add_frontend_flags(parser)
    flags = vars(parser.parse_args(arguments))
    config = engine_config(parser, flags)
    try:
        frontend = choose_frontend(flags["frontend"], __version__)
        say(f"model: {config.model}" + ("" if "model" in flags else " (embedded; give a MODEL to serve yours)"))
        say(f"frontend: {frontend.kind} ({frontend.reason})")
        with private_directory() as directory, private_directory(spool_base(Path(config.model))) as spool:
            config = dataclasses.replace(config, weights_spool=config.weights_spool or str(spool))
            size = flags["data_parallel_size"]
            configs = [dataclasses.replace(config, engine_index=index, num_engines=size) for index in range(size)]
            return _supervise(configs, frontend, flags, directory)
    except LaunchError as error:
        say(f"error: {error}")
        return 1


def _supervise(configs: Sequence[EngineConfig], frontend: Frontend, flags: Mapping[str, Any], directory: Path) -> int:
    config = configs[0]
    command = [*frontend.command, "--watch-stdin"]
    for index in range(len(configs)):
        command += ["--engine", str(engine_socket(directory, index))]
    command += ["--weights-spool", str(config.weights_spool)]
    command += ["--weight-update-timeout", str(config.weight_update_timeout), *frontend_arguments(flags)]
    if flags["watch_stdin"]:
        threading.Thread(target=_stop_at_end_of_stdin, name="watch-stdin", daemon=True).start()
    supervisor = Supervisor(
        Banner(config, frontend, events=flags["events"]), shutdown_timeout=flags["shutdown_timeout"]
    )
    failure = supervisor.run(
        [
            partial(
                start_engine,
                config,
                directory,
                log_level=flags["log_level"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for config in configs
        ],
        partial(start_process, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE),
    )
    if failure is not None:
        say(f"error: {failure.message}")
        return failure.exit_code
    say("stopped")
    return 0


def _stop_at_end_of_stdin() -> None:
    """Stops this server, as SIGTERM would, when the program that started it is gone."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def engine(arguments: Sequence[str]) -> int:
    """Runs ``rollspan engine``: this process becomes an engine that listens on the given socket."""
    parser = Parser(
        prog="rollspan engine",
        description="Run an engine alone, for a frontend that is started apart.",
        epilog=ENGINE_EPILOG,
    )
    parser.add_argument("--socket", metavar="PATH", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--log-level", **LOG_LEVEL)
    add_engine_flags(parser)
    flags = vars(parser.parse_args(arguments))
    config = engine_config(parser, flags)
    command = engine_command(config, flags["socket"], flags["log_level"])
    os.execve(command[0], command, engine_environment(config))


class Banner:
    """Tells the user, and on ``--events`` a program, what the server is up to."""

    def __init__(self, config: EngineConfig, frontend: Frontend, *, events: bool) -> None:
        self._config = config
        self._frontend = frontend
        self._events = events
        self._address = ""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Reports one event of the supervisor."""
        self._address = event.get("address", self._address)
        url = f"http://{self._address}"
        if self._events:
            about = {name: value for name, value in event.items() if name != "address"}
            print(json.dumps({**about, "url": url}), flush=True)
        if event["event"] == "ready":
            say(self._ready_text(url))
        elif event["event"] == "engine_ended":
            say(f"{event['message']}; it is started again in {event['restart_seconds']:g} s")

    def _ready_text(self, url: str) -> str:
        name = self._config.served_model_name or Path(self._config.model).name
        return f"""\
ready: {name} at {url} through the {self._frontend.kind} frontend
  try:  curl {url}/inference/v1/generate -H 'Content-Type: application/json' \\
          -d '{{"token_ids": [1, 2, 3], "sampling_params": {{"max_tokens": 16}}}}'
  stop: Ctrl-C"""


def say(text: str) -> None:
    """Prints to stderr, where a server's log goes."""
    print(f"rollspan: {text}", file=sys.stderr, flush=True)
