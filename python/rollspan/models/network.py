"""The tiny Qwen3 that is trained, its tokenizer, and how both are written as a Hugging Face directory."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollspan.models import task

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

MAX_POSITIONS = 512


def build_network(seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised network of about 100 000 parameters, fp32, head untied so that it can be changed alone."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(task.VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        use_cache=True,
        bos_token_id=task.BOS,
        eos_token_id=task.EOS,
        pad_token_id=task.PAD,
        dtype="float32",
        initializer_range=0.05,
    )
    config._attn_implementation = "sdpa"
    return Qwen3ForCausalLM(config)


def cache_argument(network: Any, cache: Any) -> dict[str, Any]:
    """``cache`` as a keyword argument of the network's forward; transformers 5.24 renamed it from past_key_values."""
    known = inspect.signature(type(network).forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache, "use_cache": True}


def build_tokenizer() -> Tokenizer:
    """Character tokenizer over task.VOCABULARY; encoding puts ``<bos>`` in front unless special tokens are off."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {token: index for index, token in enumerate(task.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=task.UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in (*task.SPECIAL_TOKENS, task.UNKNOWN_TOKEN)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", task.BOS)]
    )
    return tokenizer


def save_checkpoint(network: Qwen3ForCausalLM, directory: Path, card: str) -> None:
    """Write config, generation config, weights (one model.safetensors), tokenizer and model card into ``directory``."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    network.generation_config = GenerationConfig(
        bos_token_id=task.BOS, eos_token_id=task.EOS, pad_token_id=task.PAD, do_sample=True, max_new_tokens=8
    )
    network.save_pretrained(directory)
    # Written through a private temporary file; packages need it readable by everybody.
    (directory / "model.safetensors").chmod(0o644)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token=task.UNKNOWN_TOKEN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(directory)
    # The class name that transformers 4 and 5 both know; where the tokenizer was loaded from is of no use to anybody.
    settings_path = directory / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("is_local", None)
    settings.pop("local_files_only", None)
    settings_path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    (directory / "README.md").write_text(card)
