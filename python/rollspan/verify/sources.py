"""Sources: which directory holds the weights that a stamp names, by label or through a weight history by digest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollspan.digest import weight_digest
from rollspan.verify.recording import Stamp
from rollspan.verify.replay import Checkpoints


class SourceError(ValueError):
    """What was given on the command line cannot be used; the message says why."""


class Sources:
    """Checkpoints of the command line.

    Args:
        given: ``LABEL=DIR`` or ``DIR``; the latter is found by its digest.
        history: file with an answer of GET /weight_history, which binds commit numbers to digests.
        dtype: that the engine ran in; "auto" for each checkpoint's own.
        most: models kept in memory.

    Raises:
        SourceError: a directory or the history cannot be read.
    """

    def __init__(self, given: Sequence[str], history: Path | None, *, dtype: str, most: int) -> None:
        self._labels: dict[str, Path] = {}
        self._unnamed: list[Path] = []
        for text in given:
            label, separator, rest = text.partition("=")
            directory = Path(rest if separator else text)
            if not (directory / "config.json").is_file():
                raise SourceError(f"--checkpoint {text}: {directory} is no directory with a config.json")
            if separator:
                if label in self._labels:
                    raise SourceError(f"--checkpoint {text}: two checkpoints are called {label!r}")
                self._labels[label] = directory
            else:
                self._unnamed.append(directory)
        self._history = {} if history is None else _read_history(history)
        if self._unnamed and not self._history:
            raise SourceError("a --checkpoint without a label needs --history, which says which commit it is")
        every = [*self._labels.values(), *self._unnamed]
        kind = None if dtype == "auto" else getattr(torch, dtype)
        self.checkpoints = Checkpoints({path: path for path in every}, dtype=kind, most=most)
        self._digests: dict[Path, str] = {}

    def find(self, stamp: Stamp, engine_index: int) -> Path:
        """The directory with the weights of ``stamp``.

        Raises:
            LookupError: there is none, or a label's directory is not what the history says it was.
        """
        label, commit = stamp
        known = None if commit is None else self._history.get((engine_index, commit))
        directory = None if label is None else self._labels.get(label)
        if directory is not None:
            if known is not None and self._digest(directory) != known:
                raise LookupError(
                    f"checkpoint {label!r} has digest {self._digest(directory)}, but commit {commit} of engine "
                    f"{engine_index} had {known}"
                )
            return directory
        if known is not None:
            for directory in self._unnamed:
                if self._digest(directory) == known:
                    return directory
            raise LookupError(f"no checkpoint has the digest {known} of commit {commit} of engine {engine_index}")
        raise LookupError(f"no checkpoint is given for version {label!r}, commit {commit}")

    def _digest(self, directory: Path) -> str:
        if directory not in self._digests:
            self._digests[directory] = weight_digest(self.checkpoints.model(directory))
        return self._digests[directory]


def _read_history(path: Path) -> dict[tuple[int, int], str]:
    """(engine, commit) -> digest."""
    try:
        answer = json.loads(path.read_bytes())
        engines: list[Any] = answer["engines"]
        found = {}
        for engine in engines:
            for entry in engine.get("commits", ()):  # an engine of a set that is not there has none
                if entry["weight_digest"] is not None:
                    found[(int(engine["engine_index"]), int(entry["weight_commit"]))] = str(entry["weight_digest"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"--history {path} is no answer of GET /weight_history: {error!r}") from None
    return found
