"""Fixtures shared by every room of the tests. One compute thread everywhere: the machines that run them are shared."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Path for a Unix socket; pytest's own directories may be longer than a socket address can be."""
    directory = Path(tempfile.mkdtemp(prefix="rollspan-test-"))
    yield directory / "engine.sock"
    shutil.rmtree(directory, ignore_errors=True)
