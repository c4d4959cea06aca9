"""Request: the state of one output sequence inside the engine."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from rollspan.engine.kv_cache import Parent
from rollspan.engine.kv_spans import KvSpans
from rollspan.protocol.messages import EngineCoreRequest, FinishReason, LogprobsLists, Stamp, StampSpan
from rollspan.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rollspan.sampler.text import Structure

#: Stands in token_ids for a token that a launched step is sampling.
PENDING = -1


class RequestStatus(Enum):
    """Where a request stands; PREEMPTED is waiting again after its KV blocks were taken away."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """One output sequence: known tokens (prompt and output) against tokens whose keys and values are computed.

    Attributes:
        token_ids: prompt, then output.
        num_prompt_tokens: length of the prompt.
        num_computed_tokens: leading tokens whose KV is in ``block_ids``.
        block_ids: KV blocks, in order of position.
        num_registered_tokens: leading tokens whose blocks are in the prefix cache, or were found in it.
        parent: what the next registered block continues; None while the KV is of no single commit, or not cacheable.
        num_cached_tokens: prompt tokens whose KV was found in the prefix cache when the request first ran.
        order: sort key: lower priority value first, then first come, first served.
        prompt_logprobs: of the prompt so far, when asked for: one entry a chunk.
        num_scored_tokens: leading prompt tokens that have their log-probs.
        prompt_spans: which weights scored them.
        kv: which weights computed its KV; None where the request does not ask.
        first_commit: of the weights that sampled the first token; None before that.
        admission: stamp of the weights when the request entered the scheduler.
        arrival: order of admission, breaks ties of priority.
        max_num_tokens: known tokens at which the output has its full length.
        structure: how far the output has come in the grammar that it must follow, if there is one.
    """

    __slots__ = (
        "admission",
        "announced",
        "arrival",
        "block_ids",
        "cache_salt",
        "client_index",
        "finish_reason",
        "first_commit",
        "kv",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_registered_tokens",
        "num_scored_tokens",
        "order",
        "params",
        "parent",
        "priority",
        "prompt_logprobs",
        "prompt_spans",
        "provenance",
        "request_id",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "structure",
        "token_ids",
    )

    def __init__(self, message: EngineCoreRequest, *, admission: Stamp, arrival: int, seed: int) -> None:
        self.request_id = message.request_id
        self.client_index = message.client_index
        self.priority = message.priority
        self.params: SamplingParams = message.sampling_params
        self.provenance = message.provenance
        self.token_ids: list[int] = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.cache_salt = message.cache_salt
        self.num_registered_tokens = 0
        self.parent: Parent | None = None
        self.num_cached_tokens = 0
        self.order = (message.priority, arrival)
        self.prompt_logprobs: list[LogprobsLists] = []
        self.num_scored_tokens = 1  # nothing predicts the first one
        self.prompt_spans: list[StampSpan] = []
        self.kv = KvSpans() if message.provenance.return_kv_versions else None
        self.first_commit: int | None = None
        self.admission = admission
        self.announced = False
        self.arrival = arrival
        self.seed = seed
        self.status = RequestStatus.WAITING
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + (self.params.max_tokens or 2**62)
        self.structure: Structure | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that the model has not seen yet; 1 in the steady state of decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """False for a request that wants every token of its prompt computed, or needs their logits."""
        scoring = self.params.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens
        return not (scoring or self.params.skip_reading_prefix_cache)

    @property
    def masks_stop_tokens(self) -> bool:
        """True while min_tokens forbids the tokens that would end the output."""
        return self.num_output_tokens < self.params.min_tokens

    def add_prompt_logprobs(self, scores: LogprobsLists, start: int, stop: int, stamp: Stamp) -> None:
        """Files the log-probs of prompt tokens ``start`` to ``stop - 1``, which continue those so far."""
        self.prompt_logprobs.append(scores)
        self.num_scored_tokens = stop
        if self.prompt_spans and self.prompt_spans[-1][:2] == stamp:
            start = self.prompt_spans.pop()[2]
        self.prompt_spans.append((*stamp, start, stop))

    def take_prompt_logprobs(self) -> LogprobsLists | None:
        """The prompt's log-probs as one, which are forgotten here; None where they were not asked for."""
        pieces, self.prompt_logprobs = self.prompt_logprobs, []
        if not pieces:
            return None
        arrays = ([getattr(piece, name) for piece in pieces] for name in ("token_ids", "logprobs", "sampled_ranks"))
        return LogprobsLists(*map(np.concatenate, arrays))

    @property
    def reads_output(self) -> bool:
        """True when what comes next depends on the output's tokens themselves, not only on their number."""
        params = self.params
        return bool(
            self.structure is not None
            or params.bad_words_token_ids
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1
        )

    def reserve(self) -> int:
        """Makes room for the token that a launched step samples, :data:`PENDING` until then; returns its index."""
        self.token_ids.append(PENDING)
        return len(self.token_ids) - 1

    def settle(self, index: int, token_id: int) -> None:
        """Puts a sampled token into its place and sets ``finish_reason`` when it ends the output.

        EOS ends it with no stop reason, a stop token with its id as the reason; either is part of the output. Room
        that was made for later tokens is given up then.
        """
        self.token_ids[index] = token_id
        length = index + 1 - self.num_prompt_tokens
        if length >= self.params.min_tokens and token_id == self.params.eos_token_id:
            self.finish_reason = FinishReason.STOP
        elif length >= self.params.min_tokens and token_id in self.stop_token_ids:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = token_id
        elif self.structure is not None and self.structure.advance(self):
            self.finish_reason = FinishReason.STOP
        elif index + 1 >= self.max_num_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            del self.token_ids[index + 1 :]
