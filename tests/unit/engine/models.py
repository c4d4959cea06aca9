"""Tiny random models on disk, and what transformers itself generates with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)

VOCABULARY = 96
MAX_MODEL_LEN = 64
#: Sliding windows are shorter than the prompts.
WINDOW = 7
#: Least distance of the two best logits over a whole reference output: far above the rounding of any batch or machine.
MARGIN = 1e-3

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=MAX_MODEL_LEN,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint on disk and the same model in this process."""

    path: Path
    model: PreTrainedModel

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in float32."""
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers * 2 * heads * size * 4

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """``[tokens, vocabulary]`` from the model's own attention."""
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]

    def generate(self, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """Greedy output of ``transformers`` and its smallest margin between the two best logits."""
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        best = torch.stack([scores[0] for scores in output.scores]).topk(2).values
        return output.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def make_model(directory: Path, config: PretrainedConfig, seed: int = 0, **save: Any) -> TinyModel:
    """A random model, saved in float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero by default, which would hide a bias that is lost
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory, **save)
    return TinyModel(directory, model)


def decisive_prompts(model: TinyModel, count: int, tokens: int, seed: int = 0) -> dict[tuple[int, ...], list[int]]:
    """Random prompts of 1 to 40 tokens with the greedy output of each, none of whose choices is a close call."""
    source = random.Random(seed)
    found: dict[tuple[int, ...], list[int]] = {}
    while len(found) < count:
        length = source.choice([1, 2, 5, 16, 17, 31, 40])
        prompt = [source.randrange(VOCABULARY) for _ in range(length)]
        output, margin = model.generate(prompt, tokens)
        if margin > MARGIN:
            found[tuple(prompt)] = output
    return found
