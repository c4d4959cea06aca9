"""``rollspan digest``: the content digest that an engine of a model would report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rollspan import models
from rollspan.config import DTYPES, EngineConfig
from rollspan.errors import RollspanError
from rollspan.flags import Parser

DESCRIPTION = """\
Print the content digest of a model's weights, as /weight_history and finish_weight_update have it for an engine that
runs it: BLAKE3 of names, dtypes, shapes and bytes, after loading.
"""
EPILOG = """\
examples:
  rollspan digest ckpt/step-42                     one line
  rollspan digest ckpt/step-42 --dtype bfloat16    as an engine with --dtype bfloat16 has it
  rollspan digest ckpt/step-42 --tensors           that of each tensor before it
"""


def main(words: Sequence[str]) -> int:
    """Runs ``rollspan digest WORDS``; returns the exit code."""
    parser = Parser(prog="rollspan digest", description=DESCRIPTION, epilog=EPILOG)
    embedded = ", ".join(models.names())
    text = f"directory of a Hugging Face causal LM, or an embedded model: {embedded} (default: {models.DEFAULT})"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: auto)")
    parser.add_argument("--tensors", action="store_true", help="also print the digest of each tensor")
    args = parser.parse_args(words)
    try:
        directory = models.resolve(args.model)
        lines = _digests(str(directory), args.dtype)
    except FileNotFoundError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except RollspanError as error:
        parser.exit(1, f"{parser.prog}: error: {error.message}\n")
    for line in lines if args.tensors else lines[-1:]:
        sys.stdout.write(f"{line}\n")
    return 0


def _digests(model: str, dtype: str) -> list[str]:
    """The digest of each tensor and its name, then that of all."""
    from rollspan.digest import combine, tensor_digest, untied
    from rollspan.runner.loader import load_model, select_device

    loaded, _ = load_model(EngineConfig(model=model, dtype=dtype), select_device("cpu"))
    threads = os.cpu_count() or 1
    leaves = {name: tensor_digest(name, tensor, threads=threads) for name, tensor in untied(loaded).items()}
    return [*(f"{leaf.hex()}  {name}" for name, leaf in leaves.items()), combine(leaves)]
