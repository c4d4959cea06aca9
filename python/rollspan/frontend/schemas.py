"""The body of POST /inference/v1/generate: every field, what it may be, and the words of its refusal. No I/O.

``rust/generate`` holds the twin of this page; ``tests/conformance/generate_validation.json`` holds both to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollspan import provenance
from rollspan.admission import (
    PRIORITY_ALLOWED,
    check_cache_salt,
    check_prompt_length,
    check_request_id,
    check_token_ids,
)
from rollspan.errors import RollspanError, cut, wrong_value
from rollspan.frontend.strict_json import parse_object
from rollspan.protocol.messages import EngineHello
from rollspan.provenance import Provenance
from rollspan.sampling_params import SamplingParams
from rollspan.sampling_rules import PATH as SAMPLING
from rollspan.sampling_rules import check_neutral, is_int

BOOLEAN_ALLOWED = "true or false"
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_weight_versions")

#: Known fields without an implementation, in the order in which they are checked, and the values that change nothing.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "response_format": ("objects",),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
    "features": (None,),
    "content_parts": (None,),
    "token_offsets": (None,),
    "parse_context": (None,),
    "reasoning_ended": (None,),
    "reasoning_parser_kwargs": (None,),
}

_KNOWN_FIELDS = {
    *NEUTRAL_FIELDS,
    *provenance.RULES,
    "token_ids",
    "request_id",
    "model",
    "stream",
    "stream_options",
    "output_mode",
    "return_token_ids",
    "priority",
    "cache_salt",
    "sampling_params",
}


@dataclass(frozen=True)
class GenerateRequest:
    """A validated generate request.

    Attributes:
        token_ids: the prompt; every id is in the vocabulary and one output token has room behind it.
        request_id: the client's id (header before body), or None.
        stream: answer with server-sent events.
        include_usage: stream: a last chunk with the usage.
        continuous_usage_stats: stream: the usage so far on every chunk (only with ``include_usage``).
        include_weight_versions: stream: spans on every chunk.
        return_token_ids: give the prompt back.
        priority: lower runs earlier, where the engine has a priority policy.
        cache_salt: separates prefix-cache entries, or None.
        provenance: bounds on the weights, and what is told of the KV.
        sampling_params: ``max_tokens`` is set and leaves the prompt its room.
        ignored_fields: dotted names of unknown fields, sorted.
    """

    token_ids: list[int]
    request_id: str | None
    stream: bool
    include_usage: bool
    continuous_usage_stats: bool
    include_weight_versions: bool
    return_token_ids: bool
    priority: int
    cache_salt: str | None
    provenance: Provenance
    sampling_params: SamplingParams
    ignored_fields: tuple[str, ...]


def parse_generate(body: bytes, header_request_id: str | None, hello: EngineHello, strict: bool) -> GenerateRequest:
    """Parses and validates a request body; the first failure wins.

    Args:
        body: the request body.
        header_request_id: value of ``X-Request-Id``, which wins over the body's ``request_id``.
        hello: the engine's limits and its model's name.
        strict: refuse unknown fields (``--strict-requests``).

    Raises:
        RollspanError: with the reason, the path of the field at fault, and what is allowed there.
    """
    fields = parse_object(body)
    token_ids = _token_ids(fields, hello)
    request_id = _request_id(fields, header_request_id)
    model = _checked(fields, "model", "a string", _is_string, None)
    stream = _boolean(fields, "stream")
    options, unknown_options = _stream_options(fields)
    if fields.get("output_mode") is not None:
        check_neutral("output_mode", fields["output_mode"], ("tokens",))
    return_token_ids = _boolean(fields, "return_token_ids")
    priority = _checked(fields, "priority", PRIORITY_ALLOWED, lambda v: is_int(v, -(2**31), 2**31 - 1), 0)
    cache_salt = check_cache_salt(fields.get("cache_salt"))
    asked = Provenance.from_fields({name: value for name, value in fields.items() if value is not None})
    for name, neutral in NEUTRAL_FIELDS.items():
        check_neutral(name, fields.get(name), neutral)
    sampling_params, unknown_sampling = _sampling_params(fields, len(token_ids), hello)
    check_model(model, hello.model.name)
    check_prompt_length(token_ids, hello.limits)
    unknown = {name for name in fields if name not in _KNOWN_FIELDS}
    unknown |= {f"stream_options.{name}" for name in unknown_options}
    unknown |= {f"{SAMPLING}.{name}" for name in unknown_sampling}
    ignored = tuple(sorted(unknown))
    if strict:
        refuse_unknown(ignored)
    return GenerateRequest(
        token_ids=token_ids,
        request_id=request_id,
        stream=stream,
        include_usage=options["include_usage"],
        continuous_usage_stats=options["include_usage"] and options["continuous_usage_stats"],
        include_weight_versions=options["include_weight_versions"],
        return_token_ids=return_token_ids,
        priority=priority,
        cache_salt=cache_salt,
        provenance=asked,
        sampling_params=sampling_params,
        ignored_fields=ignored,
    )


def check_model(model: str | None, served: str) -> None:
    """Refuses a model name other than the served one.

    Raises:
        RollspanError: ``model_not_found``.
    """
    if model is not None and model != served:
        raise RollspanError(
            f'model "{cut(model)}" does not exist; this server serves "{served}"',
            reason="model_not_found",
            param="model",
        )


def refuse_unknown(names: tuple[str, ...]) -> None:
    """Refuses a request with unknown fields (strict mode).

    Raises:
        RollspanError: ``unknown_field`` naming them all.
    """
    if names:
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        listed = ", ".join(map(cut, names[:20])) + more
        raise RollspanError(f"unknown fields: {listed}", reason="unknown_field", param=cut(names[0]))


def _token_ids(fields: dict[str, Any], hello: EngineHello) -> list[int]:
    if "token_ids" not in fields:
        raise _missing("token_ids")
    return check_token_ids(fields["token_ids"], hello.limits)


def _request_id(fields: dict[str, Any], header: str | None) -> str | None:
    if header is not None:
        return check_request_id(header, "X-Request-Id")
    value = fields.get("request_id")
    return None if value is None else check_request_id(value, "request_id")


def _stream_options(fields: dict[str, Any]) -> tuple[dict[str, bool], list[str]]:
    """The three flags, and the names of unknown keys."""
    options = fields.get("stream_options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise wrong_value("stream_options", "an object", options)
    flags = {name: _boolean(options, name, "stream_options.") for name in STREAM_OPTIONS}
    return flags, [name for name in options if name not in flags]


def _sampling_params(
    fields: dict[str, Any], prompt_length: int, hello: EngineHello
) -> tuple[SamplingParams, list[str]]:
    """The parameters with ``max_tokens`` clamped to the room that the prompt leaves, and the names of unknown keys."""
    if SAMPLING not in fields:
        raise _missing(SAMPLING)
    mapping = fields[SAMPLING]
    if not isinstance(mapping, dict):
        raise wrong_value(SAMPLING, "an object", mapping)
    room = hello.limits.max_model_len - prompt_length
    max_tokens = mapping.get("max_tokens")
    if room >= 1 and (max_tokens is None or is_int(max_tokens, room, 2**63 - 1)):
        mapping = {**mapping, "max_tokens": room}
    return SamplingParams.parse(mapping, vocab_size=hello.limits.vocab_size, max_logprobs=hello.limits.max_logprobs)


def _checked(
    fields: dict[str, Any], name: str, allowed: str, check: Callable[[Any], bool], default: Any, prefix: str = ""
) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not check(value):
        raise wrong_value(f"{prefix}{name}", allowed, value)
    return value


def _boolean(fields: dict[str, Any], name: str, prefix: str = "") -> bool:
    return bool(_checked(fields, name, BOOLEAN_ALLOWED, lambda v: isinstance(v, bool), False, prefix))


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _missing(path: str) -> RollspanError:
    return RollspanError(f"{path} is required", reason="invalid_request", param=path)
