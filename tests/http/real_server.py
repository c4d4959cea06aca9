"""The real engine with the embedded model, directories of weights to update it with, and frontends on it."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from frontend_process import FrontendProcess
from safetensors.numpy import load_file, save_file

from rollspan import models
from rollspan.config import EngineConfig
from rollspan.launcher import EngineProcess, start_engine

MODEL = "add2-rl"
WEIGHTS_FILE = "model.safetensors"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
EOS = 2
VOCABULARY_SIZE = 16
MAX_MODEL_LEN = 512


class Checkpoints:
    """``weights_root`` with ``rl`` (served at start), ``sft`` and ``zero``, and a spool for uploads.

    ``zero`` is ``rl`` with a head of zeros: greedy decoding emits token 0 and nothing else.
    """

    def __init__(self, directory: Path) -> None:
        self._names = itertools.count()
        self.weights_root = directory / "weights"
        for name, model in (("rl", "add2-rl"), ("sft", "add2-sft")):
            (self.weights_root / name).mkdir(parents=True)
            shutil.copy(models.path(model) / WEIGHTS_FILE, self.weights_root / name)
        self._save(self.weights_root / "zero", self.tensors(**{HEAD: None}))
        self.spool = directory / "spool"
        self.spool.mkdir(mode=0o700)
        #: What engines with these weights are started with.
        self.config: dict[str, Any] = {
            "model": str(models.path(MODEL)),
            "weights_root": str(self.weights_root),
            "weights_spool": str(self.spool),
            "num_threads": 1,
            "device": "cpu",
        }

    def tensors(self, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
        """``rl``'s tensors with some replaced; None makes one zero."""
        tensors = load_file(self.weights_root / "rl" / WEIGHTS_FILE)
        for tensor, value in changes.items():
            tensors[tensor] = np.zeros_like(tensors[tensor]) if value is None else value
        return tensors

    def new_path(self, name: str) -> Path:
        """A path under the root that does not exist yet."""
        return self.weights_root / f"{name}-{next(self._names)}"

    def new_directory(self, name: str) -> Path:
        """An empty directory under the root."""
        path = self.new_path(name)
        path.mkdir()
        return path

    def save(self, name: str, tensors: dict[str, np.ndarray]) -> Path:
        """A new directory of these tensors."""
        return self._save(self.new_path(name), tensors)

    def _save(self, directory: Path, tensors: dict[str, np.ndarray]) -> Path:
        directory.mkdir()
        save_file(tensors, directory / WEIGHTS_FILE)
        return directory


class RealEngine(Checkpoints):
    """An engine process and its weights."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.process: EngineProcess = start_engine(EngineConfig(**self.config), directory)

    def close(self) -> None:
        """Ends the process."""
        self.process.stop()


class RealServer:
    """A frontend on a real engine."""

    def __init__(self, kind: str, engine: RealEngine, *flags: str) -> None:
        self.engine = engine
        spool = ("--weights-spool", str(engine.spool))
        self.frontend = FrontendProcess(kind, engine.process.socket_path, *spool, *flags)

    def update(self, path: str | Path, label: str | int | None = None) -> int:
        """A whole weight update; returns its commit number."""
        frontend = self.frontend
        assert frontend.post("/start_weight_update").status_code == 200
        answer = frontend.post("/update_weights", {"update_info": {"path": str(path)}})
        assert answer.status_code == 200, answer.text
        answer = frontend.post("/finish_weight_update", None if label is None else {"weight_version": label})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["weight_commit"])

    def label(self) -> str:
        """Label in force."""
        return str(self.frontend.get("/weight_info").json()["weight_version"])

    def close(self) -> None:
        """Ends the frontend."""
        self.frontend.close()
