"""What a finished or streaming request gives back. The names are vLLM's: code written for it reads the same fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from rollspan.spans import CommitSpan, KvVersionSpan, VersionSpan, WeightSpan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True)
class Logprob:
    """Log-probability (natural logarithm) of one token at one position.

    ``rank`` counts from 1 for the most probable token of that position. ``decoded_token`` is None unless text output
    was asked for.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> log-probability, the sampled token first, then the most probable ones in rank order."""


_Position = TypeVar("_Position")


class UnreadLogprobs(ABC, Generic[_Position]):
    """What an output holds in place of a list of log-probs until that is first read."""

    __slots__ = ()

    @abstractmethod
    def read(self) -> list[_Position]:
        """The list, new at each call."""

    def as_list(self) -> list[_Position]:
        """This object, for a field of an output: whoever looks at it finds the list."""
        return cast("list[_Position]", self)


@dataclass(slots=True)
class CompletionOutput:
    """One output sequence of a request, or with DELTA outputs the piece of it that is new.

    ``weight_versions`` and ``weight_commits`` cover the *whole* sequence and are set on its final output
    (``finish_reason`` is set). On other outputs they are None, except for DELTA outputs of a request that asked for
    ``include_weight_versions``: there they cover this output's tokens. Indexes always count from the start of
    the sequence.

    ``kv_versions`` is on the final output of a request that asked to be told (``return_kv_versions``): which weights
    computed the keys and values that its tokens attended to. It covers the whole sequence.

    ``routed_experts`` is on the final output, when asked for: integers ``[tokens, layers, top_k]`` for the tokens of
    prompt (from ``routed_experts_prompt_start``) and output but the last one, which no expert has seen.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionSpan] | None = None
    weight_commits: list[CommitSpan] | None = None
    kv_versions: list[KvVersionSpan] | None = None
    routed_experts: npt.NDArray[np.integer[Any]] | None = None

    def finished(self) -> bool:
        """True for the final output of this sequence."""
        return self.finish_reason is not None

    def add(self, following: CompletionOutput) -> None:
        """Append the next DELTA output of the same sequence to this one. The spans become those of the later output."""
        if self.finished() or following.finished():
            # The final output's spans cover everything already; those of an earlier final output would be stale.
            self.weight_versions = following.weight_versions
            self.weight_commits = following.weight_commits
        else:
            tokens = len(self.token_ids)
            self.weight_versions = _join(self.weight_versions, following.weight_versions, "version", tokens)
            self.weight_commits = _join(self.weight_commits, following.weight_commits, "commit", tokens)
        self.text += following.text
        self.token_ids.extend(following.token_ids)
        if following.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(following.logprobs)
        self.cumulative_logprob = following.cumulative_logprob
        self.finish_reason = following.finish_reason
        self.stop_reason = following.stop_reason
        self.kv_versions = following.kv_versions
        self.routed_experts = following.routed_experts


@dataclass(slots=True)
class RequestOutput:
    """Output of one request: its sequences and the weights it was admitted under.

    ``weight_version`` and ``weight_commit`` are the label and commit number in force when the request entered the
    scheduler; for n > 1 each is None when the sequences' differ. ``num_cached_tokens`` counts prompt tokens whose keys
    and values came from the prefix cache, for n > 1 those of the first sequence.

    ``prompt_logprobs``, when asked for: None for the prompt's first token, then for each token the log-probabilities of
    it and of the most probable ones; of DELTA outputs the first has them. ``prompt_weight_spans`` comes with them:
    which weights scored the tokens, by index from 1 on; None where the engine did not say.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    weight_version: str | None = None
    weight_commit: int | None = None
    engine_index: int = 0
    num_cached_tokens: int = 0
    prompt: str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    prompt_weight_spans: list[WeightSpan] | None = None
    kv_transfer_params: dict[str, Any] | None = field(default=None, repr=False)

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge the request's next output into this one.

        ``aggregate`` True appends to the sequences (DELTA outputs), False replaces them (CUMULATIVE outputs).
        """
        self.finished = self.finished or next_output.finished
        self.weight_version = next_output.weight_version
        self.weight_commit = next_output.weight_commit
        self.num_cached_tokens = next_output.num_cached_tokens
        self.kv_transfer_params = next_output.kv_transfer_params
        if next_output.prompt_logprobs is not None:
            self.prompt_logprobs = next_output.prompt_logprobs
            self.prompt_weight_spans = next_output.prompt_weight_spans
        for following in next_output.outputs:
            for position, mine in enumerate(self.outputs):
                if mine.index == following.index:
                    if aggregate:
                        mine.add(following)
                    else:
                        self.outputs[position] = following
                    break
            else:
                self.outputs.append(following)


def _reading(slot: Any) -> property:
    """A field of an output which, where it holds UnreadLogprobs, becomes a list when somebody looks."""

    def read(output: object) -> Any:
        value = slot.__get__(output)
        if isinstance(value, UnreadLogprobs):
            value = value.read()
            slot.__set__(output, value)
        return value

    return property(read, slot.__set__)


# Not within the classes: there these names are the dataclasses' slots.
for _class, _field in ((CompletionOutput, "logprobs"), (RequestOutput, "prompt_logprobs")):
    setattr(_class, _field, _reading(getattr(_class, _field)))


def _join(first: list[Any] | None, second: list[Any] | None, key: str, tokens: int) -> list[Any] | None:
    """Spans of two consecutive pieces as one list; equal neighbours become one span.

    ``tokens`` is the length of the first piece: without spans its tokens become one span whose value is None, as in
    `SpanBuilder`.
    """
    if not second:
        return first
    if first is None and tokens:
        start = second[0]["start"]
        first = [{key: None, "start": start - tokens, "end": start}]
    if not first:
        return second
    left, right = first[-1], second[0]
    if left[key] != right[key]:
        return [*first, *second]
    return [*first[:-1], {**left, "end": right["end"]}, *second[1:]]
