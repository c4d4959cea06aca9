from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from rollspan import launcher
from rollspan.config import EngineConfig
from rollspan.launcher import LaunchError

VERSION = "1.2.3"


class Usage(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def no_choice_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLLSPAN_HTTP_BINARY", "ROLLSPAN_PURE_PYTHON", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def binary(directory: Path, version: str = VERSION) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "rollspan-http"
    path.write_text(f"#!/bin/sh\necho rollspan-http {version}\n")
    path.chmod(0o755)
    return path


def test_auto_takes_a_binary_of_the_same_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = binary(tmp_path)
    monkeypatch.setenv("ROLLSPAN_HTTP_BINARY", str(path))
    frontend = launcher.choose_frontend("auto", VERSION)
    assert (frontend.kind, frontend.command, frontend.reason) == ("rust", (str(path),), str(path))


@pytest.mark.parametrize("wanted", ["auto", "rust"])
def test_a_binary_of_another_version_is_not_used(wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = binary(tmp_path, "0.9.0")
    monkeypatch.setenv("ROLLSPAN_HTTP_BINARY", str(path))
    problem = f"{path} is version 0.9.0, not 1.2.3"
    if wanted == "rust":
        with pytest.raises(LaunchError, match=problem):
            launcher.choose_frontend(wanted, VERSION)
    else:
        frontend = launcher.choose_frontend(wanted, VERSION)
        assert (frontend.kind, frontend.reason) == ("python", problem)


def test_a_file_that_is_no_program_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollspan-http"
    path.write_bytes(b"\x7fELF nonsense")
    path.chmod(0o755)
    monkeypatch.setenv("ROLLSPAN_HTTP_BINARY", str(path))
    assert launcher.choose_frontend("auto", VERSION).reason == f"{path} is version unknown, not 1.2.3"


def test_without_a_binary_the_reason_lists_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "binary_places", lambda: [tmp_path / "a" / "rollspan-http", tmp_path / "b" / "x"])
    frontend = launcher.choose_frontend("auto", VERSION)
    assert frontend.kind == "python"
    assert frontend.command == (sys.executable, "-m", "rollspan.frontend")
    assert frontend.reason == f"rollspan-http not found in {tmp_path}/a, {tmp_path}/b"
    with pytest.raises(LaunchError, match="no Rust frontend: rollspan-http not found in"):
        launcher.choose_frontend("rust", VERSION)


def test_pure_python_is_respected_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSPAN_HTTP_BINARY", str(binary(tmp_path)))
    monkeypatch.setenv("ROLLSPAN_PURE_PYTHON", "1")
    assert launcher.choose_frontend("auto", VERSION).reason == "ROLLSPAN_PURE_PYTHON=1"
    assert launcher.choose_frontend("rust", VERSION).kind == "rust"
    assert launcher.choose_frontend("python", VERSION).reason == "asked for"


def test_the_binary_on_path_comes_after_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    places = launcher.binary_places()
    assert places[-2:] == [tmp_path / "one" / "rollspan-http", tmp_path / "two" / "rollspan-http"]
    assert Path(sys.prefix) / "bin" / "rollspan-http" in places[:-2]


def test_an_unexecutable_file_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary(tmp_path / "one").chmod(0o644)
    second = binary(tmp_path / "two")
    places = [tmp_path / name / "rollspan-http" for name in ("one", "two")]
    monkeypatch.setattr(launcher, "binary_places", lambda: places)
    assert launcher.find_http_binary() == second


def test_the_private_directory_is_private_and_goes_away() -> None:
    with launcher.private_directory() as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "engine-0.sock").touch()
    assert not directory.exists()


@pytest.mark.parametrize(("room", "in_memory"), [(21, True), (20, False)])
def test_uploads_go_to_memory_where_it_has_room_for_two_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, in_memory: bool
) -> None:
    model, memory, disk = (tmp_path / name for name in ("model", "memory", "disk"))
    for directory in (model, memory, disk):
        directory.mkdir()
    (model / "config.json").write_bytes(b"{}")
    for name in ("a", "b"):
        (model / f"{name}.safetensors").write_bytes(b"12345")
    monkeypatch.setattr(launcher, "SHARED_MEMORY", memory)
    monkeypatch.setattr(launcher.shutil, "disk_usage", lambda path: Usage(room))
    monkeypatch.setattr(launcher.tempfile, "gettempdir", lambda: str(disk))
    assert launcher.spool_base(model) == (memory if in_memory else disk)
    with launcher.private_directory(launcher.spool_base(model)) as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()


def test_without_shared_memory_uploads_go_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "SHARED_MEMORY", tmp_path / "nowhere")
    assert launcher.spool_base(tmp_path) == Path(tempfile.gettempdir())


def test_a_directory_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="too long for a socket: set TMPDIR"):
        launcher.start_engine(EngineConfig(model="m"), tmp_path / ("x" * 120))


def test_the_engine_leaves_a_core_to_the_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "physical_cores", lambda: 8)
    environment = launcher.engine_environment(EngineConfig(model="m"))
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert environment["PATH"] == os.environ["PATH"]


def test_engines_of_a_set_share_the_cores_and_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "physical_cores", lambda: 9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5,7")
    environments = [
        launcher.engine_environment(EngineConfig(model="m", engine_index=index, num_engines=4)) for index in range(4)
    ]
    assert [environment["OMP_NUM_THREADS"] for environment in environments] == ["2"] * 4
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["3", "GPU-5", "7", "3"]
    for config in (EngineConfig(model="m"), EngineConfig(model="m", device="cuda:1", num_engines=2)):
        assert launcher.engine_environment(config)["CUDA_VISIBLE_DEVICES"] == "3, GPU-5,7"


def test_each_engine_has_its_socket_and_one_left_by_a_dead_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(launcher, "start_process", lambda command, *_, **__: started.append(command))
    (tmp_path / "engine-1.sock").touch()
    engine = launcher.start_engine(EngineConfig(model="m", engine_index=1, num_engines=2), tmp_path)
    assert engine.socket_path == tmp_path / "engine-1.sock"
    assert str(engine.socket_path) in started[0]
    assert not engine.socket_path.exists()


def test_one_core_still_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "physical_cores", lambda: 1)
    assert launcher.engine_environment(EngineConfig(model="m"))["OMP_NUM_THREADS"] == "1"


def test_num_threads_wins_over_the_users_environment_which_wins_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launcher.engine_environment(EngineConfig(model="m"))["OMP_NUM_THREADS"] == "3"
    assert launcher.engine_environment(EngineConfig(model="m", num_threads=5))["OMP_NUM_THREADS"] == "5"


def test_physical_cores_are_at_most_the_cpus_of_this_process() -> None:
    assert 1 <= launcher.physical_cores() <= len(os.sched_getaffinity(0))


def test_a_process_that_ignores_the_signal_is_killed_with_its_own_children() -> None:
    script = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, flush=True)
child.wait()
"""
    process = launcher.start_process([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        grandchild = int(process.stdout.readline())
        assert launcher.stop_process(process, 0.2) == -signal.SIGKILL
        assert process.stdout.read() == b"", "the grandchild holds the pipe until it is dead"
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    assert grandchild != process.pid


def test_children_see_the_end_of_a_parent_that_was_killed() -> None:
    child = "import sys; print('up', flush=True); sys.stdin.read(); print('parent is gone', flush=True)"
    parent = f"""
import sys
from rollspan.launcher import start_process
start_process([sys.executable, "-c", {child!r}]).wait()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.readline() == b"parent is gone\n"
