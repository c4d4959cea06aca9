"""EngineCoreOutputs -> RequestOutput: the state of every open request of one engine link.

The engine's messages are pushed in, results are pulled out: an engine output costs O(1) and only wakes the reader, and
`RequestState.take` builds one RequestOutput from everything since the reader's last visit. A slow reader therefore gets
fewer and larger outputs, memory stays bounded by the output's length, and the engine never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollspan.admission import Admitted
from rollspan.errors import RollspanError
from rollspan.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from rollspan.protocol.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, LogprobsLists
from rollspan.sampling_params import RequestOutputKind
from rollspan.spans import SpanBuilder


class SequenceState:
    """One output sequence: its tokens, log-probs and stamps so far.

    With DELTA outputs, what the reader has taken is dropped; ``taken`` counts it, so that positions stay absolute.
    """

    __slots__ = (
        "_logprob_chunks",
        "admission",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "internal_id",
        "logprobs",
        "spans",
        "stop_reason",
        "taken",
        "token_ids",
        "unread",
    )

    def __init__(self, index: int, internal_id: str, wants_logprobs: bool) -> None:
        self.index = index
        self.internal_id = internal_id
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = [] if wants_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if wants_logprobs else None
        self.spans = SpanBuilder()
        self.admission: tuple[str, int] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.taken = 0
        self.unread = False
        self._logprob_chunks: list[LogprobsLists] = []

    def push(self, output: EngineCoreOutput, version: str | None, commit: int | None) -> None:
        """Adds what one step produced, stamped with the weights that the step was launched with.

        Raises:
            RollspanError: ``decode_error`` when log-probs were asked for and don't match the tokens.
        """
        count = len(output.new_token_ids)
        if self.logprobs is not None and count:
            rows = 0 if output.new_logprobs is None else len(output.new_logprobs.token_ids)
            if output.new_logprobs is None or rows != count:
                raise RollspanError(f"the engine sent {count} tokens with {rows} log-probs", reason="decode_error")
            self._logprob_chunks.append(output.new_logprobs)
        self.token_ids.extend(output.new_token_ids)
        self.spans.push(version, commit, count)
        if output.admission is not None:
            self.admission = output.admission
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)
            self.stop_reason = output.stop_reason
        self.unread = self.unread or count > 0 or self.finish_reason is not None

    def take(self, delta: bool, top: int, include_weight_versions: bool) -> CompletionOutput:
        """The sequence so far, or with ``delta`` what the reader has not seen.

        ``top`` is how many log-probs a position has besides the sampled one, -1 for all.
        """
        self._read_logprobs(top)
        end = self.taken + len(self.token_ids)
        output = CompletionOutput(
            index=self.index,
            text="",
            token_ids=self.token_ids if delta else self.token_ids.copy(),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs if delta or self.logprobs is None else self.logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        if self.finish_reason is not None:
            output.weight_versions, output.weight_commits = self.spans.finish(end)
        elif delta and include_weight_versions:
            output.weight_versions, output.weight_commits = self.spans.between(self.taken, end)
        self.unread = False
        if delta:
            self.taken = end
            self.token_ids = []
            self.logprobs = None if self.logprobs is None else []
        return output

    def _read_logprobs(self, top: int) -> None:
        """Turns arrays into objects only when somebody looks: until then a position of k log-probs is 8 k bytes."""
        if self.logprobs is None:
            return
        columns = None if top < 0 else top + 1
        for chunk in self._logprob_chunks:
            ranks = chunk.sampled_ranks.tolist()
            for row, (ids, values) in enumerate(zip(chunk.token_ids.tolist(), chunk.logprobs.tolist(), strict=True)):
                position = {ids[0]: Logprob(values[0], ranks[row])}
                for rank, (token, value) in enumerate(zip(ids[1:columns], values[1:columns], strict=True), start=1):
                    position.setdefault(token, Logprob(value, rank))
                self.logprobs.append(position)
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + values[0]
        self._logprob_chunks.clear()


class RequestState:
    """One open request: n output sequences and the reader to wake."""

    def __init__(self, admitted: Admitted, wake: Callable[[], None], include_weight_versions: bool = False) -> None:
        params = admitted.sampling_params
        self.request_id = admitted.request_id
        self.prompt_token_ids = admitted.prompt_token_ids
        self.wake = wake
        self.sequences = [
            SequenceState(index, request.request_id, params.logprobs is not None)
            for index, request in enumerate(admitted.engine_requests)
        ]
        self.num_cached_tokens = 0
        self.engine_index = 0
        self.error: RollspanError | None = None
        self._kind = params.output_kind
        self._top = params.logprobs or 0
        self._include_weight_versions = include_weight_versions

    @property
    def finished(self) -> bool:
        """True when nothing more will come from the engine."""
        return self.error is not None or all(sequence.finish_reason is not None for sequence in self.sequences)

    def take(self) -> RequestOutput | None:
        """What is new since the last call, in the form that ``output_kind`` asks for; None when nothing is.

        Raises:
            RequestFailedError: the request failed; it holds what was generated before, spans included.
        """
        if self.error is not None:
            raise self.error
        finished = self.finished
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self._output(self.sequences, finished) if finished and self._any_unread() else None
        if self._kind is RequestOutputKind.DELTA:
            sequences = [sequence for sequence in self.sequences if sequence.unread]
            return self._output(sequences, finished) if sequences else None
        return self._output(self.sequences, finished) if self._any_unread() else None

    def fail(self, error: RollspanError) -> None:
        """Ends the request with an error and wakes its reader."""
        partial = None
        if any(sequence.spans.tokens for sequence in self.sequences):
            for sequence in self.sequences:
                sequence.finish_reason = sequence.finish_reason or str(FinishReason.ERROR)
            partial = self._output(self.sequences, finished=True)
        self.error = RequestFailedError(error, partial)
        self.wake()

    def _any_unread(self) -> bool:
        return any(sequence.unread for sequence in self.sequences)

    def _output(self, sequences: list[SequenceState], finished: bool) -> RequestOutput:
        delta = self._kind is RequestOutputKind.DELTA
        versions = {sequence.admission[0] for sequence in self.sequences if sequence.admission is not None}
        commits = {sequence.admission[1] for sequence in self.sequences if sequence.admission is not None}
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.take(delta, self._top, self._include_weight_versions) for sequence in sequences],
            finished=finished,
            weight_version=versions.pop() if len(versions) == 1 else None,
            weight_commit=commits.pop() if len(commits) == 1 else None,
            engine_index=self.engine_index,
            num_cached_tokens=self.num_cached_tokens,
        )


class RequestFailedError(RollspanError):
    """A request that ended with an error.

    Attributes:
        partial_output: what had been generated (with DELTA outputs: and not been taken), spans included; None when
            nothing had.
    """

    def __init__(self, cause: RollspanError, partial_output: RequestOutput | None) -> None:
        super().__init__(cause.message, reason=cause.reason, param=cause.param)
        self.partial_output = partial_output


class OutputProcessor:
    """All open requests of one engine link, by external id and by the engine's ids."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, tuple[RequestState, SequenceState]] = {}

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._requests)

    def add(
        self, admitted: Admitted, wake: Callable[[], None], *, include_weight_versions: bool = False
    ) -> RequestState:
        """Opens a request. ``wake`` is called whenever `RequestState.take` may have something new; it must not block.

        Raises:
            RollspanError: ``duplicate_request_id``.
        """
        if admitted.request_id in self._requests:
            raise RollspanError(
                f'request_id "{admitted.request_id}" is already in use by an open request',
                reason="duplicate_request_id",
                param="request_id",
            )
        state = RequestState(admitted, wake, include_weight_versions)
        self._requests[admitted.request_id] = state
        for sequence in state.sequences:
            self._sequences[sequence.internal_id] = (state, sequence)
        return state

    def process(self, message: EngineCoreOutputs) -> list[str]:
        """Takes one batch message. Outputs for ids that are not open (aborted here, still in flight there) are dropped.

        Returns:
            Ids to abort in the engine: the other sequences of a request of which one failed.
        """
        to_abort: list[str] = []
        for output in message.outputs:
            entry = self._sequences.get(output.request_id)
            if entry is None:
                continue
            state, sequence = entry
            state.engine_index = message.engine_index
            if output.prefill_stats is not None:
                state.num_cached_tokens = output.prefill_stats.get("num_cached_tokens", 0)
            try:
                sequence.push(output, message.weight_version, message.weight_commit)
            except RollspanError as error:
                to_abort += self._fail(state, error)
                continue
            if output.finish_reason is FinishReason.ERROR:
                to_abort += self._fail(state, _request_error(output))
                continue
            if sequence.finish_reason is not None:
                del self._sequences[sequence.internal_id]
                if state.finished:
                    del self._requests[state.request_id]
            if sequence.unread:
                state.wake()
        return to_abort

    def abort(self, request_ids: Iterable[str] | None = None) -> tuple[int, list[str]]:
        """Ends open requests, by external id or all, with what they have: finish reason ``abort``, spans included.

        Returns:
            How many requests were open and now are not, and the ids to abort in the engine.
        """
        states = (
            list(self._requests.values())
            if request_ids is None
            else [self._requests[name] for name in dict.fromkeys(request_ids) if name in self._requests]
        )
        to_abort: list[str] = []
        for state in states:
            to_abort += self._close(state)
            for sequence in state.sequences:
                if sequence.finish_reason is None:
                    sequence.finish_reason = str(FinishReason.ABORT)
                    sequence.unread = True
            state.wake()
        return len(states), to_abort

    def discard(self, state: RequestState) -> list[str]:
        """Forgets a request whose reader has gone. Returns the ids to abort in the engine, empty when it had ended."""
        return self._close(state) if self._requests.get(state.request_id) is state else []

    def fail_all(self, error: RollspanError) -> None:
        """Ends every open request with ``error``: the engine is gone."""
        for state in list(self._requests.values()):
            self._fail(state, error)

    def _fail(self, state: RequestState, error: RollspanError) -> list[str]:
        to_abort = self._close(state)
        state.fail(error)
        return to_abort

    def _close(self, state: RequestState) -> list[str]:
        del self._requests[state.request_id]
        open_ids = [sequence.internal_id for sequence in state.sequences if sequence.finish_reason is None]
        for internal_id in (sequence.internal_id for sequence in state.sequences):
            self._sequences.pop(internal_id, None)
        return open_ids


def _request_error(output: EngineCoreOutput) -> RollspanError:
    if output.error is None:
        return RollspanError("the engine ended the request with an error", reason="engine_error")
    reason = {"validation_error": "invalid_request"}.get(output.error.code, output.error.code)
    return RollspanError(output.error.message, reason=reason)
