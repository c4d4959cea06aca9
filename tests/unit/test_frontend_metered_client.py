"""The metered client: every call goes through, and the metrics see what passes."""

from __future__ import annotations

from typing import Any

import pytest

from rollspan.client.base import EngineCoreClient
from rollspan.errors import RollspanError
from rollspan.frontend.metered_client import MeteredClient
from rollspan.frontend.metrics import MetricFamilies, Metrics
from rollspan.protocol.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from rollspan.sampling_params import SamplingParams
from support.fake_engine import HELLO


class StubClient(EngineCoreClient):
    """A link that the test plays."""

    def __init__(self) -> None:
        super().__init__()
        self.hello = HELLO
        self.aborted: list[str] = []

    async def add_request(self, request: EngineCoreRequest) -> None:
        self.check_alive()

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def call_utility(self, method: str, *args: Any) -> Any:
        return (method, args)

    async def close(self) -> None:
        pass

    def say(self, message: EngineCoreOutputs) -> None:
        assert self._on_outputs is not None
        self._on_outputs(message)

    def die(self, error: RollspanError) -> None:
        self.death = error
        assert self._on_death is not None
        self._on_death(error)


class Link:
    """A metered client over a stub, and what its users were told."""

    def __init__(self) -> None:
        self.stub = StubClient()
        self.metrics = MetricFamilies("m")
        self.deaths: list[RollspanError] = []
        self.messages: list[EngineCoreOutputs] = []
        self.client = MeteredClient(self.stub, Metrics(self.metrics, HELLO), self.deaths.append)
        self.client.set_output_handler(self.messages.append)
        self.client.set_death_handler(self.deaths.append)

    def sample(self, line: str) -> float:
        """Value of one line of the exposition, 0 when it is not there."""
        for text in self.metrics.render().decode().splitlines():
            if text.startswith(line + " "):
                return float(text.rpartition(" ")[2])
        return 0.0


@pytest.fixture
def link() -> Link:
    return Link()


def request(request_id: str) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1, 2], SamplingParams(max_tokens=4))


async def test_outputs_reach_the_user_and_the_counters(link: Link) -> None:
    await link.client.add_request(request("a"))
    message = EngineCoreOutputs(
        outputs=[EngineCoreOutput("a", [1, 2, 3], finish_reason=FinishReason.STOP)], weight_version="v", weight_commit=0
    )
    link.stub.say(message)
    assert link.messages == [message]
    assert link.sample('rollspan:generation_tokens_total{engine="0",model_name="m"}') == 3
    assert link.sample('rollspan:request_success_total{engine="0",finished_reason="stop",model_name="m"}') == 1


async def test_an_aborted_sequence_is_counted_once(link: Link) -> None:
    await link.client.add_request(request("a"))
    await link.client.abort(["a", "unknown"])
    link.stub.say(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1], finish_reason=FinishReason.ABORT)]))
    assert link.stub.aborted == ["a", "unknown"]
    assert link.sample('rollspan:request_success_total{engine="0",finished_reason="abort",model_name="m"}') == 1


async def test_the_status_is_that_of_the_last_message(link: Link) -> None:
    status = link.client.status
    assert (status.weight_state, status.weight_version, status.weight_commit) == ("ready", "default", 0)
    link.stub.say(EngineCoreOutputs(scheduler_stats={"weight_state": "sleeping"}, weight_version="v", weight_commit=3))
    assert (status.weight_state, status.weight_version, status.weight_commit) == ("sleeping", "v", 3)
    link.stub.say(EngineCoreOutputs(scheduler_stats={}))
    assert (status.weight_state, status.weight_version, status.weight_commit) == ("sleeping", "v", 3)
    with pytest.raises(RollspanError, match="the engine sleeps"):
        status.check()
    link.stub.say(EngineCoreOutputs(scheduler_stats={"weight_state": "ready"}, weight_version="u", weight_commit=2))
    assert (status.weight_state, status.weight_version, status.weight_commit) == ("ready", "v", 3)


async def test_death_is_told_to_both_and_ends_every_sequence(link: Link) -> None:
    await link.client.add_request(request("a"))
    link.stub.decode_errors["malformed"] = 1
    error = RollspanError("gone", reason="decode_error")
    link.stub.die(error)
    assert link.deaths == [error, error]
    with pytest.raises(RollspanError):
        link.client.check_alive()
    with pytest.raises(RollspanError):
        await link.client.add_request(request("b"))
    assert link.sample('rollspan:request_success_total{engine="0",finished_reason="error",model_name="m"}') == 1
    assert link.sample('rollspan:wire_decode_errors_total{engine="0",model_name="m",reason="malformed"}') == 1
