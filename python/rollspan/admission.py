"""From what a caller asks to what the engine takes: checks against its limits, and one engine request a sequence."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollspan.errors import RollspanError, wrong_value
from rollspan.protocol.messages import EngineCoreRequest, EngineHello, Limits
from rollspan.provenance import NO_PROVENANCE, Provenance
from rollspan.sampling_params import SamplingParams
from rollspan.sampling_rules import MAX_INT64, is_int

MAX_REQUEST_ID_CHARACTERS = 256
MAX_CACHE_SALT_CHARACTERS = 1024
REQUEST_ID_ALLOWED = f"a string of 1 to {MAX_REQUEST_ID_CHARACTERS} characters without control characters"
CACHE_SALT_ALLOWED = f"a string of 1 to {MAX_CACHE_SALT_CHARACTERS} characters"
PRIORITY_ALLOWED = f"an integer from {-(2**31)} to {2**31 - 1}"

Prompt = Sequence[int] | Mapping[str, Any]
"""Token ids, or vLLM's tokens prompt ``{"prompt_token_ids": [...]}``."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A checked request: its external id, prompt, resolved parameters and what goes to the engine."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    engine_requests: list[EngineCoreRequest]


def check_token_ids(value: Any, limits: Limits, path: str = "token_ids") -> list[int]:
    """Returns ``value`` when it is a non-empty list of ids below the vocabulary size.

    Raises:
        RollspanError: ``invalid_request`` naming the first element at fault.
    """
    vocab_size = limits.vocab_size
    allowed = f"a non-empty list of integers from 0 to {vocab_size - 1}"
    if not isinstance(value, list) or not value:
        raise wrong_value(path, allowed, value)
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise wrong_value(path, allowed, token, index)
    return value


def check_prompt_length(token_ids: Sequence[int], limits: Limits) -> None:
    """Refuses a prompt that leaves no room for one output token.

    Raises:
        RollspanError: ``prompt_too_long``.
    """
    most = limits.max_model_len - 1
    if len(token_ids) > most:
        raise RollspanError(
            f"token_ids must hold at most {most} tokens (max_model_len {limits.max_model_len} leaves room for one "
            f"output token), got {len(token_ids)}",
            reason="prompt_too_long",
            param="token_ids",
        )


def check_request_id(value: Any, path: str = "request_id") -> str:
    """Returns ``value`` when it may name a request.

    Raises:
        RollspanError: ``invalid_request`` naming ``path``.
    """
    fits = isinstance(value, str) and 1 <= len(value) <= MAX_REQUEST_ID_CHARACTERS
    if fits and not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in value):
        return str(value)
    raise wrong_value(path, REQUEST_ID_ALLOWED, value)


def check_cache_salt(value: Any) -> str | None:
    """Returns ``value`` when it may name a prefix-cache namespace, or is None.

    Raises:
        RollspanError: ``invalid_request`` naming ``cache_salt``.
    """
    if value is None or (isinstance(value, str) and 1 <= len(value) <= MAX_CACHE_SALT_CHARACTERS):
        return value
    raise wrong_value("cache_salt", CACHE_SALT_ALLOWED, value)


def admit(
    prompt: Prompt,
    sampling_params: SamplingParams,
    hello: EngineHello,
    *,
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    session_id: str | None = None,
    provenance: Provenance = NO_PROVENANCE,
) -> Admitted:
    """Checks a request against the engine's limits and splits it into one engine request for each output sequence.

    Args:
        prompt: token ids (a list, a tuple, an array) or ``{"prompt_token_ids": [...]}``.
        sampling_params: as the caller gave them, not resolved.
        hello: the engine's limits and model facts.
        request_id: external id; a random one of 32 hex digits by default.
        priority: lower is served first.
        cache_salt: prefix-cache namespace.
        session_id: handed to the engine.
        provenance: bounds on the weights, and what is told of the KV; for each of the sequences.

    Raises:
        RollspanError: ``invalid_request`` or ``prompt_too_long`` naming the parameter.
    """
    token_ids = check_token_ids(_token_list(prompt), hello.limits)
    external_id = secrets.token_hex(16) if request_id is None else check_request_id(request_id)
    if not is_int(priority, -(2**31), 2**31 - 1):
        raise wrong_value("priority", PRIORITY_ALLOWED, priority)
    check_cache_salt(cache_salt)
    sampling_params.check_model(vocab_size=hello.limits.vocab_size, max_logprobs=hello.limits.max_logprobs)
    check_prompt_length(token_ids, hello.limits)
    resolved = sampling_params.resolve(
        prompt_length=len(token_ids),
        max_model_len=hello.limits.max_model_len,
        eos_token_ids=hello.model.eos_token_ids,
    )
    # The random part keeps a late output of an aborted request apart from a new request of the same name.
    internal_id = f"{external_id}-{secrets.token_hex(4)}"
    arrival_time = time.time()
    return Admitted(
        external_id,
        token_ids,
        resolved,
        [
            EngineCoreRequest(
                request_id=internal_id if resolved.n == 1 else f"{index}_{internal_id}",
                prompt_token_ids=token_ids,
                sampling_params=_child_params(resolved, index),
                arrival_time=arrival_time,
                cache_salt=cache_salt,
                priority=priority,
                external_req_id=external_id,
                session_id=session_id,
                provenance=provenance,
            )
            for index in range(resolved.n)
        ],
    )


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of output sequence ``index``: one sequence, and a seed of its own when the request is seeded.

    The log-probs of the prompt are the same for all: the first one asks for them.
    """
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index) % (MAX_INT64 + 1)
    return dataclasses.replace(params, n=1, seed=seed, prompt_logprobs=None if index else params.prompt_logprobs)


def _token_list(prompt: Any) -> Any:
    """The ids as a plain list; anything that is not a sequence stays as it is for the check to name."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids")
    if hasattr(prompt, "tolist"):
        return prompt.tolist()
    return list(prompt) if isinstance(prompt, tuple) else prompt
