"""The source archive, the wheel built from it, and fresh environments that have the wheel installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Stdout of a command that must succeed."""
    result = subprocess.run([str(word) for word in command], env=env, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


def build_environment() -> dict[str, str]:
    """Builds take the debug profile and the build directory that ``make`` uses: what is compiled there is not again."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollspan"
    return {
        "CARGO_TARGET_DIR": str(cache / "target"),
        **os.environ,
        "ROLLSPAN_BUILD_PROFILE": "dev",
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
    }


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds the ``sdist`` or ``wheel`` of a source tree without build isolation; returns the file."""
    flags = ["--no-build-isolation", "--python", sys.executable, "--out-dir", str(out)]
    run("uv", "build", f"--{kind}", *flags, source, env=build_environment())
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of this checkout."""
    return build("sdist", PROJECT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive alone.

    The archive is unpacked into one fixed place, so that cargo's directory does not gain a set of crates with each run;
    its files get the current time, since cargo goes by time and the archive's own are all zero.
    """
    place = Path(build_environment()["CARGO_TARGET_DIR"]) / "unpacked-sdist"
    shutil.rmtree(place, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    for path in place.rglob("*"):
        path.touch()
    (source,) = place.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


class Installed:
    """A fresh virtual environment with the wheel; its dependencies are those of the environment that runs the tests."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        run("uv", "venv", "--quiet", "--python", sys.executable, directory)
        self.directory = directory
        self.scripts = directory / "bin"
        self.python = self.scripts / "python"
        run("uv", "pip", "install", "--quiet", "--python", self.python, "--no-deps", wheel)
        (self.packages,) = (directory / "lib").glob("python*/site-packages")
        (self.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        #: Nothing of the tests' own environment: no PYTHONPATH, and none of its scripts on PATH.
        self.environment = {"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/")}

    def run(self, *command: str | Path, **extra: str) -> str:
        """Stdout of a command in this environment."""
        return run(*command, env={**self.environment, **extra}, cwd=self.directory)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, installed."""
    return Installed(tmp_path_factory.mktemp("installed") / "venv", wheel)


@pytest.fixture(scope="session")
def installed_without_rust(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The same, as on a machine for which nothing could be compiled: no extension module, no binary."""
    environment = Installed(tmp_path_factory.mktemp("pure") / "venv", wheel)
    for path in (*(environment.packages / "rollspan").glob("_native*"), environment.scripts / "rollspan-http"):
        path.unlink()
    return environment


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary directory with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="rs-") as name:
        yield Path(name)
