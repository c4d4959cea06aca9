"""EngineCoreOutputs -> RequestOutput: the state of every open request of one engine link.

The engine's messages are pushed in, results are pulled out: an engine output costs O(1) and only wakes the reader, and
`RequestState.take` builds one RequestOutput from everything since the reader's last visit. A slow reader therefore gets
fewer and larger outputs, memory stays bounded by the output's length, and the engine never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollspan.admission import Admitted
from rollspan.errors import RollspanError
from rollspan.outputs import PositionLogprobs, RequestOutput
from rollspan.protocol.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from rollspan.sampling_params import RequestOutputKind
from rollspan.sequence_state import SequenceState
from rollspan.spans import WeightSpan
from rollspan.unread_logprobs import LogprobsPiece, UnreadPrompt


class RequestState:
    """One open request: n output sequences and the reader to wake."""

    def __init__(self, admitted: Admitted, wake: Callable[[], None], include_weight_versions: bool = False) -> None:
        params = admitted.sampling_params
        self.request_id = admitted.request_id
        self.prompt_token_ids = admitted.prompt_token_ids
        self.wake = wake
        self.sequences = [
            SequenceState(index, request.request_id, params.logprobs, _kv_prompt_length(request))
            for index, request in enumerate(admitted.engine_requests)
        ]
        self._prompt_top = params.prompt_logprobs
        self._prompt_logprobs: UnreadPrompt | None = None
        if params.prompt_logprobs is not None:
            self.sequences[0].awaited_rows = len(admitted.prompt_token_ids) - 1
        self.engine_index = 0
        self._stamp: tuple[str | None, int | None] | None = None
        self.error: RollspanError | None = None
        self._kind = params.output_kind
        self._include_weight_versions = include_weight_versions

    def push(self, sequence: SequenceState, output: EngineCoreOutput, message: EngineCoreOutputs) -> None:
        """Adds what one step produced for one sequence.

        Raises:
            RollspanError: ``decode_error`` when log-probs were asked for and don't match the tokens.
        """
        self.engine_index = message.engine_index
        if output.admission is not None:
            self._stamp = None
        sequence.push(output, message.weight_version, message.weight_commit)

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
        first = self.sequences[0]
        if self._stamp is None:
            self._stamp = self._common_stamp()
        fresh = not delta or (first.taken == 0 and sequences[0] is first)
        return RequestOutput(
            prompt_logprobs=self._give_prompt_logprobs(first) if fresh else None,
            prompt_weight_spans=self._give_prompt_spans(first) if fresh else None,
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.take(delta, self._include_weight_versions) for sequence in sequences],
            finished=finished,
            weight_version=self._stamp[0],
            weight_commit=self._stamp[1],
            engine_index=self.engine_index,
            num_cached_tokens=first.num_cached_tokens,
        )

    def _common_stamp(self) -> tuple[str | None, int | None]:
        """Label and commit number at admission, each where all sequences that were admitted agree."""
        stamps = [sequence.admission for sequence in self.sequences if sequence.admission is not None]
        versions, commits = {stamp[0] for stamp in stamps}, {stamp[1] for stamp in stamps}
        return versions.pop() if len(versions) == 1 else None, commits.pop() if len(commits) == 1 else None

    def _give_prompt_logprobs(self, first: SequenceState) -> list[PositionLogprobs | None] | None:
        if self._prompt_top is None or first.awaited_rows:
            return None
        if self._prompt_logprobs is None:
            lists, first.prompt_lists = first.prompt_lists, None
            self._prompt_logprobs = UnreadPrompt(None if lists is None else LogprobsPiece(lists, self._prompt_top))
        return self._prompt_logprobs.as_list()

    def _give_prompt_spans(self, first: SequenceState) -> list[WeightSpan] | None:
        if self._prompt_top is None or first.awaited_rows:
            return None
        return first.prompt_spans if len(self.prompt_token_ids) > 1 else []


def _kv_prompt_length(request: EngineCoreRequest) -> int | None:
    """Length of the prompt of a request that is to be told whose KV its tokens attended to."""
    return len(request.prompt_token_ids) if request.provenance.return_kv_versions else None


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
        #: Requests that have failed so far.
        self.failures = 0
        #: Index of the engine, which requests that end before it has said anything still name.
        self.engine_index = 0

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
        state.engine_index = self.engine_index
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
            try:
                state.push(sequence, output, message)
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
        self.failures += 1
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
    error = output.error
    reason = error.reason or {"validation_error": "invalid_request"}.get(error.code, error.code)
    return RollspanError(error.message, reason=reason, param=error.param)
