"""EngineConfig: everything an EngineCore is started with. Command-line flags are derived from these fields."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollspan.errors import RollspanError, check_label, shown
from rollspan.sampling_rules import is_int, is_number

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOGPROBS_MODES = ("processed", "raw")
WEIGHT_UPDATE_MODES = ("staged", "in_place")
WEIGHT_TRANSFER_BACKENDS = ("disk", "http", "shm", "distributed", "nccl", "gloo", "cuda_ipc", "ipc")


def _option(default: Any, help_text: str, **metadata: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, **metadata})


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of one EngineCore; each field is the flag ``--field-name`` of ``rollspan serve``.

    Raises:
        RollspanError: ``invalid_request`` naming the field and what is allowed.
    """

    model: str = _option("", "directory of a Hugging Face causal LM (config.json, safetensors)", positional=True)
    served_model_name: str | None = _option(None, "name of the model in the API (default: the model's directory name)")
    dtype: str = _option("auto", "type of the weights and the KV cache; auto = the checkpoint's own", choices=DTYPES)
    device: str = _option("auto", "cpu, cuda, cuda:N or auto (cuda where there is a GPU)")
    max_model_len: int | None = _option(None, "most tokens of prompt and output together (default: the model's limit)")
    max_num_seqs: int = _option(256, "most sequences in one step")
    max_num_batched_tokens: int | None = _option(
        None,
        "most tokens in one step; longer prompts are computed in pieces (default: 512 on a CPU, where a step of more "
        "would keep running requests waiting for seconds, 2048 on CUDA; never less than --max-num-seqs)",
    )
    block_size: int = _option(16, "tokens per KV block; on CUDA devices, a multiple of 256: less is rounded up")
    enable_prefix_caching: bool = _option(True, "requests share the KV blocks of equal prefixes, within one commit")
    async_scheduling: bool | None = _option(
        None, "launch a step before the tokens of the one before are read (default: on CUDA devices)"
    )
    cuda_graphs: bool = _option(True, "on CUDA devices, launch decode steps as graphs that are recorded once")
    kv_cache_memory: int | None = _option(None, "bytes for the KV cache (default: a share of the free memory)")
    max_logprobs: int = _option(20, "largest logprobs value that a request may ask for")
    logprobs_mode: str = _option(
        "processed",
        "log-probs after temperature and truncation (what was sampled from), or the model's own",
        choices=LOGPROBS_MODES,
    )
    batch_invariant: bool = _option(
        False,
        "the same tokens and log-probs to the bit whatever else runs and however it is cut; needs CPU and float32, or "
        "bfloat16; refuses to start where a self-test finds it cannot be kept",
    )
    enable_return_routed_experts: bool = _option(False, "keep which experts computed each token, for requests that ask")
    weight_version: str | None = _option(None, "label of the weights at start (default: the label 'default')")
    weights_root: str | None = _option(None, "directory under which weight updates may be read (none: updates refused)")
    weight_update_mode: str = _option(
        "staged",
        "receive an update beside the weights in use, which takes the memory of one more copy, or over them, during a "
        "pause, where a failure leaves weights that only a complete update mends; an update may say otherwise",
        choices=WEIGHT_UPDATE_MODES,
    )
    weight_update_timeout: float = _option(
        600.0, "seconds without progress after which an open weight update is dropped"
    )
    weight_transfer_backend: str = _option(
        "disk", "how weights come when an update does not say", choices=WEIGHT_TRANSFER_BACKENDS
    )
    weights_spool: str | None = _option(None, "private directory that uploads of weights are read from", hidden=True)
    require_weight_version: bool = _option(
        False, "generate nothing before the weights have been named by an update or by /update_weight_version"
    )
    num_threads: int | None = _option(None, "compute threads (default: physical cores minus one, at least 1)")
    seed: int | None = _option(None, "seed for requests that bring none (default: a random one for each)")
    engine_index: int = _option(0, "rank of this engine", hidden=True)
    num_engines: int = _option(1, "engines in its set", hidden=True)

    def __post_init__(self) -> None:
        for name in ("model", "weights_root", "weights_spool"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        self._check("model", isinstance(self.model, str), "the path of a directory")
        for name in ("served_model_name", "weights_root", "weights_spool"):
            value = getattr(self, name)
            self._check(name, value is None or (isinstance(value, str) and value != ""), "a string that is not empty")
        for name, low in (
            ("max_num_seqs", 1),
            ("block_size", 1),
            ("max_logprobs", 0),
            ("engine_index", 0),
            ("num_engines", 1),
        ):
            self._check(name, is_int(getattr(self, name), low, 2**63 - 1), f"an integer of at least {low}")
        for name in (
            "enable_prefix_caching",
            "cuda_graphs",
            "batch_invariant",
            "enable_return_routed_experts",
            "require_weight_version",
        ):
            self._check(name, isinstance(getattr(self, name), bool), "true or false")
        self._check("async_scheduling", self.async_scheduling in (None, True, False), "true or false")
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory", "num_threads"):
            value = getattr(self, name)
            least = 2 if name == "max_model_len" else 1
            self._check(name, value is None or is_int(value, least, 2**63 - 1), f"an integer of at least {least}")
        self._check("seed", self.seed is None or is_int(self.seed, 0, 2**63 - 1), f"an integer from 0 to {2**63 - 1}")
        enough = self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_num_seqs
        self._check("max_num_batched_tokens", enough, f"at least max_num_seqs ({self.max_num_seqs})")
        for name, allowed in (
            ("dtype", DTYPES),
            ("logprobs_mode", LOGPROBS_MODES),
            ("weight_update_mode", WEIGHT_UPDATE_MODES),
            ("weight_transfer_backend", WEIGHT_TRANSFER_BACKENDS),
        ):
            self._check(name, getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        year = 365 * 86400  # far above it, deadlines are nothing that a thread can wait for
        fits = is_number(self.weight_update_timeout) and 0 < self.weight_update_timeout <= year
        self._check("weight_update_timeout", fits, f"a number of seconds above 0 and at most {year}")
        kind, _, number = str(self.device).partition(":")
        device_ok = self.device in ("auto", "cpu", "cuda") or (kind == "cuda" and number.isascii() and number.isdigit())
        self._check("device", device_ok, "auto, cpu, cuda or cuda:N")
        if self.weight_version is not None:
            check_label(self.weight_version, "weight_version")

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            value = shown(getattr(self, name))
            raise RollspanError(f"{name} must be {allowed}, got {value}", reason="invalid_request", param=name)

    def token_budget(self, device_type: str) -> int:
        """``max_num_batched_tokens``, or its default on a kind of device."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(512 if device_type == "cpu" else 2048, self.max_num_seqs)

    def model_directory(self) -> Path:
        """Where the model is, checked without loading anything.

        Raises:
            RollspanError: ``weights_invalid``: there is no directory with a config.json.
        """
        directory = Path(self.model)
        try:
            found = (directory / "config.json").is_file()
        except (OSError, ValueError):  # no possible name of a file
            found = False
        if not found:
            message = f"model {self.model!r} is no directory with a config.json"
            raise RollspanError(message, reason="weights_invalid", param="model")
        return directory

    def to_json(self) -> str:
        """This configuration as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Reads :meth:`to_json`'s form.

        Raises:
            RollspanError: ``invalid_request`` for text that is no such object.
        """
        try:
            values = json.loads(text)
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise RollspanError(f"engine configuration: {error}", reason="invalid_request") from None
