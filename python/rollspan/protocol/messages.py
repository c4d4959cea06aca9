"""The messages of the engine link as plain data; field names and order are those of PROTOCOL.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from rollspan.provenance import NO_PROVENANCE, Provenance
from rollspan.sampling_params import SamplingParams

MAGIC = "rollspan"
PROTOCOL_VERSION = (1, 0)
MAX_FRAME_BYTES = 256 * 1024 * 1024


class FinishReason(IntEnum):
    """Why an output ended (values as on the wire); ``str()`` is the word HTTP uses."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class EngineError:
    """Why one request failed: stable code, message, and whether the same request may succeed later.

    ``param`` is the dotted path of the field at fault; ``reason`` is a key of the table of errors, where that says more
    than the code.
    """

    code: str
    message: str
    retryable: bool = False
    param: str | None = None
    reason: str | None = None


#: (label, commit number) of a set of weights.
Stamp = tuple[str, int]

#: (label, commit number, start, end): positions start to end - 1 belong to those weights.
StampSpan = tuple[str, int, int, int]


@dataclass
class EngineCoreRequest:
    """One request for one output sequence.

    Attributes:
        request_id: internal id, unique among the engine's open requests.
        prompt_token_ids: at least one id, each below the vocabulary size.
        sampling_params: resolved (max_tokens set, EOS and stop ids filled in).
        arrival_time: wall clock, seconds.
        client_index: output on which the engine answers.
        priority: lower is served first.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float = 0.0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    client_index: int = 0
    priority: int = 0
    external_req_id: str | None = None
    session_id: str | None = None
    provenance: Provenance = NO_PROVENANCE


@dataclass(slots=True)
class LogprobsLists:
    """Log-probs of new tokens. Column 0 is the sampled token, columns 1..k the top-k in rank order.

    Attributes:
        token_ids: int32 ``[positions, k + 1]``.
        logprobs: float32 ``[positions, k + 1]``, natural logarithm.
        sampled_ranks: int32 ``[positions]``, 1 for the most probable token.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    sampled_ranks: npt.NDArray[np.int32]

    def __len__(self) -> int:
        """Number of positions."""
        return len(self.sampled_ranks)


@dataclass
class EngineCoreOutput:
    """What one step produced for one request.

    Attributes:
        new_token_ids: may be empty on a terminal output, may hold several tokens.
        finish_reason: set on the terminal output, after which nothing more comes for that id.
        stop_reason: the stop token id that ended the output, None for EOS.
        error: set with ``FinishReason.ERROR``.
        admission: (label, commit number) when the request entered the scheduler; on the first and last output.
        new_prompt_logprobs: of prompt tokens 1..n-1 (row i is about token i + 1; column 0 is that token), whole, with
            the output that follows the last piece of the prompt.
        kv_spans: which weights computed the KV at positions 0 to that of the first new token; with the first token
            and whenever it has changed otherwise than by growing under the message's stamp.
        prompt_spans: which weights scored prompt tokens 1..n-1; with ``new_prompt_logprobs``.
        routed_experts: integers ``[tokens, layers, top_k]``: experts of prompt and output tokens but the last, from
            ``routed_experts_prompt_start``; on the terminal output.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prefill_stats: dict[str, Any] | None = None
    error: EngineError | None = None
    admission: tuple[str, int] | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    kv_spans: list[StampSpan] | None = None
    prompt_spans: list[StampSpan] | None = None


@dataclass
class UtilityOutput:
    """Answer to a utility call: ``failure`` (with its stable ``reason``) or a result, which may be None."""

    call_id: int
    failure: str | None = None
    result: Any = None
    reason: str | None = None


@dataclass
class EngineCoreOutputs:
    """One message of the engine: a batch, a utility reply, or a wave note.

    Attributes:
        timestamp: engine's monotonic clock, seconds.
        weight_version: label of the weights that the step was launched with.
        weight_commit: their commit number.
        skipped_fields: trailing elements that the decoder did not know (not on the wire).
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: dict[str, Any] | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None
    weight_commit: int | None = None
    skipped_fields: int = 0


@dataclass(frozen=True)
class UtilityCall:
    """A call of an engine method by a frontend; ``call_id`` is an unsigned 64-bit integer."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


@dataclass(frozen=True)
class ClientHello:
    """First frame of a frontend."""

    name: str
    version: tuple[int, int] = PROTOCOL_VERSION
    role: str = "frontend"
    max_frame_bytes: int = MAX_FRAME_BYTES


@dataclass(frozen=True)
class Limits:
    """What the engine can take; tokens unless said otherwise."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_frame_bytes: int = MAX_FRAME_BYTES


@dataclass(frozen=True)
class ModelFacts:
    """What the engine serves. ``dtype`` is float32, bfloat16 or float16; ``eos_token_ids`` has the main one first."""

    name: str
    architecture: str
    dtype: str
    device: str
    num_parameters: int
    eos_token_ids: list[int]


@dataclass(frozen=True)
class EngineHello:
    """First frame of an engine that is ready."""

    limits: Limits
    model: ModelFacts
    weight_version: str
    weight_commit: int
    rollspan_version: str
    pid: int
    engine_index: int = 0
    paused: bool = False
    weight_state: str = "ready"
    version: tuple[int, int] = PROTOCOL_VERSION


@dataclass(frozen=True)
class DeadNotice:
    """Last frame of an engine that can still speak."""

    reason: str
    message: str
