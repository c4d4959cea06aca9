"""One output sequence of an open request: its tokens, log-probs and stamps so far."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rollspan.errors import RollspanError
from rollspan.outputs import CompletionOutput, PositionLogprobs
from rollspan.protocol.messages import EngineCoreOutput, LogprobsLists
from rollspan.protocol.packed_logprobs import PackedLogprobs, join
from rollspan.spans import KvVersionBuilder, SpanBuilder, WeightSpan
from rollspan.unread_logprobs import LogprobsPiece, UnreadPositions


class SequenceState:
    """One output sequence: its tokens, log-probs and stamps so far.

    With DELTA outputs, what the reader has taken is dropped; ``taken`` counts it, so that positions stay absolute.
    """

    __slots__ = (
        "_chunks",
        "_top",
        "admission",
        "awaited_rows",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "internal_id",
        "kv",
        "logprobs",
        "num_cached_tokens",
        "prompt_lists",
        "prompt_spans",
        "routed_experts",
        "spans",
        "stop_reason",
        "taken",
        "token_ids",
        "unread",
    )

    def __init__(
        self, index: int, internal_id: str, num_logprobs: int | None, kv_prompt_length: int | None = None
    ) -> None:
        self.index = index
        self.internal_id = internal_id
        self.token_ids: list[int] = []
        #: Log-probs of ``token_ids``; None where nobody wants them.
        self.logprobs: list[LogprobsPiece] | None = None if num_logprobs is None else []
        self.cumulative_logprob: float | None = None if num_logprobs is None else 0.0
        self.spans = SpanBuilder()
        #: What the tokens attended to; None where nobody asks.
        self.kv = None if kv_prompt_length is None else KvVersionBuilder(kv_prompt_length, self.spans)
        self.admission: tuple[str, int] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.taken = 0
        self.unread = False
        self.num_cached_tokens = 0
        self.routed_experts: npt.NDArray[np.integer[Any]] | None = None
        self.prompt_lists: LogprobsLists | None = None
        #: Which weights scored them.
        self.prompt_spans: list[WeightSpan] | None = None
        #: Log-probs of so many tokens of the prompt must come before or with the first new token; 0: no more of them.
        self.awaited_rows = 0
        self._chunks: list[LogprobsLists] = []
        self._top = 0 if num_logprobs is None else num_logprobs

    def push(self, output: EngineCoreOutput, version: str | None, commit: int | None) -> None:
        """Adds what one step produced, stamped with the weights that the step was launched with.

        Raises:
            RollspanError: ``decode_error`` when log-probs or KV spans don't match the tokens.
        """
        tokens = output.new_token_ids
        count = len(tokens)
        if self.awaited_rows and (count or output.new_prompt_logprobs is not None):
            self._take_prompt(self.awaited_rows, output)
        if self.kv is not None and output.kv_spans is not None and count:
            try:
                self.kv.announce(output.kv_spans)
            except ValueError as error:
                raise RollspanError(f"what the engine sent does not fit: {error}", reason="decode_error") from None
        if self.logprobs is not None and count:
            lists = output.new_logprobs
            if lists is None or len(lists) != count:
                raise _unmatched(count, "tokens", lists)
            self._chunks.append(lists)
        self.token_ids += tokens
        self.spans.push(version, commit, count)
        if output.admission is not None:
            self.admission = output.admission
        if output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.get("num_cached_tokens", 0)
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)
            self.stop_reason = output.stop_reason
            self.routed_experts = output.routed_experts
            self.unread = True
        elif count:
            self.unread = True

    def take(self, delta: bool, include_weight_versions: bool) -> CompletionOutput:
        """The sequence so far, or with ``delta`` what the reader has not seen."""
        self._gather_logprobs()
        end = self.taken + len(self.token_ids)
        output = CompletionOutput(
            index=self.index,
            text="",
            token_ids=self.token_ids if delta else self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self._give_logprobs(delta),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        if self.finish_reason is not None:
            output.weight_versions, output.weight_commits = self.spans.finish(end)
            output.kv_versions = None if self.kv is None else self.kv.finish(end)
            output.routed_experts = self.routed_experts
        elif delta and include_weight_versions:
            output.weight_versions, output.weight_commits = self.spans.between(self.taken, end)
        self.unread = False
        if delta:
            self.taken = end
            self.token_ids = []
            self.logprobs = None if self.logprobs is None else []
        return output

    def _take_prompt(self, rows: int, output: EngineCoreOutput) -> None:
        lists = output.new_prompt_logprobs
        if lists is None or len(lists) != rows:
            raise _unmatched(rows, "tokens of the prompt", lists)
        self.awaited_rows = 0
        self.prompt_lists = lists
        if output.prompt_spans is not None:
            self.prompt_spans = [
                {"version": version, "commit": commit, "start": start, "end": end}
                for version, commit, start, end in output.prompt_spans
            ]

    def _give_logprobs(self, delta: bool) -> list[PositionLogprobs] | None:
        if self.logprobs is None:
            return None
        return UnreadPositions(self.logprobs if delta else self.logprobs.copy()).as_list()

    def _gather_logprobs(self) -> None:
        """Makes one piece of what has come since the last call, if it can."""
        if self.logprobs is None or not self._chunks:
            return
        total = self.cumulative_logprob or 0.0
        for lists in join(self._chunks):
            self.logprobs.append(LogprobsPiece(lists, self._top))
            if isinstance(lists, PackedLogprobs):
                total += lists.sampled_logprob
            else:
                for value in lists.logprobs[:, 0].tolist():  # one by one: the same sum however the tokens came
                    total += value
        self.cumulative_logprob = total
        self._chunks.clear()


def _unmatched(count: int, what: str, lists: LogprobsLists | None) -> RollspanError:
    rows = 0 if lists is None else len(lists)
    return RollspanError(f"the engine sent {count} {what} with {rows} log-probs", reason="decode_error")
