"""Writes the models that the benchmarks run: Qwen3 shapes with random bfloat16 weights and tied embeddings.

`python benchmarks/make_models.py DIRECTORY [NAME ...]` writes DIRECTORY/NAME for each NAME (default: all) in Hugging
Face layout. No tokenizer: prompts are token ids. The same seed writes the same bytes.

| name | layers x hidden size | vocabulary | parameters |
|---|---|---|---|
| tiny | 4 x 128 | 1,024 | 0.9 M |
| small | 8 x 512 | 32,000 | 35 M |
| mid | 24 x 896 | 151,936 | 494 M |
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3, under the names of its configuration."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


SHAPES = {
    "tiny": Shape(4, 128, 384, 4, 2, 32, 1_024),
    "small": Shape(8, 512, 1_024, 8, 4, 64, 32_000),
    "mid": Shape(24, 896, 4_864, 14, 2, 64, 151_936),
}
CONTEXT = 4_096


def make(directory: Path, shape: Shape, seed: int) -> int:
    """Writes one model.

    Args:
        directory: made when it is not there; files of an earlier model in it are replaced.
        seed: of the weights, which have transformers' own initial distribution.

    Returns:
        Number of parameters, the tied output embedding not counted.
    """
    config = Qwen3Config(
        **asdict(shape), max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.architectures = ["Qwen3ForCausalLM"]
    directory.mkdir(parents=True, exist_ok=True)
    parameters = dict(model.named_parameters())
    save_file(
        {name: value.detach() for name, value in parameters.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    model.config.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}) + "\n")
    return sum(value.numel() for value in parameters.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the models' directories are written")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in SHAPES]
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; there are {', '.join(SHAPES)}")
    for name in args.names or SHAPES:
        count = make(args.directory / name, SHAPES[name], args.seed)
        print(f"{args.directory / name}: {count / 1e6:.1f} M parameters", file=sys.stderr)


if __name__ == "__main__":
    main()
