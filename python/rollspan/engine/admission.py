"""What a request must be for this engine and its model to run it. Frontends check as well, but engines trust nobody."""

from __future__ import annotations

import dataclasses

from rollspan.config import EngineConfig
from rollspan.errors import RollspanError, wrong_value
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.runner.placement import Placement
from rollspan.sampler.text import Structure, TextRules


class Admission:
    """Checks requests against the model's limits and turns what they say in text into token ids."""

    def __init__(self, placement: Placement, config: EngineConfig, text: TextRules) -> None:
        self._placement = placement
        self._max_logprobs = config.max_logprobs
        self._text = text

    def resolve(self, message: EngineCoreRequest) -> Structure | None:
        """Checks a request; its parameters are cut to the room that is left, its bad words become token ids.

        Returns:
            The grammar that its output has to follow, at its beginning; None for none.

        Raises:
            RollspanError: naming the field and what is allowed.
        """
        vocabulary, longest = self._placement.vocab_size, self._placement.max_model_len
        ids = message.prompt_token_ids
        if not ids or max(ids) >= vocabulary or min(ids) < 0:
            raise RollspanError(
                f"prompt_token_ids must be a non-empty list of integers from 0 to {vocabulary - 1}",
                reason="invalid_request",
                param="token_ids",
            )
        if len(ids) >= longest:
            raise RollspanError(
                f"prompt_token_ids must hold at most {longest - 1} tokens, got {len(ids)}",
                reason="prompt_too_long",
                param="token_ids",
            )
        params = message.sampling_params
        if params.n != 1:
            raise wrong_value("sampling_params.n", "1: n outputs are n requests to an engine", params.n)
        if params.routed_experts and self._placement.routing is None:
            raise RollspanError(
                "sampling_params.routed_experts needs an engine that was started with --enable-return-routed-experts",
                reason="unsupported_field",
                param="sampling_params.routed_experts",
            )
        if self._placement.routing is not None and params.routed_experts_prompt_start > len(ids):
            path, allowed = "sampling_params.routed_experts_prompt_start", f"an integer from 0 to {len(ids)}"
            raise wrong_value(path, allowed, params.routed_experts_prompt_start)
        params.check_model(vocab_size=vocabulary, max_logprobs=self._max_logprobs)
        message.sampling_params = params = params.clamp(longest - len(ids))
        if params.bad_words:
            words = (*params.bad_words_token_ids, *self._text.bad_word_ids(params.bad_words))
            message.sampling_params = dataclasses.replace(params, bad_words=(), bad_words_token_ids=words)
        return None if params.structured_outputs is None else self._text.structure(params.structured_outputs)
