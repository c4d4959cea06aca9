"""RequestOutput -> the JSON of collected answers and stream chunks. Pure; ``rust/generate`` is the twin."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rollspan.frontend.schemas import GenerateRequest
from rollspan.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput

#: What JSON shows for log-probs that it cannot hold (vLLM's rule).
MINIMUM_LOGPROB = -9999.0


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object; all counts in tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": None,
    }


def collected(request: GenerateRequest, output: RequestOutput, model: str, created: int) -> dict[str, Any]:
    """The answer of a request that did not ask for a stream.

    Args:
        request: the validated request.
        output: its final output.
        model: name of the served model.
        created: Unix time in seconds.
    """
    completion_tokens = sum(len(choice.token_ids) for choice in output.outputs)
    result = {
        "request_id": output.request_id,
        "model": model,
        "created": created,
        "output_mode": "tokens",
        "usage": usage(len(request.token_ids), completion_tokens, output.num_cached_tokens),
        "engine_index": output.engine_index,
        "weight_version": output.weight_version,
        "weight_commit": output.weight_commit,
        "prompt_token_ids": request.token_ids if request.return_token_ids else None,
        "prompt_logprobs": prompt_logprobs(output),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "choices": [_choice(request, choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)],
    }
    if output.prompt_logprobs is not None:
        result["prompt_weight_commits"] = output.prompt_weight_spans
    return result


def _choice(request: GenerateRequest, choice: CompletionOutput) -> dict[str, Any]:
    fields = {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": _logprobs(request, choice),
        "routed_experts": None if choice.routed_experts is None else npy(choice.routed_experts),
        "weight_versions": choice.weight_versions,
        "weight_commits": choice.weight_commits,
    }
    if request.provenance.return_kv_versions:
        fields["kv_versions"] = choice.kv_versions
    return fields


def chunk(
    request: GenerateRequest, output: RequestOutput, choice: CompletionOutput, model: str, created: int
) -> dict[str, Any]:
    """One chunk of a stream: the new tokens of one choice, and on its last chunk everything about the whole of it."""
    fields: dict[str, Any] = {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
    }
    if request.sampling_params.logprobs is not None:
        fields["logprobs"] = _logprobs(request, choice)
    result: dict[str, Any] = {"request_id": output.request_id, "choices": [fields]}
    if output.prompt_logprobs is not None and choice.index == 0:
        result["prompt_logprobs"] = prompt_logprobs(output)
        result["prompt_weight_commits"] = output.prompt_weight_spans
    if choice.finished():
        fields["stop_reason"] = choice.stop_reason
        if choice.routed_experts is not None:
            fields["routed_experts"] = npy(choice.routed_experts)
        if request.provenance.return_kv_versions:
            fields["kv_versions"] = choice.kv_versions
        result["model"] = model
        result["created"] = created
        result["engine_index"] = output.engine_index
        result["weight_version"] = output.weight_version
        result["weight_commit"] = output.weight_commit
    if choice.finished() or request.include_weight_versions:
        fields["weight_versions"] = choice.weight_versions
        fields["weight_commits"] = choice.weight_commits
    return result


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """Null for the prompt's first token, then an object of candidates by their ids, the token itself first."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": f"token_id:{token}"}
            for token, entry in position.items()
        }
        for position in output.prompt_logprobs
    ]


def npy(array: npt.NDArray[Any]) -> str:
    """``array`` as the base64 of a ``.npy`` file, format 1.0."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode("ascii")


def _finite(entry: Logprob) -> float:
    return entry.logprob if math.isfinite(entry.logprob) else MINIMUM_LOGPROB


def _logprobs(request: GenerateRequest, choice: CompletionOutput) -> dict[str, Any] | None:
    if request.sampling_params.logprobs is None:
        return None
    return {"content": [_position(position) for position in choice.logprobs or []]}


def _position(position: PositionLogprobs) -> dict[str, Any]:
    """One token's entry: its own log-prob first, then ``top_logprobs`` with it and the most probable ones."""
    top = [
        {
            "token": f"token_id:{token}",
            "token_id": token,
            "logprob": _finite(entry),
            "rank": entry.rank,
        }
        for token, entry in position.items()
    ]
    return {**top[0], "top_logprobs": top}
