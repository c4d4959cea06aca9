"""SamplingParams: how one request is sampled, validated on construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from rollspan.errors import wrong_value
from rollspan.sampling_rules import (
    MAX_INT64,
    MAX_STOP_TOKEN_IDS,
    NEUTRAL,
    PATH,
    RULES,
    STRUCTURE_OPTIONS,
    STRUCTURES,
    TEXT_RULES,
    check_bad_words,
    check_logprobs,
    check_neutral,
    check_token_list,
    is_int,
    read_logit_bias,
    read_structured_outputs,
)


class RequestOutputKind(IntEnum):
    """What each RequestOutput of a running request holds (values as on the wire)."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


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
        min_p: tokens less probable than this share of the most probable one's are dropped; 0 is off.
        presence_penalty: taken from the logit of each token that is in the output already.
        frequency_penalty: the same, once for each time it is in the output.
        repetition_penalty: logits of tokens in prompt or output are divided by it (multiplied where negative).
        prompt_logprobs: as logprobs, for the tokens of the prompt after its first.
        logit_bias: token id -> what is added to its logit.
        allowed_token_ids: the only tokens that may be sampled; None for all.
        bad_words: words that the output never holds; the engine needs the model's tokenizer.json for them.
        structured_outputs: ``{"json": schema}`` or one of regex, choice, grammar, json_object, structural_tag.
        skip_reading_prefix_cache: compute the whole prompt; None is True with prompt_logprobs only.
        routed_experts: return which experts of a mixture-of-experts model each token was routed to; None: where the
            engine was started to do so (``--enable-return-routed-experts``), as vLLM does.
        routed_experts_prompt_start: first prompt token of them.
        output_kind: what each RequestOutput holds (Python API).
        eos_token_id: set by :meth:`resolve`; None when EOS does not end the output.
        all_stop_token_ids: set by :meth:`resolve`; masked until min_tokens.
        bad_words_token_ids: bad words as token ids, from a caller that has tokenized them.

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
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    routed_experts: bool | None = None
    routed_experts_prompt_start: int = 0
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    eos_token_id: int | None = None
    all_stop_token_ids: tuple[int, ...] = field(default=(), repr=False)
    bad_words_token_ids: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, rule in RULES.items():
            value = getattr(self, name)
            if (value is not None or name not in _OPTIONAL) and not rule.check(value):
                raise wrong_value(f"{PATH}.{name}", rule.allowed, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong_value(f"{PATH}.min_tokens", RULES["min_tokens"].allowed, self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not is_int(count, -1, MAX_INT64):
                raise wrong_value(f"{PATH}.{name}", "an integer of at least -1", count)
        if not is_int(self.output_kind, 0, 2):
            raise wrong_value(f"{PATH}.output_kind", "0, 1 or 2", self.output_kind)
        check_bad_words(self.bad_words)
        normal: dict[str, Any] = {name: float(getattr(self, name)) for name in _FLOATS}
        normal["seed"] = None if self.seed == -1 else self.seed
        normal["stop_token_ids"] = _token_ids("stop_token_ids", self.stop_token_ids)
        normal["output_kind"] = RequestOutputKind(self.output_kind)
        normal["bad_words"] = tuple(self.bad_words)
        if self.logit_bias is not None:
            normal["logit_bias"] = read_logit_bias(self.logit_bias, 2**32) or None
        if self.allowed_token_ids is not None:
            normal["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
        if self.structured_outputs is not None:
            normal["structured_outputs"] = read_structured_outputs(self.structured_outputs)
        for name, value in normal.items():
            object.__setattr__(self, name, value)

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
            max_logprobs: largest ``logprobs`` and ``prompt_logprobs`` allowed.

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
            _check_value(name, value, vocab_size, max_logprobs)
            values[name] = value
        for name, rule in TEXT_RULES.items():
            value = mapping.get(name)
            if value is not None and not rule.check(value):
                raise wrong_value(f"{PATH}.{name}", rule.allowed, value)
        for name, neutral in NEUTRAL.items():
            check_neutral(f"{PATH}.{name}", mapping.get(name), neutral)
        known = RULES.keys() | TEXT_RULES.keys() | NEUTRAL.keys()
        structures = values.get("structured_outputs", {}).keys() - STRUCTURES.keys() - STRUCTURE_OPTIONS.keys()
        unknown = [key for key in mapping if key not in known] + [f"structured_outputs.{key}" for key in structures]
        return cls(**values), sorted(unknown)

    def check_model(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Checks what depends on the model: token ids, log-probs, and that min_tokens leaves a token to sample.

        Raises:
            RollspanError: ``invalid_request`` naming the field.
        """
        for name in RULES:
            value = getattr(self, name)
            if value is not None:
                _check_value(name, list(value) if isinstance(value, tuple) else value, vocab_size, max_logprobs)
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
        if self.output_kind != RequestOutputKind.CUMULATIVE:
            wire["output_kind"] = int(self.output_kind)
        if self.eos_token_id is not None:
            wire["_eos_token_id"] = self.eos_token_id
        if self.all_stop_token_ids:
            wire["_all_stop_token_ids"] = list(self.all_stop_token_ids)
        if self.bad_words_token_ids:
            wire["_bad_words_token_ids"] = [list(ids) for ids in self.bad_words_token_ids]
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
        for name in ("stop_token_ids", "bad_words"):
            values[name] = values[name] or ()
        eos = wire.get("_eos_token_id")
        if eos is not None and not is_int(eos, 0, 2**32 - 1):
            raise wrong_value(f"{PATH}._eos_token_id", "a token id", eos)
        bad_words: Any = wire.get("_bad_words_token_ids") or ()
        if not isinstance(bad_words, (list, tuple)) or not all(bad_words):
            raise wrong_value(f"{PATH}._bad_words_token_ids", "a list of lists of token ids", bad_words)
        return cls(
            **values,
            output_kind=wire.get("output_kind", RequestOutputKind.CUMULATIVE),
            eos_token_id=eos,
            all_stop_token_ids=_token_ids("_all_stop_token_ids", wire.get("_all_stop_token_ids") or ()),
            bad_words_token_ids=tuple(_token_ids("_bad_words_token_ids", ids) for ids in bad_words),
        )


_OPTIONAL = {"seed", "max_tokens", "skip_reading_prefix_cache", "routed_experts"}
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_WIRE_DEFAULTS: dict[str, Any] = {
    name.name: 16 if name.name == "max_tokens" else name.default
    for name in dataclasses.fields(SamplingParams)
    if name.name in RULES
}


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(is_int(token, 0, 2**32 - 1) for token in value):
        raise wrong_value(f"{PATH}.{name}", "a list of token ids", value)
    return tuple(value)


def _check_value(name: str, value: Any, vocab_size: int, max_logprobs: int) -> None:
    """The checks that `RULES` leaves open, as their words need the model or name an element."""
    if name == "stop_token_ids":
        check_token_list(name, value, vocab_size, MAX_STOP_TOKEN_IDS)
    elif name == "allowed_token_ids":
        check_token_list(name, value, vocab_size)
    elif name in ("logprobs", "prompt_logprobs"):
        check_logprobs(name, value, vocab_size, max_logprobs)
    elif name == "logit_bias":
        read_logit_bias(value, vocab_size)
    elif name == "bad_words":
        check_bad_words(value)
    elif name == "structured_outputs":
        read_structured_outputs(value)
