"""The same calls as an engine link, on an EngineCore in this process and this thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rollspan.errors import RollspanError
from rollspan.protocol.messages import EngineCoreOutputs, EngineCoreRequest, EngineHello, UtilityCall, UtilityOutput


class Core(Protocol):
    """What `InprocClient` needs of an EngineCore."""

    def hello(self) -> EngineHello: ...
    def add_request(self, message: EngineCoreRequest) -> None: ...
    def abort_requests(self, request_ids: list[str]) -> None: ...
    def call_utility(self, client_index: int, call: UtilityCall) -> None: ...
    @property
    def holds_requests(self) -> bool: ...
    def has_work(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None: ...
    def step(self) -> list[tuple[int, EngineCoreOutputs]]: ...


class InprocClient:
    """Drives an EngineCore. Not for several threads.

    Args:
        core: the engine.
        on_outputs: gets every message but utility replies, in order, from within `step` and `call_utility`.
    """

    def __init__(self, core: Core, on_outputs: Callable[[EngineCoreOutputs], None]) -> None:
        self.hello = core.hello()
        self._core = core
        self._on_outputs = on_outputs
        self._replies: dict[int, UtilityOutput] = {}
        self._next_call_id = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        """Admits one request for one sequence; a refusal comes as its terminal output."""
        self._core.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        """Aborts by internal id; unknown ids are ignored."""
        self._core.abort_requests(request_ids)

    def has_work(self) -> bool:
        """True when `step` would run or deliver something."""
        return self._core.has_work()

    def wait_for_weights(self) -> bool:
        """Waits while requests wait for a commit and there is nothing else to do; False when none waits."""
        if not self._core.holds_requests:
            return False
        self._core.wait()
        return True

    def step(self) -> None:
        """Runs one step and hands its messages over."""
        for _, message in self._core.step():
            if message.utility_output is not None:
                self._replies[message.utility_output.call_id] = message.utility_output
            else:
                self._on_outputs(message)

    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls an engine method and steps until its answer is there, so running requests may go on meanwhile.

        Raises:
            RollspanError: the engine refused, with its reason.
        """
        call_id = self._next_call_id
        self._next_call_id += 1
        self._core.call_utility(0, UtilityCall(0, call_id, method, list(args)))
        while call_id not in self._replies:
            self._core.wait()
            self.step()
        reply = self._replies.pop(call_id)
        if reply.failure is not None:
            raise RollspanError(reply.failure, reason=reply.reason or "internal_error")
        return reply.result
