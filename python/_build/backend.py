"""PEP 517 build backend: maturin, plus the ``rollspan-http`` binary in the wheel's scripts.

maturin builds the extension module and the wheel; this wrapper first builds the HTTP server with cargo and stages
it where ``[tool.maturin] data`` points, so that installers put it on PATH. The version has one source, the Cargo workspace.

Which cargo profile is used, strongest first: ``--config-settings profile=NAME``, the environment variable
``ROLLSPAN_BUILD_PROFILE``, then ``release`` for wheels and ``dev`` for editable installs.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import maturin

Settings = Mapping[str, Any]

PROJECT = Path(__file__).resolve().parents[2]
BINARY_CRATE = "rollspan-server"
BINARY = "rollspan-http"
DATA = PROJECT / "build" / "wheel.data"

SDIST_ENTRIES = (
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "Makefile",
    "README.md",
    "benchmarks",
    "clippy.toml",
    "examples",
    "pyproject.toml",
    "python",
    "requirements-dev.lock",
    "requirements.lock",
    "rust",
    "rust_tests",
    "rustfmt.toml",
    "tests",
)
SDIST_IGNORED_NAMES = {"__pycache__", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
SDIST_IGNORED_NAMES |= {"target", "artifacts", "corpus", "coverage"}  # what cargo and cargo-fuzz leave
SDIST_IGNORED_SUFFIXES = {".pyc", ".so", ".pyd"}


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with the extension module and the binary; returns its file name."""
    profile = _profile(config_settings, "release")
    _stage_binary(profile)
    return maturin.build_wheel(wheel_directory, _maturin_settings(profile), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that points at this tree; the extension module is copied into the package directory."""
    profile = _profile(config_settings, "dev")
    _stage_binary(profile)
    return maturin.build_editable(wheel_directory, _maturin_settings(profile), metadata_directory)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    """Write the ``.dist-info`` directory without compiling anything; returns its name."""
    (DATA / "scripts").mkdir(parents=True, exist_ok=True)
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, None)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Nothing beyond ``[build-system] requires``: a missing cargo is reported, never downloaded."""
    return []


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    """Write the source archive: all crates, Python packages and tests, in a fixed order with fixed times.

    maturin's own archive holds only the crates that the extension module depends on, which leaves out the server.
    """
    with tempfile.TemporaryDirectory() as scratch:
        dist_info = Path(scratch) / prepare_metadata_for_build_wheel(scratch)
        package_information = (dist_info / "METADATA").read_bytes()
    name = dist_info.name.removesuffix(".dist-info")
    file_name = f"{name}.tar.gz"
    with (
        (Path(sdist_directory) / file_name).open("wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        _add_bytes(archive, f"{name}/PKG-INFO", package_information, executable=False)
        for path in _source_files():
            member = f"{name}/{path.relative_to(PROJECT).as_posix()}"
            _add_bytes(archive, member, path.read_bytes(), executable=os.access(path, os.X_OK))
    return file_name


def _source_files() -> Iterator[Path]:
    for entry in SDIST_ENTRIES:
        path = PROJECT / entry
        if path.is_file():
            yield path
            continue
        for directory, subdirectories, files in os.walk(path):
            subdirectories[:] = sorted(name for name in subdirectories if name not in SDIST_IGNORED_NAMES)
            for file in sorted(files):
                if Path(file).suffix not in SDIST_IGNORED_SUFFIXES:
                    yield Path(directory, file)


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes, *, executable: bool) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o755 if executable else 0o644
    archive.addfile(member, io.BytesIO(content))


def _profile(config_settings: Settings | None, default: str) -> str:
    chosen = (config_settings or {}).get("profile") or os.environ.get("ROLLSPAN_BUILD_PROFILE") or default
    return "dev" if chosen == "debug" else str(chosen)


def _maturin_settings(profile: str) -> dict[str, str]:
    return {"maturin.build-args": f"--locked --profile {profile}"}


def _stage_binary(profile: str) -> None:
    """Build the server and copy it to the directory whose content maturin puts into the wheel's scripts."""
    scripts = DATA / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    shutil.copy2(_build_binary(profile), scripts / BINARY)


def _build_binary(profile: str) -> Path:
    if shutil.which("cargo") is None:
        sys.exit("error: building rollspan needs Rust, and cargo is not on PATH: install a Rust toolchain first")
    command = ["cargo", "build", "--locked", "--profile", profile, "--package", BINARY_CRATE, "--bin", BINARY]
    command.append("--message-format=json-render-diagnostics")
    print("Running", " ".join(command), flush=True)
    result = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, check=False)
    if result.returncode != 0:
        sys.exit(f"error: building {BINARY} failed: cargo ended with exit code {result.returncode}")
    for line in result.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == BINARY:
            return Path(message["executable"])
    sys.exit(f"error: cargo built no executable named {BINARY}")
