"""Starts and stops the processes of a server, and finds the HTTP binary. Imports no torch.

The parent holds the write end of each child's stdin (``--watch-stdin``): when the parent dies, however it dies, the
children read end of file and end too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rollspan import numerics
from rollspan.config import EngineConfig

BINARY_NAME = "rollspan-http"
SHARED_MEMORY = Path("/dev/shm")
PRIVATE_PREFIX = "rollspan-"
"""How directories begin that this module makes; nobody else's are ever deleted."""
MAX_SOCKET_PATH_BYTES = 100
"""Unix socket addresses hold 108 bytes on Linux and 104 on macOS, the terminating zero included."""

Stream = int | IO[bytes] | None


class LaunchError(Exception):
    """A process cannot be started; the message is one line for the user."""


@dataclass(frozen=True)
class EngineProcess:
    """A started EngineCore process."""

    process: subprocess.Popen[bytes]
    socket_path: Path

    def stop(self, timeout: float = 5.0) -> int:
        """Ends the engine, gracefully within ``timeout`` seconds and by force after that; returns its exit code."""
        return stop_process(self.process, timeout)


@dataclass(frozen=True)
class Frontend:
    """The HTTP server to start: ``rust`` or ``python``, the command without its flags, and why this one."""

    kind: str
    command: tuple[str, ...]
    reason: str


def start_engine(
    config: EngineConfig,
    directory: Path,
    env: Mapping[str, str] | None = None,
    *,
    log_level: str = "info",
    stdout: Stream = None,
    stderr: Stream = None,
) -> EngineProcess:
    """Starts an EngineCore that listens on a socket in ``directory``; does not wait until it is ready.

    ``env`` is added to :func:`engine_environment`. The engine ends when this process does.

    Raises:
        LaunchError: the directory's path is too long for a socket, or the process cannot be started.
    """
    socket_path = engine_socket(directory, config.engine_index)
    if len(os.fsencode(socket_path)) > MAX_SOCKET_PATH_BYTES:
        raise LaunchError(f"the path {socket_path} is too long for a socket: set TMPDIR to a shorter directory")
    socket_path.unlink(missing_ok=True)  # of one that was killed, which this one replaces
    command = [*engine_command(config, socket_path, log_level), "--watch-stdin"]
    environment = engine_environment(config) | dict(env or {})
    return EngineProcess(start_process(command, environment, stdout=stdout, stderr=stderr), socket_path)


def engine_socket(directory: Path, index: int) -> Path:
    """Socket of an engine of the server that has this directory."""
    return directory / f"engine-{index}.sock"


def engine_command(config: EngineConfig, socket_path: Path, log_level: str) -> list[str]:
    """The command line of an engine process."""
    program = [sys.executable, "-m", "rollspan.engine.core_proc"]
    return [*program, "--socket", str(socket_path), "--config", config.to_json(), "--log-level", log_level]


def start_process(
    command: list[str], env: Mapping[str, str] | None = None, *, stdout: Stream = None, stderr: Stream = None
) -> subprocess.Popen[bytes]:
    """Starts a child in a session of its own, its stdin a pipe that this process holds open.

    Its own session keeps the terminal's Ctrl-C from reaching it: only the parent decides when a child stops.

    Raises:
        LaunchError: the program is missing or cannot be executed.
    """
    try:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror or error}") from None


def stop_process(process: subprocess.Popen[bytes], timeout: float) -> int:
    """Sends SIGTERM, waits ``timeout`` seconds, then kills the child's whole session; returns the exit code."""
    process.terminate()
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
    finally:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


