"""The source archive, the wheel built from it, and fresh environments that have the wheel installed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.installation import BUILD_DIRECTORY, PROJECT, Installed, build, run


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of this checkout."""
    return build("sdist", PROJECT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive alone.

    Its files get the current time: the archive's own are all zero, and cargo would take them for those of the last run.
    """
    place = BUILD_DIRECTORY / "unpacked"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    run("tar", "-xzmf", sdist, "-C", place)
    (source,) = place.iterdir()
    built = build("wheel", source, tmp_path_factory.mktemp("wheel"))
    # To cargo, the same workspace in two places is one: with these sources still here, it would compare them, not the
    # checkout's, with what it has built, and never build the checkout again.
    shutil.rmtree(place)
    return built


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
