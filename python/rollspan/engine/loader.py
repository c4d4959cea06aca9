"""Loading a Hugging Face causal LM from a directory, or saying clearly why not."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rollspan.config import EngineConfig
from rollspan.engine import attention
from rollspan.errors import RollspanError
from rollspan.protocol.messages import ModelFacts

logger = logging.getLogger("rollspan.engine")

#: Kinds of layers that the paged attention computes; models with others are refused by name.
LAYER_TYPES = {"full_attention", "sliding_attention"}


def _refuse(message: str) -> RollspanError:
    return RollspanError(message, reason="weights_invalid", param="model")


def select_device(name: str) -> torch.device:
    """``auto`` becomes cuda where there is a GPU, else cpu.

    Raises:
        RollspanError: the device does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise RollspanError(f"device {name} does not exist on this machine", reason="invalid_request", param="device")
    return device


def load_model(config: EngineConfig, device: torch.device) -> tuple[PreTrainedModel, ModelFacts]:
    """Loads ``config.model`` with the paged attention selected.

    Returns:
        The model in evaluation mode on ``device``, and what clients are told of it.

    Raises:
        RollspanError: ``weights_invalid`` for a missing or broken directory, missing tensors or wrong shapes, or a
            kind of model that the engine cannot compute.
    """
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its reports are tables; ours are the refusals below
    directory = config.model_directory()
    try:
        model_config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        _check_layers(model_config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
            attn_implementation=attention.NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,  # code that comes with weights is never run, and nobody is asked
            ignore_mismatched_sizes=True,  # they are in the report, by name
            output_loading_info=True,
        )
        model: PreTrainedModel = loaded[0]
        _check_report(config.model, loaded[1])
        model.to(device)  # type: ignore[arg-type]
        model.requires_grad_(False)
        model.eval()
        if device.type == "cpu":
            # Loading maps the files: whoever overwrites them would change weights under an unchanged label.
            for weights in (*model.parameters(), *model.buffers()):
                weights.data = weights.data.clone()
        return model, _facts(config, directory, model, device)
    except RollspanError:
        raise
    except Exception as error:  # configurations and model code raise anything
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise _refuse(f"model {config.model!r} has an attention of its own kind, which is not supported") from error
        raise _refuse(f"model {config.model!r} cannot be loaded: {one_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def _check_report(name: str, report: dict[str, Any]) -> None:
    wrong = [f"{key} {list(found)} instead of {list(needed)}" for key, found, needed in report["mismatched_keys"]]
    for kind, problems in (("missing tensors", report["missing_keys"]), ("tensors of a wrong shape", wrong)):
        if problems:
            raise _refuse(f"model {name!r} has {kind}: {_listed(problems)}")
    if report["unexpected_keys"]:
        logger.warning("model %r has tensors that are not used: %s", name, _listed(report["unexpected_keys"]))


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _check_layers(config: PretrainedConfig) -> None:
    text = config.get_text_config()
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if foreign:
        raise _refuse(
            f"{type(config).__name__} has layers of type {', '.join(foreign)}; "
            f"supported are {', '.join(sorted(LAYER_TYPES))}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(f"{type(config).__name__} is an encoder-decoder model; only decoders are supported")


def one_line(error: Exception) -> str:
    """Type and text of an error on one line, cut to 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def eos_token_ids(directory: Path, model_config: PretrainedConfig, vocab_size: int) -> list[int]:
    """EOS ids of generation_config.json, else of config.json; the main one first, none if there is none.

    Ids outside the vocabulary, which some checkpoints use for "none", are left out.
    """
    eos = None
    if (directory / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
    if eos is None:
        eos = getattr(model_config.get_text_config(), "eos_token_id", None)
    if eos is None:
        return []
    return [token for token in map(int, [eos] if isinstance(eos, int) else eos) if 0 <= token < vocab_size]


def vocab_size(model: PreTrainedModel) -> int:
    """Columns of the logits."""
    return int(model.get_output_embeddings().weight.shape[0])


def _facts(config: EngineConfig, directory: Path, model: PreTrainedModel, device: torch.device) -> ModelFacts:
    return ModelFacts(
        name=config.served_model_name or directory.resolve().name,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        eos_token_ids=eos_token_ids(directory, model.config, vocab_size(model)),
    )
