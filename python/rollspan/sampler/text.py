"""What requests say in text and sampling needs in token ids: bad words, and structures that the output must have."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

from rollspan.engine.request import Request
from rollspan.errors import RollspanError
from rollspan.sampling_rules import PATH

if TYPE_CHECKING:
    import llguidance

#: Compiled grammars that are kept for the next request with the same one.
MAX_GRAMMARS = 128


class Structure:
    """How far one output has come in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def advance(self, request: Request) -> bool:
        """Follows the token just appended; True when the output is complete and no EOS may say so."""
        self._matcher.consume_token(request.token_ids[-1])
        return self._matcher.is_stopped() and (request.params.eos_token_id is None or request.masks_stop_tokens)

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any further (it is too complex, for instance), if so."""
        return " ".join(self._matcher.get_error().split())[:300] if self._matcher.is_error() else None

    def fill(self, mask: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Writes the tokens that may come next into ``mask``, int32 ``[ceil(vocabulary / 32)]``, lowest bit first."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class TextRules:
    """The model's tokenizer, read when the first request needs it.

    Args:
        directory: the model's, with a tokenizer.json if it has one.
        vocab_size: columns of the logits.
        eos_token_ids: which tokens may end a structured output.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._path = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: Tokenizer | None = None
        self._grammar_tokenizer: llguidance.LLTokenizer | None = None
        self._grammars: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, at the beginning of a text and after a space, if that changes the first token only.

        Raises:
            RollspanError: ``unsupported_field``: the model has no tokenizer.json; ``invalid_request``: no token at all.
        """
        tokenizer = self._read("bad_words")
        sequences: list[tuple[int, ...]] = []
        for word in words:
            bare, spaced = (
                tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False).ids) for prefix in ("", " ")
            )
            if not bare:
                raise RollspanError(
                    f"{PATH}.bad_words must be words that the tokenizer knows, got {json.dumps(word)}",
                    reason="invalid_request",
                    param=f"{PATH}.bad_words",
                )
            sequences.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences.append(spaced)
        return tuple(sequences)

    def structure(self, wanted: dict[str, Any]) -> Structure:
        """Compiles ``structured_outputs``, as :class:`rollspan.sampling_params.SamplingParams` holds it.

        Raises:
            RollspanError: ``unsupported_field``: the package llguidance or the model's tokenizer.json is missing;
                ``invalid_request``: the grammar is wrong; the message says where.
        """
        path = f"{PATH}.structured_outputs"
        try:
            import llguidance
        except ImportError:
            raise RollspanError(
                f"{path} needs the package llguidance: install rollspan[structured]",
                reason="unsupported_field",
                param=path,
            ) from None
        key = json.dumps(wanted, sort_keys=True)
        if key not in self._grammars:
            if self._grammar_tokenizer is None:
                self._grammar_tokenizer = self._read_for_grammars()
            try:
                grammar = _grammar(wanted)
                matcher = llguidance.LLMatcher(self._grammar_tokenizer, grammar, log_level=0)
                fault = matcher.get_error()
            except Exception as error:  # noqa: BLE001 (parsers may raise anything; only this request pays)
                fault = str(error) or type(error).__name__
            if fault:
                text = " ".join(fault.split())[:300]
                raise RollspanError(f"{path} cannot be used: {text}", reason="invalid_request", param=path)
            self._grammars[key] = matcher
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(key)
        return Structure(self._grammars[key].deep_copy())

    def mask(self, requests: Sequence[Request]) -> torch.Tensor | None:
        """Allowed tokens of each request's next one, int32 ``[S, ceil(vocabulary / 32)]``; None where all may come."""
        bound = [(row, request.structure) for row, request in enumerate(requests) if request.structure is not None]
        if not bound:
            return None
        mask = np.full((len(requests), -(-self._vocab_size // 32)), -1, dtype=np.int32)
        width = max(self._vocab_size, self._tokenizer_size())
        row_mask = np.zeros(-(-width // 32), dtype=np.int32)  # a tokenizer may know more tokens than the model
        for row, structure in bound:
            structure.fill(row_mask)
            mask[row] = row_mask[: mask.shape[1]]
        return torch.from_numpy(mask)

    def _read_for_grammars(self) -> llguidance.LLTokenizer:
        import llguidance

        tokenizer = self._read("structured_outputs")
        size, eos = max(self._vocab_size, self._tokenizer_size()), self._eos_token_ids
        try:
            return llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=eos or None)
        except ValueError:  # its decoder is none of those that make bytes: take each token for the text it decodes to
            plain = _PlainTokenizer(tokenizer, eos[0] if eos else self._tokenizer_size() - 1)
            return llguidance.LLTokenizer(llguidance.TokenizerWrapper(plain), n_vocab=size, eos_token=eos or None)

    def _tokenizer_size(self) -> int:
        return 0 if self._tokenizer is None else int(self._tokenizer.get_vocab_size())

    def _read(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = Tokenizer.from_file(str(self._path))
            except Exception as error:  # noqa: BLE001 (the library raises plain Exception)
                fault = "has none" if not self._path.exists() else f"cannot be read: {error}"
                raise RollspanError(
                    f"{PATH}.{field} needs the model's tokenizer.json, which {fault}",
                    reason="unsupported_field",
                    param=f"{PATH}.{field}",
                ) from None
        return self._tokenizer


class _PlainTokenizer:
    """A tokenizer as llguidance's wrapper wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.special_token_ids = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
        special = {*self.special_token_ids}
        self.tokens = [
            b"" if i in special else tokenizer.decode([i]).encode() for i in range(tokenizer.get_vocab_size())
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _grammar(wanted: dict[str, Any]) -> str:
    from llguidance import LLMatcher, StructTag, grammar_from

    whitespace: dict[str, Any] = {}
    if wanted.get("disable_any_whitespace"):
        whitespace["whitespace_flexible"] = False
    if "whitespace_pattern" in wanted:
        whitespace["whitespace_pattern"] = wanted["whitespace_pattern"]
    if "json" in wanted or "json_object" in wanted:
        schema = json.loads(wanted["json"]) if "json" in wanted else {"type": "object"}
        if wanted.get("disable_additional_properties"):
            _close_objects(schema)
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=whitespace or None))  # type: ignore[arg-type]
    if "choice" in wanted:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in wanted["choice"])
        return str(grammar_from("lark", f"start: {choices}"))
    if "structural_tag" in wanted:
        tag = json.loads(wanted["structural_tag"])
        tags = [
            StructTag(
                trigger=next(trigger for trigger in tag["triggers"] if part["begin"].startswith(trigger)),
                begin=part["begin"],
                grammar=part["schema"],
                end=part["end"],
            )
            for part in tag["structures"]
        ]
        return str(StructTag.to_grammar(tags))
    return str(
        grammar_from("regex", wanted["regex"]) if "regex" in wanted else grammar_from("grammar", wanted["grammar"])
    )


def _close_objects(schema: Any) -> None:
    """Forbids the properties that an object's schema does not name, unless it speaks of them."""
    if isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for part in schema.values():
            _close_objects(part)
    elif isinstance(schema, list):
        for part in schema:
            _close_objects(part)
