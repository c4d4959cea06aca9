"""Weights from a directory of safetensors (one file, several, or shards with an index) under an allowed root."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rollspan.errors import RollspanError, shown
from rollspan.safetensors_format import SafetensorsError
from rollspan.weights.transfer.base import Transport, check_keys
from rollspan.weights.transfer.safetensors_file import read_safetensors

INDEX = "model.safetensors.index.json"
PARAM = "update_info.path"


class DiskTransport(Transport):
    """``update_info``: ``{"path": DIR}``, absolute under the weights root or relative to it. All of it is copied."""

    name = "disk"

    def receive(self, info: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        directory = _directory(info, self.context.root)
        assert self.context.root is not None
        files, weight_map = _files(directory, self.context.root)
        seen: set[str] = set()
        for file in files:
            for name, tensor in self._read(file):
                if name in seen:
                    raise _invalid(f"tensor {name!r} is in more than one file of {directory}")
                seen.add(name)
                yield name, tensor
        missing = sorted(set(weight_map or ()) - seen)
        if missing:
            raise _invalid(f"the index promises {missing[0]!r} ({len(missing)} missing in all), but no file holds it")

    def _read(self, file: Path) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from read_safetensors(file, self.check_cancelled)
        except (OSError, SafetensorsError) as error:
            raise _invalid(f"{file.name} cannot be read as safetensors: {error}") from None


def _invalid(message: str, param: str = PARAM) -> RollspanError:
    return RollspanError(message, reason="weights_invalid", param=param)


def _directory(info: Mapping[str, Any], root: Path | None) -> Path:
    """The directory that ``update_info`` names: absolute under ``root``, or relative to it; links are followed first.

    Raises:
        RollspanError: ``weights_invalid`` or ``unsupported_field``, naming the field.
    """
    check_keys("update_info", info, ("path",))
    path = info.get("path")
    if path is None:
        raise _invalid(f"{PARAM} is required")
    if not isinstance(path, str) or not path or "\0" in path:
        raise _invalid(f"{PARAM} must be the path of a directory of safetensors, got {shown(path)}")
    if root is None:
        raise _invalid("weight updates from disk are off: start the server with --weights-root DIR")
    try:
        base = root.resolve(strict=True)
        directory = (base / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise _invalid(f"{PARAM} {shown(path)} cannot be found: {type(error).__name__}") from None
    if not directory.is_relative_to(base):
        raise _invalid(f"{PARAM} {shown(path)} is outside --weights-root")
    try:  # of what lies outside the root, it is nobody's business whether it exists
        found = stat.S_ISDIR(directory.stat().st_mode)
    except OSError as error:
        raise _invalid(f"{PARAM} {shown(path)} cannot be found: {type(error).__name__}") from None
    if not found:
        raise _invalid(f"{PARAM} {shown(path)} is no directory")
    return directory


def _files(directory: Path, root: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Safetensors files of the directory, and tensor name -> file name where there is an index."""
    base = root.resolve()
    index = directory / INDEX
    weight_map: dict[str, str] | None = None
    names: list[Any]
    if index.is_file():
        if not index.resolve().is_relative_to(base):
            raise _invalid(f"{index} leads outside --weights-root")
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _invalid(f"{index.name} holds no weight_map of tensor names to file names") from None
    elif (directory / "model.safetensors").exists():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise _invalid(f"{directory} holds no safetensors files")
    files = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise _invalid(f"{index.name} names {shown(name)}, which is no safetensors file of the directory")
        try:
            file = (directory / name).resolve(strict=True)
            regular = file.is_file()
        except (OSError, RuntimeError, ValueError):  # not there, a loop of links, no possible name
            raise _invalid(f"{directory} holds no file {shown(name)}") from None
        if not file.is_relative_to(base):
            raise _invalid(f"{directory / name} leads outside --weights-root")
        if not regular:
            raise _invalid(f"{directory / name} is no regular file")
        files.append(file)
    return files, weight_map
