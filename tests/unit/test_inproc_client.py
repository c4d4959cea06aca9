"""The in-process link, and LLM over a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest

from rollspan.client.inproc import InprocClient
from rollspan.errors import RollspanError
from rollspan.llm import LLM
from rollspan.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineError,
    EngineHello,
    FinishReason,
    UtilityCall,
    UtilityOutput,
)
from rollspan.sampling_params import SamplingParams
from support.fake_engine import HELLO, batch, output


class ScriptedCore:
    """Each step says what the next entry of ``script`` makes of the open requests."""

    def __init__(self) -> None:
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.script: list[Any] = []
        self.delayed_replies = 0
        self._replies: list[UtilityOutput] = []

    def hello(self) -> EngineHello:
        return HELLO

    def add_request(self, message: EngineCoreRequest) -> None:
        self.requests.append(message)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def call_utility(self, client_index: int, call: UtilityCall) -> None:
        failure = None if call.method != "refuse" else "no"
        self._replies.append(
            UtilityOutput(call.call_id, failure, [call.method, *call.args], failure and "update_active")
        )

    @property
    def holds_requests(self) -> bool:
        return False

    def has_work(self) -> bool:
        return bool(self.script)

    def wait(self, timeout: float | None = None) -> None:
        """There is nobody to wait for: each step has an answer, or counts as one of those that have none yet."""

    def step(self) -> list[tuple[int, EngineCoreOutputs]]:
        messages = [(0, batch(*self.script.pop(0)(self.requests)))] if self.script else []
        if self.delayed_replies:
            self.delayed_replies -= 1
            return messages
        messages += [(0, EngineCoreOutputs(utility_output=reply)) for reply in self._replies]
        self._replies.clear()
        return messages


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
def llm(core: ScriptedCore, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("rollspan.engine.core.EngineCore", lambda config: core)
    return LLM()


def test_a_call_returns_its_own_answer_after_however_many_steps(core: ScriptedCore) -> None:
    seen: list[EngineCoreOutputs] = []
    client = InprocClient(core, seen.append)
    core.script = [lambda requests: [output("r", 1)], lambda requests: [output("r", 2)]]
    core.delayed_replies = 2
    assert client.call_utility("pause_generation", "wait", True) == ["pause_generation", "wait", True]
    assert [message.outputs[0].new_token_ids for message in seen] == [[1], [2]]


def test_a_refused_call_raises_with_its_reason(core: ScriptedCore) -> None:
    with pytest.raises(RollspanError, match="no") as caught:
        InprocClient(core, print).call_utility("refuse")
    assert caught.value.reason == "update_active"


def test_a_failed_request_of_a_batch_aborts_the_others(core: ScriptedCore, llm: LLM) -> None:
    def fail_the_first(requests: list[EngineCoreRequest]) -> list[EngineCoreOutput]:
        error = EngineError("nan_logits", "not finite")
        return [output(requests[0].request_id, finish=FinishReason.ERROR, error=error)]

    core.script = [fail_the_first]
    with pytest.raises(RollspanError, match="not finite"):
        llm.generate([[1], [2]], SamplingParams(n=2))
    assert core.aborted == [request.request_id for request in core.requests[1:]]


def test_an_interrupted_batch_leaves_nothing_running(core: ScriptedCore, llm: LLM) -> None:
    def interrupt(requests: list[EngineCoreRequest]) -> list[EngineCoreOutput]:
        raise KeyboardInterrupt

    core.script = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]])
    assert core.aborted == [request.request_id for request in core.requests]
    core.script = [lambda requests: [output(requests[-1].request_id, 3, finish=FinishReason.STOP)]]
    assert llm.generate([7])[0].outputs[0].token_ids == [3]


def test_a_failed_stream_is_closed_and_the_others_go_on(core: ScriptedCore, llm: LLM) -> None:
    llm.add_request([1], SamplingParams(), "bad")
    llm.add_request([1], SamplingParams(), "good")
    error = EngineError("engine_error", "broken")
    core.script = [
        lambda requests: [
            output(requests[0].request_id, finish=FinishReason.ERROR, error=error),
            output(requests[1].request_id, 7),
        ],
        lambda requests: [output(requests[1].request_id, 8, finish=FinishReason.STOP)],
    ]
    with pytest.raises(RollspanError, match="broken"):
        llm.step()
    (only,) = llm.step()
    assert (only.request_id, only.outputs[0].token_ids) == ("good", [7, 8])
    assert not llm.has_unfinished_requests()
