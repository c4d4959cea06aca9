"""Builds distributions of this checkout and installs them into fresh environments."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
BUILD_DIRECTORY = Path(os.environ.get("CARGO_TARGET_DIR") or PROJECT / "target") / "sdist"


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Stdout of a command that must succeed."""
    result = subprocess.run([str(word) for word in command], env=env, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    return result.stdout


def build_environment() -> dict[str, str]:
    """Builds take the debug profile, and a build directory of their own below that of the checkout.

    Its own, because cargo goes by file times: a shared one would pass the checkout's crates off as the archive's.
    """
    return {
        **os.environ,
        "CARGO_TARGET_DIR": str(BUILD_DIRECTORY),
        "ROLLSPAN_BUILD_PROFILE": "dev",
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
    }


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds the ``sdist`` or ``wheel`` of a source tree without build isolation; returns the file."""
    flags = ["--no-build-isolation", "--python", sys.executable, "--out-dir", str(out)]
    run("uv", "build", f"--{kind}", *flags, source, env=build_environment())
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


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
