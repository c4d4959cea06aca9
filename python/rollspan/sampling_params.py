"""SamplingParams: how one request is sampled, validated on construction; and the rules of each of its fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from rollspan.errors import RollspanError, shown, wrong_value

MAX_N = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_INT64 = 2**63 - 1
PATH = "sampling_params"


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a running request holds (values as on the wire)."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


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


_BOOLEAN = Rule("true or false", lambda v: isinstance(v, bool))

#: Fields with an effect, in the order in which they are checked.
RULES: dict[str, Rule] = {
    "n": Rule(f"an integer from 1 to {MAX_N}", lambda v: is_int(v, 1, MAX_N)),
    "temperature": Rule("a number from 0 to 2", lambda v: is_number(v) and 0 <= v <= 2),
    "top_p": Rule("a number above 0 and at most 1", lambda v: is_number(v) and 0 < v <= 1),
    "top_k": Rule("an integer of at least -1", lambda v: is_int(v, -1, MAX_INT64)),
    "seed": Rule(f"an integer from -1 to {MAX_INT64}", lambda v: is_int(v, -1, MAX_INT64)),
    "max_tokens": Rule("an integer of at least 1", lambda v: is_int(v, 1, MAX_INT64)),
    "min_tokens": Rule("an integer from 0 to max_tokens", lambda v: is_int(v, 0, MAX_INT64)),
    "stop_token_ids": Rule("", lambda v: True),  # checked by _check_stop_token_ids: its words need the vocabulary
    "ignore_eos": _BOOLEAN,
    "logprobs": Rule("", lambda v: True),  # checked by _check_logprobs: its words need --max-logprobs
}

#: Fields about text: type checked, without effect because token ids come out.
TEXT_RULES: dict[str, Rule] = {
    "detokenize": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "spaces_between_special_tokens": _BOOLEAN,
    "include_stop_str_in_output": _BOOLEAN,
    "skip_reading_prefix_cache": _BOOLEAN,
    "routed_experts_prompt_start": Rule("an integer of at least 0", lambda v: is_int(v, 0, MAX_INT64)),
}

#: Known fields that are not implemented: the values that change nothing, the first one shown in the message.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "stop": (None, "", []),
    "bad_words": (None, []),
    "logit_bias": (None, {}),
    "extra_args": (None, {}),
    "watermarking": (None, False),
    "flat_logprobs": (False,),
    "stream_interval": (None, 1),
    "prompt_logprobs": (None,),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
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


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; field names are vLLM's.

    Attributes:
        n: output sequences of the request.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: smallest set of tokens whose probability reaches this is kept; 1 is off.
        top_k: number of most probable tokens kept; 0, -1 and anything from the vocabulary size on is off.
        seed: None or -1 for a random one. Token i of a seeded request depends on the seed, i and the logits only.
        max_tokens: None for all the room that the model leaves.
        min_tokens: EOS and stop tokens are masked until that many tokens are out.
        stop_token_ids: tokens that end the output; they are part of it.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: None for none, 0 for the sampled token's, k for the top k besides, -1 for the whole vocabulary.
        output_kind: what each RequestOutput holds (Python API).
        eos_token_id: set by :meth:`resolve`; None when EOS does not end the output.
        all_stop_token_ids: set by :meth:`resolve`; masked until min_tokens.

    Raises:
        RollspanError: ``invalid_request`` naming the field and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    eos_token_id: int | None = None
    all_stop_token_ids: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "max_tokens", "logprobs"):
                continue
            if not rule.check(value):
                raise wrong_value(f"{PATH}.{name}", rule.allowed, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong_value(f"{PATH}.min_tokens", RULES["min_tokens"].allowed, self.min_tokens)
        ids: Any = self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(is_int(token, 0, 2**32 - 1) for token in ids):
            raise wrong_value(f"{PATH}.stop_token_ids", "a list of token ids", self.stop_token_ids)
        if self.logprobs is not None and not is_int(self.logprobs, -1, MAX_INT64):
            raise wrong_value(f"{PATH}.logprobs", "an integer of at least -1", self.logprobs)
        if not is_int(self.output_kind, 0, 2):
            raise wrong_value(f"{PATH}.output_kind", "0, 1 or 2", self.output_kind)
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "top_p", float(self.top_p))
        object.__setattr__(self, "seed", None if self.seed == -1 else self.seed)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "output_kind", RequestOutputKind(self.output_kind))

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature < 1e-5

    @classmethod
    def parse(
        cls, mapping: Mapping[str, Any], *, vocab_size: int, max_logprobs: int
    ) -> tuple[SamplingParams, list[str]]:
        """Validates the JSON object ``sampling_params`` of a generate request.

        Args:
            mapping: the object as the client sent it.
            vocab_size: number of token ids of the model.
            max_logprobs: largest ``logprobs`` allowed.

        Returns:
            The parameters, and the names of unknown keys (sorted), which have no effect.

        Raises:
            RollspanError: ``invalid_request`` or ``unsupported_field`` naming the first field at fault.
        """
        values: dict[str, Any] = {}
        for name, rule in RULES.items():
            value = mapping.get(name)
            if value is None:
                continue
            if not rule.check(value):
                raise wrong_value(f"{PATH}.{name}", rule.allowed, value)
            if name == "min_tokens" and value > values.get("max_tokens", value):
                raise wrong_value(f"{PATH}.{name}", rule.allowed, value)
            if name == "stop_token_ids":
                _check_stop_token_ids(value, vocab_size)
            if name == "logprobs":
                _check_logprobs(value, vocab_size, max_logprobs)
            values[name] = value
        for name, rule in TEXT_RULES.items():
            value = mapping.get(name)
            if value is not None and not rule.check(value):
                raise wrong_value(f"{PATH}.{name}", rule.allowed, value)
        for name, neutral in NEUTRAL.items():
            check_neutral(f"{PATH}.{name}", mapping.get(name), neutral)
        known = RULES.keys() | TEXT_RULES.keys() | NEUTRAL.keys()
        return cls(**values), sorted(key for key in mapping if key not in known)

    def check_model(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Checks what depends on the model: stop token ids, logprobs, and that min_tokens leaves a token to sample.

        Raises:
            RollspanError: ``invalid_request`` naming the field.
        """
        _check_stop_token_ids(list(self.stop_token_ids), vocab_size)
        if self.logprobs is not None:
            _check_logprobs(self.logprobs, vocab_size, max_logprobs)
        if self.min_tokens and len({token for token in self.all_stop_token_ids if token < vocab_size}) == vocab_size:
            raise wrong_value(f"{PATH}.min_tokens", "0 where every token ends the output", self.min_tokens)

    def resolve(self, *, prompt_length: int, max_model_len: int, eos_token_ids: list[int]) -> SamplingParams:
        """Fills in what depends on model and prompt, as PROTOCOL.md says (max_tokens, EOS, stop ids).

        Args:
            prompt_length: tokens of the prompt, at most ``max_model_len - 1``.
            max_model_len: tokens of prompt and output together.
            eos_token_ids: end-of-sequence ids of the model, the main one first.

        Raises:
            RollspanError: ``invalid_request`` when min_tokens exceeds the room that is left.
        """
        room = max_model_len - prompt_length
        max_tokens = room if self.max_tokens is None else min(self.max_tokens, room)
        if self.min_tokens > max_tokens:
            raise wrong_value(f"{PATH}.min_tokens", RULES["min_tokens"].allowed, self.min_tokens)
        eos = None if self.ignore_eos or not eos_token_ids else eos_token_ids[0]
        stop = list(self.stop_token_ids)
        if not self.ignore_eos:
            stop += [token for token in eos_token_ids[1:] if token not in stop]
        return dataclasses.replace(
            self,
            max_tokens=max_tokens,
            stop_token_ids=tuple(stop),
            eos_token_id=eos,
            all_stop_token_ids=tuple(sorted({*stop, *eos_token_ids})),
        )

    def clamp(self, room: int) -> SamplingParams:
        """These parameters with max_tokens, and min_tokens with it, at most ``room``: what an engine has left."""
        if self.max_tokens is not None and self.max_tokens <= room:
            return self
        return dataclasses.replace(self, max_tokens=room, min_tokens=min(self.min_tokens, room))

    def to_wire(self) -> dict[str, Any]:
        """The sparse map of EngineCoreRequest: the keys that differ from the wire's defaults."""
        wire: dict[str, Any] = {}
        for name, default in _WIRE_DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                wire[name] = list(value) if isinstance(value, tuple) else value
        if self.eos_token_id is not None:
            wire["_eos_token_id"] = self.eos_token_id
        if self.all_stop_token_ids:
            wire["_all_stop_token_ids"] = list(self.all_stop_token_ids)
        if self.output_kind != RequestOutputKind.CUMULATIVE:
            wire["output_kind"] = int(self.output_kind)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SamplingParams:
        """Reads the map of EngineCoreRequest; absent keys take the wire's defaults (max_tokens 16), unknown keys are
        ignored, known but unimplemented ones are refused unless neutral.

        Raises:
            RollspanError: ``invalid_request`` or ``unsupported_field`` naming the field.
        """
        for name, neutral in NEUTRAL.items():
            if name != "watermarking":  # vLLM's Rust frontend always sends true: "if the engine is set up for it"
                check_neutral(f"{PATH}.{name}", wire.get(name), neutral)
        values = {name: wire.get(name, default) for name, default in _WIRE_DEFAULTS.items()}
        stops = wire.get("_all_stop_token_ids") or ()
        for name, ids in (("stop_token_ids", values["stop_token_ids"] or ()), ("_all_stop_token_ids", stops)):
            if not isinstance(ids, (list, tuple)) or not all(is_int(token, 0, 2**32 - 1) for token in ids):
                raise wrong_value(f"{PATH}.{name}", "a list of token ids", ids)
        values["stop_token_ids"] = tuple(values["stop_token_ids"] or ())
        eos = wire.get("_eos_token_id")
        if eos is not None and not is_int(eos, 0, 2**32 - 1):
            raise wrong_value(f"{PATH}._eos_token_id", "a token id", eos)
        kind = wire.get("output_kind", RequestOutputKind.CUMULATIVE)
        return cls(**values, output_kind=kind, eos_token_id=eos, all_stop_token_ids=tuple(stops))


_WIRE_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop_token_ids": (),
    "ignore_eos": False,
    "logprobs": None,
}


def _check_stop_token_ids(value: Any, vocab_size: int) -> None:
    path = f"{PATH}.stop_token_ids"
    allowed = f"a list of at most {MAX_STOP_TOKEN_IDS} integers from 0 to {vocab_size - 1}"
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKEN_IDS:
        raise wrong_value(path, allowed, value)
    for index, token in enumerate(value):
        if not is_int(token, 0, vocab_size - 1):
            raise wrong_value(path, allowed, token, index)


def _check_logprobs(value: Any, vocab_size: int, max_logprobs: int) -> None:
    allowed = f"an integer from -1 to {max_logprobs}"
    if not is_int(value, -1, max_logprobs) or (value == -1 and vocab_size > max_logprobs):
        suffix = "" if value != -1 else f" (-1 needs a vocabulary of at most {max_logprobs})"
        raise wrong_value(f"{PATH}.logprobs", allowed + suffix, value)