@contextlib.contextmanager
def private_directory(base: Path | None = None) -> Iterator[Path]:
    """A new directory of mode 0700, removed with everything in it at the end.

    Without ``base`` it is for sockets: in ``XDG_RUNTIME_DIR`` where there is one, which is private and on no disk, else
    in the temporary directory.
    """
    if base is None:
        runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nowhere")
        base = runtime if os.access(runtime, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    directory = Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX, dir=base))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def spool_base(model: Path) -> Path:
    """Where uploads of weights go: to memory where that has room for two copies of the model's files, else to disk."""
    needed = 2 * sum(file.stat().st_size for file in model.glob("*.safetensors"))
    if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(SHARED_MEMORY).free > needed:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """Environment of an engine process: this process's own, with what a compute process needs.

    One physical core is left to the frontend and the clients, engines of a set share the others and have a GPU each,
    as far as there are enough; threads that wait give their core away. What the user has set stays, except that
    ``num_threads`` of the configuration wins over ``OMP_NUM_THREADS``. A batch-invariant engine gets MKL's strict mode.
    """
    threads = str(config.num_threads or max(1, (physical_cores() - 1) // config.num_engines))
    defaults = {
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
    }
    if config.batch_invariant:
        defaults |= numerics.environment()
    environment = defaults | dict(os.environ)
    if config.num_threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    gpus = visible_gpus() if config.num_engines > 1 and config.device in ("auto", "cuda") else []
    if len(gpus) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[config.engine_index % len(gpus)]
    return environment


def visible_gpus() -> list[str]:
    """Names of the GPUs that child processes see, in their order, as CUDA_VISIBLE_DEVICES spells them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))]


def physical_cores() -> int:
    """Physical cores that this process may use: hyper-threads count once, affinity and the cgroup's quota hold."""
    if not hasattr(os, "sched_getaffinity"):
        return max(1, os.cpu_count() or 1)
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.exists() else str(cpu))
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            return max(1, min(len(cores), int(allowed) // int(period)))
    return len(cores)


def binary_places() -> list[Path]:
    """Where the HTTP binary may be, in the order of preference.

    The environment variable ``ROLLSPAN_HTTP_BINARY`` alone counts when it is set. Otherwise: the scripts directory of
    this interpreter, that of the user's own installs, the one next to a ``pip install --target`` directory, then PATH.
    """
    chosen = os.environ.get("ROLLSPAN_HTTP_BINARY")
    if chosen:
        return [Path(chosen)]
    package_parent = Path(__file__).resolve().parent.parent
    directories = [
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", scheme=sysconfig.get_preferred_scheme("user")),
        str(package_parent / "bin"),
        *os.environ.get("PATH", "").split(os.pathsep),
    ]
    return list(dict.fromkeys(Path(directory) / BINARY_NAME for directory in directories if directory))


def find_http_binary() -> Path | None:
    """The first of :func:`binary_places` that is an executable file, or None."""
    return next((path for path in binary_places() if path.is_file() and os.access(path, os.X_OK)), None)


def choose_frontend(wanted: str, version: str) -> Frontend:
    """The HTTP server for ``wanted``: ``auto``, ``rust`` or ``python``.

    ``auto`` takes the binary where it is installed in this very version and ``ROLLSPAN_PURE_PYTHON`` is not 1.

    Raises:
        LaunchError: ``rust`` is wanted and there is no binary of this version.
    """
    python = (sys.executable, "-m", "rollspan.frontend")
    if wanted == "python":
        return Frontend("python", python, "asked for")
    if wanted == "auto" and os.environ.get("ROLLSPAN_PURE_PYTHON") == "1":
        return Frontend("python", python, "ROLLSPAN_PURE_PYTHON=1")
    binary = find_http_binary()
    if binary is None:
        places = ", ".join(str(path.parent) for path in binary_places())
        problem = f"{BINARY_NAME} not found in {places}"
    else:
        found = binary_version(binary)
        if found == version:
            return Frontend("rust", (str(binary),), str(binary))
        problem = f"{binary} is version {found or 'unknown'}, not {version}"
    if wanted == "rust":
        raise LaunchError(f"no Rust frontend: {problem}")
    return Frontend("python", python, problem)


def binary_version(binary: Path) -> str | None:
    """The version that ``BINARY --version`` prints, or None when it prints none."""
    command = [str(binary), "--version"]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = result.stdout.split()
    return words[-1] if result.returncode == 0 and words else None
