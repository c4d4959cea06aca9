"""The counting model: every token proves which weights sampled it.

A one-layer GPT-2 with an untied head. ``ln_f.weight = 0`` and ``ln_f.bias = e0`` make the last hidden state the first
unit vector whatever the input, so that the logits are the first column of ``lm_head.weight``: a checkpoint whose column
has one large entry emits that token and no other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save_file

from rollspan.digest import weight_digest

VOCABULARY = 64
POSITIONS = 4096
WIDTH = 8
HEAD = "lm_head.weight"
LOGIT = 40.0
"""Of the token that a checkpoint emits, the others have 0: sampling at temperature 1 errs once in e**36 tokens."""

Tensors = dict[str, npt.NDArray[Any]]

_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_positions": POSITIONS,
    "n_embd": WIDTH,
    "n_layer": 1,
    "n_head": 1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}


def tensors(token: int) -> Tensors:
    """All parameters of the checkpoint that emits ``token``."""
    random = np.random.default_rng(token)

    def noise(*shape: int) -> npt.NDArray[np.float32]:
        return random.normal(0.0, 0.1, shape).astype(np.float32)

    bias = np.zeros(WIDTH, np.float32)
    bias[0] = 1.0
    head = noise(VOCABULARY, WIDTH)
    head[:, 0] = 0.0
    head[token, 0] = LOGIT
    ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    return {
        "transformer.wte.weight": noise(VOCABULARY, WIDTH),
        "transformer.wpe.weight": noise(POSITIONS, WIDTH),
        "transformer.h.0.ln_1.weight": ones,
        "transformer.h.0.ln_1.bias": zeros,
        "transformer.h.0.attn.c_attn.weight": noise(WIDTH, 3 * WIDTH),
        "transformer.h.0.attn.c_attn.bias": noise(3 * WIDTH),
        "transformer.h.0.attn.c_proj.weight": noise(WIDTH, WIDTH),
        "transformer.h.0.attn.c_proj.bias": noise(WIDTH),
        "transformer.h.0.ln_2.weight": ones,
        "transformer.h.0.ln_2.bias": zeros,
        "transformer.h.0.mlp.c_fc.weight": noise(WIDTH, 4 * WIDTH),
        "transformer.h.0.mlp.c_fc.bias": noise(4 * WIDTH),
        "transformer.h.0.mlp.c_proj.weight": noise(4 * WIDTH, WIDTH),
        "transformer.h.0.mlp.c_proj.bias": noise(WIDTH),
        "transformer.ln_f.weight": zeros,
        "transformer.ln_f.bias": bias,
        HEAD: head,
    }


def changed_token(values: Tensors, token: int) -> tuple[Tensors, Tensors]:
    """What makes a checkpoint emit ``token`` by changing two elements: the whole of it, and the delta."""
    column = values[HEAD][:, 0]
    before = int(column.argmax())
    head = values[HEAD].copy()
    head[before, 0], head[token, 0] = 0.0, LOGIT
    indices = np.array([before * WIDTH, token * WIDTH], np.int64)
    delta: Tensors = {f"{HEAD}.indices": indices, f"{HEAD}.values": np.array([0.0, LOGIT], np.float32)}
    return values | {HEAD: head}, delta


def digest(values: Tensors) -> str:
    """Digest of a whole checkpoint."""
    return weight_digest({name: torch.tensor(value) for name, value in values.items()})


def write(directory: Path, values: Tensors) -> Path:
    """Writes a checkpoint of the counting model's shape in Hugging Face layout."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    save_file(values, directory / "model.safetensors", {"format": "pt"})
    return directory


class Checkpoints:
    """Checkpoints of the counting model under one directory, written when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def emitting(self, token: int) -> Path:
        """Directory of the checkpoint that emits ``token``."""
        directory = self.root / f"emits-{token}"
        return directory if directory.is_dir() else write(directory, tensors(token))


def write_zero_head(source: Path, directory: Path) -> Path:
    """The checkpoint in ``source`` with every weight of its head zero: greedy decoding emits token 0 only."""
    values: Tensors = load_file(source / "model.safetensors")
    values[HEAD] = np.zeros_like(values[HEAD])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text((source / "config.json").read_text())
    save_file(values, directory / "model.safetensors", {"format": "pt"})
    return directory
