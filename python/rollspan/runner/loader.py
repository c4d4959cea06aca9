"""Loading a Hugging Face causal LM from a directory, or saying clearly why not."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rollspan.config import EngineConfig
from rollspan.errors import RollspanError
from rollspan.protocol.messages import ModelFacts
from rollspan.runner import attention

logger = logging.getLogger("rollspan.engine")

#: Kinds of layers that paged attention computes; models with others need the compat runner.
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
    """Loads ``config.model``, with paged attention selected unless :func:`compat_reason` speaks against it.

    Returns:
        The model in evaluation mode on ``device``, and what clients are told of it.

    Raises:
        RollspanError: ``weights_invalid`` for a missing or broken directory, missing tensors or wrong shapes, or a
            kind of model that is no decoder.
    """
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its reports are tables; ours are the refusals below
    directory = config.model_directory()
    try:
        model_config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if getattr(model_config, "is_encoder_decoder", False):
            name = type(model_config).__name__
            raise _refuse(f"{name} is an encoder-decoder model; only decoders are supported")
        options: dict[str, Any] = {
            "dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
            "use_safetensors": True,
            "local_files_only": True,
            "trust_remote_code": False,  # code that comes with weights is never run, and nobody is asked
            "ignore_mismatched_sizes": True,  # they are in the report, by name
            "output_loading_info": True,
        }
        with Progress(directory) as progress:
            model, report = _from_pretrained(directory, not foreign_layers(model_config), options)
            _check_report(config.model, report)
            weights = [*model.parameters(), *model.buffers()]
            for tensor in progress.over(weights, "copied"):
                # Loading maps the files: whoever overwrites them would change weights under an unchanged label.
                tensor.data = tensor.data.clone() if device.type == "cpu" else tensor.data.to(device)
        model.requires_grad_(False)
        model.eval()
        return model, _facts(config, directory, model, device)
    except RollspanError:
        raise
    except Exception as error:  # configurations and model code raise anything
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


def _from_pretrained(directory: Path, paged: bool, options: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, with paged attention if that is wanted and possible, and what was amiss with its files."""
    loaded: Any
    if paged:
        try:
            loaded = AutoModelForCausalLM.from_pretrained(directory, attn_implementation=attention.NAME, **options)
            loaded[0].set_attn_implementation("eager")
            # Models that know nothing of the attention interface stay as they were made: without any causal mask.
            if loaded[0].config._attn_implementation == "eager":
                loaded[0].set_attn_implementation(attention.NAME)
                return loaded  # type: ignore[no-any-return]
        except KeyError as error:
            if error.args != (attention.NAME,):
                raise
    loaded = AutoModelForCausalLM.from_pretrained(directory, **options)
    return loaded  # type: ignore[no-any-return]


def foreign_layers(config: PretrainedConfig) -> list[str]:
    """Kinds of layers that paged attention does not compute; a model that does not tell its kinds has none here."""
    return sorted(set(getattr(config.get_text_config(), "layer_types", None) or ()) - LAYER_TYPES)


def compat_reason(model: PreTrainedModel) -> str | None:
    """Why paged attention is out of the question for a loaded model, as the end of a sentence about it; else None."""
    foreign = foreign_layers(model.config)
    if foreign:
        return f"has layers of type {', '.join(foreign)}"
    return None if model.config._attn_implementation == attention.NAME else "has an attention of its own kind"


class Progress:
    """Reports in the log how far loading is, once a second at most, and not before two seconds are over.

    Used as a context, it follows transformers' own loading; :meth:`over` follows what comes after that.
    """

    def __init__(self, directory: Path) -> None:
        self._bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        self._start = self._last = time.monotonic()
        self._last += 1.0
        self._previous: Any = None

    def __enter__(self) -> Progress:
        self._previous = transformers_logging.set_tqdm_hook(
            lambda make, args, options: self.over(args[0], "read") if args else make(*args, **options)
        )
        return self

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_tqdm_hook(self._previous)

    def over(self, items: Any, done: str) -> Iterator[Any]:
        """Yields the items of a collection; the share of those that are ``done`` is reported."""
        for index, item in enumerate(items):
            yield item
            now = time.monotonic()
            if now - self._last >= 1.0:
                self._last = now
                percent, seconds = 100 * (index + 1) // len(items), now - self._start
                logger.info("loading weights: %d %% of %.1f GB %s, %.0f s", percent, self._bytes / 1e9, done, seconds)


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
