"""An engine client that tells the metrics, the engine's status and the frontend what passes over the link."""

from __future__ import annotations

from typing import Any

from rollspan.client.base import DeathHandler, EngineCoreClient, OutputHandler
from rollspan.errors import RollspanError
from rollspan.frontend.metrics import Metrics
from rollspan.frontend.status import EngineStatus
from rollspan.protocol.messages import EngineCoreOutputs, EngineCoreRequest


class MeteredClient(EngineCoreClient):
    """Passes every call on to ``client``. ``on_death`` is called besides the handler that the client's user sets.

    Attributes:
        metrics: what passed over the link.
        status: what the engine last said about itself.
    """

    def __init__(self, client: EngineCoreClient, metrics: Metrics, on_death: DeathHandler) -> None:
        super().__init__()
        self.hello = client.hello
        self._client = client
        self.metrics = metrics
        self.status = EngineStatus.at_start(client.hello)
        self._notify = on_death
        client.set_death_handler(self._died)

    def set_output_handler(self, handler: OutputHandler) -> None:
        def outputs_received(message: EngineCoreOutputs) -> None:
            self.metrics.outputs_received(message)
            self.status.update(message)
            handler(message)

        self._client.set_output_handler(outputs_received)

    async def add_request(self, request: EngineCoreRequest) -> None:
        self._client.check_alive()
        self.metrics.request_added(request)
        await self._client.add_request(request)

    async def abort(self, request_ids: list[str]) -> None:
        self.metrics.requests_aborted(request_ids)
        await self._client.abort(request_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        return await self._client.call_utility(method, *args)

    async def close(self) -> None:
        await self._client.close()

    def _died(self, error: RollspanError) -> None:
        self.death = error
        for reason, count in self._client.decode_errors.items():
            self.metrics.decode_failed(reason, count)
        self.metrics.link_ended()
        self._notify(error)
        if self._on_death is not None:
            self._on_death(error)
