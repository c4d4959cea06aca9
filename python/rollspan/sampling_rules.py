"""The rules of the fields of ``sampling_params``: what each may be, in the words that both frontends use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollspan.errors import RollspanError, shown, wrong_value

MAX_N = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 256
MAX_INT64 = 2**63 - 1
PATH = "sampling_params"


def is_int(value: Any, low: int, high: int) -> bool:
    """True for an integer (no bool, no float) from ``low`` to ``high``."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any) -> bool:
    """True for a finite int or float that is no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**1000


@dataclass(frozen=True)
class Rule:
    """What one field may be: the words for the error message and the check itself. ``null`` means the default."""

    allowed: str
    check: Callable[[Any], bool]


def _number(low: float, high: float) -> Rule:
    return Rule(f"a number from {low} to {high}", lambda v: is_number(v) and low <= v <= high)


def _integer(low: int, words: str) -> Rule:
    return Rule(words, lambda v: is_int(v, low, MAX_INT64))


_BOOLEAN = Rule("true or false", lambda v: isinstance(v, bool))
_BY_VALUE = Rule("", lambda v: True)

#: Fields with an effect, in the order in which they are checked. Those without words here have a check of their own.
RULES: dict[str, Rule] = {
    "n": Rule(f"an integer from 1 to {MAX_N}", lambda v: is_int(v, 1, MAX_N)),
    "temperature": _number(0, 2),
    "top_p": Rule("a number above 0 and at most 1", lambda v: is_number(v) and 0 < v <= 1),
    "top_k": _integer(-1, "an integer of at least -1"),
    "seed": _integer(-1, f"an integer from -1 to {MAX_INT64}"),
    "max_tokens": _integer(1, "an integer of at least 1"),
    "min_tokens": _integer(0, "an integer from 0 to max_tokens"),
    "stop_token_ids": _BY_VALUE,
    "ignore_eos": _BOOLEAN,
    "logprobs": _BY_VALUE,
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "prompt_logprobs": _BY_VALUE,
    "logit_bias": _BY_VALUE,
    "allowed_token_ids": _BY_VALUE,
    "bad_words": _BY_VALUE,
    "structured_outputs": _BY_VALUE,
    "skip_reading_prefix_cache": _BOOLEAN,
    "routed_experts": _BOOLEAN,
    "routed_experts_prompt_start": _integer(0, "an integer of at least 0"),
}

#: Fields about text: type checked, without effect because token ids come out.
TEXT_RULES: dict[str, Rule] = {
    "detokenize": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "spaces_between_special_tokens": _BOOLEAN,
    "include_stop_str_in_output": _BOOLEAN,
}

#: Known fields that are not implemented: the values that change nothing, the first one shown in the message.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": (None, "", []),
    "extra_args": (None, {}),
    "watermarking": (None, False),
    "flat_logprobs": (False,),
    "stream_interval": (None, 1),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "logprob_token_ids": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "trace_decode_token_ids": (None,),
}


def check_neutral(path: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Refuses a known but unimplemented field unless its value changes nothing.

    Raises:
        RollspanError: ``unsupported_field`` naming ``path`` and the neutral value.
    """
    if value is None:
        return
    for allowed in neutral:
        numeric = is_number(value) and is_number(allowed)
        if value == allowed and (numeric or type(value) is type(allowed)):
            return
    raise RollspanError(
        f"{path} is not supported yet: leave it out or send {shown(neutral[0])}, got {shown(value)}",
        reason="unsupported_field",
        param=path,
    )


def check_token_list(name: str, value: Any, vocab_size: int, most: int | None = None) -> None:
    """Refuses what is no list of token ids; without ``most`` any number but none is allowed.

    Raises:
        RollspanError: ``invalid_request`` naming the first element at fault.
    """
    some = "a non-empty list of" if most is None else f"a list of at most {most}"
    path, allowed = f"{PATH}.{name}", f"{some} integers from 0 to {vocab_size - 1}"
    if not isinstance(value, list) or (not value if most is None else len(value) > most):
        raise wrong_value(path, allowed, value)
    for index, token in enumerate(value):
        if not is_int(token, 0, vocab_size - 1):
            raise wrong_value(path, allowed, token, index)


