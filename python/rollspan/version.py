"""The release of this package. Its one source is the Cargo workspace, from which an install takes its version."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _version() -> str:
    try:
        return version("rollspan")
    except PackageNotFoundError:
        pass
    manifest = Path(__file__).resolve().parents[2] / "Cargo.toml"
    if manifest.is_file():
        found = re.search(r'^version = "([^"]+)"', manifest.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return "0.0.0+uninstalled"


__version__ = _version()
