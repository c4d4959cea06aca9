"""Request: the state of one output sequence inside the engine."""

from __future__ import annotations

from enum import Enum

from rollspan.protocol.messages import EngineCoreRequest, FinishReason
from rollspan.sampling_params import SamplingParams

#: (label, commit number) of a set of weights.
Stamp = tuple[str, int]


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
        admission: stamp of the weights when the request entered the scheduler.
        arrival: order of admission, breaks ties of priority.
    """

    __slots__ = (
        "admission",
        "announced",
        "arrival",
        "block_ids",
        "client_index",
        "finish_reason",
        "num_computed_tokens",
        "num_prompt_tokens",
        "params",
        "priority",
        "request_id",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, message: EngineCoreRequest, *, admission: Stamp, arrival: int, seed: int) -> None:
        self.request_id = message.request_id
        self.client_index = message.client_index
        self.priority = message.priority
        self.params: SamplingParams = message.sampling_params
        self.token_ids: list[int] = list(message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.admission = admission
        self.announced = False
        self.arrival = arrival
        self.seed = seed
        self.status = RequestStatus.WAITING
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None

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
    def order(self) -> tuple[int, int]:
        """Sort key: lower priority value first, then first come, first served."""
        return (self.priority, self.arrival)

    @property
    def masks_stop_tokens(self) -> bool:
        """True while min_tokens forbids the tokens that would end the output."""
        return self.num_output_tokens < self.params.min_tokens

    def append(self, token_id: int) -> None:
        """Adds a sampled token and sets ``finish_reason`` when it ends the output.

        EOS ends it with no stop reason, a stop token with its id as the reason; either is part of the output.
        """
        self.token_ids.append(token_id)
        if self.num_output_tokens >= self.params.min_tokens:
            if token_id == self.params.eos_token_id:
                self.finish_reason = FinishReason.STOP
                return
            if token_id in self.stop_token_ids:
                self.finish_reason = FinishReason.STOP
                self.stop_reason = token_id
                return
        limit = self.params.max_tokens
        if limit is not None and self.num_output_tokens >= limit:
            self.finish_reason = FinishReason.LENGTH