def check_logprobs(name: str, value: Any, vocab_size: int, max_logprobs: int) -> None:
    """Refuses a number of log-probs that a position cannot have.

    Raises:
        RollspanError: ``invalid_request`` naming the field and ``max_logprobs``.
    """
    allowed = f"an integer from -1 to {max_logprobs}"
    if not is_int(value, -1, max_logprobs) or (value == -1 and vocab_size > max_logprobs):
        suffix = "" if value != -1 else f" (-1 needs a vocabulary of at most {max_logprobs})"
        raise wrong_value(f"{PATH}.{name}", allowed + suffix, value)


def read_logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    """``value`` with its keys as token ids: an object has them as decimal strings.

    Raises:
        RollspanError: ``invalid_request`` naming the first entry at fault.
    """
    path = f"{PATH}.logit_bias"
    allowed = f"an object of token ids from 0 to {vocab_size - 1} with numbers from -100 to 100"
    if not isinstance(value, Mapping):
        raise wrong_value(path, allowed, value)
    bias: dict[int, float] = {}
    for key, number in value.items():
        token = _token_key(key)
        if token is None or token >= vocab_size or not is_number(number) or abs(number) > 100:
            raise wrong_value(path, allowed, {str(key): number})
        bias[token] = float(number)
    return bias


def _token_key(key: Any) -> int | None:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and (key[0] != "0" or key == "0"):
        return int(key)
    return key if is_int(key, 0, 2**32 - 1) else None


def check_bad_words(value: Any) -> None:
    """Refuses what is no list of short strings.

    Raises:
        RollspanError: ``invalid_request`` naming the first element at fault.
    """
    path = f"{PATH}.bad_words"
    allowed = f"a list of at most {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters"
    if not isinstance(value, (list, tuple)) or len(value) > MAX_BAD_WORDS:
        raise wrong_value(path, allowed, value)
    for index, word in enumerate(value):
        if not isinstance(word, str) or not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise wrong_value(path, allowed, word, index)


_TEXT = Rule("a non-empty string", lambda v: isinstance(v, str) and v != "")

#: The ways to say what an output must look like, of which a request names one.
STRUCTURES: dict[str, Rule] = {
    "json": Rule("a JSON schema as an object or a non-empty string", lambda v: isinstance(v, dict) or _TEXT.check(v)),
    "json_object": Rule("true", lambda v: v is True),
    "regex": _TEXT,
    "choice": Rule(
        "a non-empty list of non-empty strings",
        lambda v: isinstance(v, list) and len(v) > 0 and all(_TEXT.check(item) for item in v),
    ),
    "grammar": _TEXT,
    "structural_tag": _TEXT,
}
STRUCTURE_OPTIONS: dict[str, Rule] = {
    "disable_any_whitespace": _BOOLEAN,
    "disable_additional_properties": _BOOLEAN,
    "whitespace_pattern": _TEXT,
}


def read_structured_outputs(value: Any) -> dict[str, Any]:
    """``value`` without nulls and unknown keys, a JSON schema as its text (what it says is the engine's to judge).

    Raises:
        RollspanError: ``invalid_request`` naming the key at fault.
    """
    path = f"{PATH}.structured_outputs"
    named = [key for key in STRUCTURES if isinstance(value, Mapping) and value.get(key) is not None]
    if len(named) != 1:
        raise wrong_value(path, f"an object with exactly one of {', '.join(STRUCTURES)}", value)
    read: dict[str, Any] = {}
    for key, rule in (STRUCTURES | STRUCTURE_OPTIONS).items():
        item = value.get(key)
        if item is None:
            continue
        if not rule.check(item):
            raise wrong_value(f"{path}.{key}", rule.allowed, item)
        is_schema = key == "json" and not isinstance(item, str)
        read[key] = json.dumps(item, separators=(",", ":"), ensure_ascii=False) if is_schema else item
    return read
