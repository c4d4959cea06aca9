"""A frontend on the real engine with the embedded model, and directories of weights to update it with."""

from __future__ import annotations

import shutil
from pathlib import Path

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


class RealServer:
    """An engine process, its frontend, and ``weights_root`` with ``rl`` (served at start), ``sft`` and ``zero``.

    ``zero`` is ``rl`` with a head of zeros: greedy decoding emits token 0 and nothing else.
    """

    def __init__(self, kind: str, directory: Path, *flags: str) -> None:
        self.weights_root = directory / "weights"
        self.weights_root.mkdir(parents=True)
        self._copy_weights()
        config = EngineConfig(
            model=str(models.path(MODEL)), weights_root=str(self.weights_root), num_threads=1, device="cpu"
        )
        self.engine: EngineProcess = start_engine(config, directory)
        try:
            self.frontend = FrontendProcess(kind, self.engine.socket_path, *flags)
        except BaseException:
            self.engine.stop()
            raise

    def _copy_weights(self) -> None:
        for name, model in (("rl", "add2-rl"), ("sft", "add2-sft")):
            (self.weights_root / name).mkdir()
            shutil.copy(models.path(model) / WEIGHTS_FILE, self.weights_root / name)
        self.variant("zero", **{HEAD: None})

    def variant(self, name: str, **changes: np.ndarray | None) -> Path:
        """A directory of ``rl``'s weights with some tensors replaced; None makes one zero."""
        tensors = load_file(self.weights_root / "rl" / WEIGHTS_FILE)
        for tensor, value in changes.items():
            tensors[tensor] = np.zeros_like(tensors[tensor]) if value is None else value
        return self.save(name, tensors)

    def save(self, name: str, tensors: dict[str, np.ndarray]) -> Path:
        """A directory of these tensors."""
        directory = self.weights_root / name
        directory.mkdir()
        save_file(tensors, directory / WEIGHTS_FILE)
        return directory

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
        """Ends both processes."""
        self.frontend.close()
        self.engine.stop()
