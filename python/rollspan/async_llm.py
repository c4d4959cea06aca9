"""AsyncLLM: the asyncio API over an EngineCore in its own process. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rollspan import models
from rollspan.admission import Prompt, admit
from rollspan.async_weight_control import AsyncWeightControl
from rollspan.client.base import EngineCoreClient
from rollspan.client.framed import FramedClient
from rollspan.config import EngineConfig
from rollspan.errors import RollspanError
from rollspan.output_processor import OutputProcessor, RequestState
from rollspan.outputs import RequestOutput
from rollspan.protocol.messages import EngineCoreOutputs, EngineHello
from rollspan.provenance import NO_PROVENANCE, Provenance
from rollspan.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rollspan.launcher import EngineProcess

STOP_SECONDS = 5.0
"""How long `AsyncLLM.shutdown` lets the engine process end by itself before it is killed."""


class AsyncLLM(AsyncWeightControl):
    """Generates with a causal LM in its own engine process, while its weights may change.

    Every method may be called from any number of tasks of one event loop. The engine process starts with the object and
    loads the model meanwhile; the first call waits for it. `shutdown` (or ``async with``) ends it; so does the end of
    this process, however that comes.

    When the engine dies, every open and every later call raises RollspanError, reason ``engine_dead``, within a second.
    """

    _engine: EngineProcess | None

    def __init__(
        self, model: str | os.PathLike[str] | None = None, *, startup_timeout: float = 600.0, **engine_config: Any
    ) -> None:
        """Starts an engine.

        Args:
            model: directory in Hugging Face layout, name of an embedded model, or None for the default embedded one.
            startup_timeout: seconds until the engine must be ready.
            engine_config: fields of `EngineConfig`.

        Raises:
            FileNotFoundError: there is no such model.
            RollspanError: ``invalid_request`` naming a field of the configuration.
            LaunchError: the process cannot be started.
        """
        # Frontends that are given a client need neither of these.
        from rollspan.launcher import private_directory, start_engine

        model_directory = models.resolve(None if model is None else os.fspath(model))
        config = EngineConfig(model=str(model_directory), **engine_config)
        self._set_up()
        self._startup_timeout = startup_timeout
        with contextlib.ExitStack() as resources:
            self._engine = start_engine(config, resources.enter_context(private_directory()))
            resources.callback(self._engine.stop, STOP_SECONDS)
            self._resources = resources.pop_all()

    @classmethod
    async def from_client(cls, client: EngineCoreClient) -> AsyncLLM:
        """An AsyncLLM over an engine that somebody else started and connected to. `shutdown` ends the link only."""
        llm = cls.__new__(cls)
        llm._set_up()
        llm._client = client
        llm._listen(client)
        return llm

    def _set_up(self) -> None:
        self._processor = OutputProcessor()
        self._client: EngineCoreClient | None = None
        self._engine = None
        self._resources = contextlib.ExitStack()
        self._startup_timeout = 0.0
        self._connecting = asyncio.Lock()
        self._closed = False
        self._failure: RollspanError | None = None
        self._observer: Callable[[EngineCoreOutputs], None] | None = None
        # The event loop holds its tasks weakly only.
        self._sibling_aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def start(self) -> EngineHello:
        """Waits until the engine is ready and returns its hello: limits, model facts, what was in force at that moment.

        Raises:
            RollspanError: ``engine_starting`` when it took longer than ``startup_timeout``, ``engine_dead`` when it
                could not start.
        """
        return (await self._ready()).hello

    @property
    def socket_path(self) -> Path | None:
        """Socket of the engine that this object started, for further links to it; None over somebody else's engine."""
        return None if self._engine is None else self._engine.socket_path

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._processor)

    def set_outputs_observer(self, observer: Callable[[EngineCoreOutputs], None]) -> None:
        """``observer`` sees every batch message after it was processed (for metrics); it must not block."""
        self._observer = observer

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        session_id: str | None = None,
        provenance: Provenance = NO_PROVENANCE,
        include_weight_versions: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the request's outputs in the form that ``sampling_params.output_kind`` asks for.

        The last one has ``finished`` set. Leaving the iterator early aborts the request. A reader that is slower than
        the engine gets fewer and larger outputs.

        Args:
            prompt: token ids, or ``{"prompt_token_ids": [...]}``.
            sampling_params: how to sample; ``n`` sequences come as ``outputs`` with their ``index``.
            request_id: external id, for `abort`; a random one by default.
            priority: lower is served first.
            cache_salt: prefix-cache namespace.
            session_id: handed to the engine.
            provenance: bounds on the weights, and whether outputs tell which ones computed their KV.
            include_weight_versions: DELTA outputs carry the spans of their own tokens, not the last one only.

        Raises:
            RollspanError: bad arguments (naming the parameter), ``duplicate_request_id``, or why the request failed
                (`RequestFailedError`, with the partial output), ``engine_dead`` included.
        """
        client = await self._ready()
        admitted = admit(
            prompt,
            sampling_params,
            client.hello,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            session_id=session_id,
            provenance=provenance,
        )
        changed = asyncio.Event()
        state = self._processor.add(admitted, changed.set, include_weight_versions=include_weight_versions)
        try:
            for request in admitted.engine_requests:
                if state.finished:  # aborted, or failed, while earlier ones were sent: the rest would run for nobody
                    break
                await client.add_request(request)
            while True:
                output = state.take()
                if output is None:
                    await changed.wait()
                    changed.clear()
                    continue
                yield output
                if output.finished:
                    return
        finally:
            await self._discard(client, state)

    async def abort(self, request_ids: str | Iterable[str] | None = None) -> int:
        """Ends open requests by external id, or all; their readers get what was generated, finish reason ``abort``.

        Returns:
            How many of them were open. Unknown ids are ignored.
        """
        client = await self._ready()
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        count, internal_ids = self._processor.abort(names)
        await client.abort(internal_ids)
        return count

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pauses generation; returns when the state holds. Idempotent.

        Args:
            mode: "abort" ends running requests with what they have; "wait" lets them finish; both refuse new requests
                (``engine_paused``) until `resume_generation`. "keep" freezes running requests and queues new ones.
            clear_cache: recompute keys and values of running requests and forget cached prefixes, in every mode.
        """
        await self._call("pause_generation", mode, clear_cache)

    async def resume_generation(self) -> None:
        """Ends a pause. Idempotent."""
        await self._call("resume_scheduler")

    async def is_paused(self) -> bool:
        """True between the pause call and `resume_generation`."""
        return bool(await self._call("is_scheduler_paused"))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forgets all cached prefixes; running requests keep their own keys and values unless asked otherwise.

        Args:
            reset_running_requests: recompute keys and values of running requests too.
            reset_connector: vLLM's; there is no cache outside the engine, so nothing is left to do.
        """
        return bool(await self._call("reset_prefix_cache", reset_running_requests))

    async def server_info(self) -> dict[str, Any]:
        """What the engine says about itself: its runner, attention backend, dtype, numerics and configuration."""
        return dict(await self._call("server_info"))

    async def check_health(self) -> None:
        """Raises RollspanError, reason ``engine_dead``, when the engine has ended."""
        (await self._ready()).check_alive()

    async def shutdown(self) -> None:
        """Ends open requests with what they have, the link, and the engine if this object started it. Idempotent."""
        self._closed = True
        _, internal_ids = self._processor.abort()
        async with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            await client.abort(internal_ids)
            await client.close()
        await self._stop_engine()

    async def _ready(self) -> EngineCoreClient:
        if self._client is not None:
            return self._client
        async with self._connecting:
            if self._closed:
                raise RollspanError("this AsyncLLM is shut down", reason="shutting_down")
            if self._failure is not None:
                raise RollspanError(self._failure.message, reason=self._failure.reason)
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> EngineCoreClient:
        engine = self._engine
        if engine is None:
            raise RollspanError("the engine could not be started", reason="engine_dead")
        try:
            client = await FramedClient.connect(
                engine.socket_path,
                self._startup_timeout,
                name="AsyncLLM",
                alive=lambda: engine.process.poll() is None,
            )
        except RollspanError as error:
            self._failure = error
            await self._stop_engine()
            raise
        self._listen(client)
        return client

    def _listen(self, client: EngineCoreClient) -> None:
        self._processor.engine_index = client.hello.engine_index
        client.set_output_handler(self._on_outputs)
        client.set_death_handler(self._processor.fail_all)

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        siblings = self._processor.process(message)
        if siblings and self._client is not None:
            task = asyncio.ensure_future(self._client.abort(siblings))
            self._sibling_aborts.add(task)
            task.add_done_callback(self._sibling_aborts.discard)
        if self._observer is not None:
            self._observer(message)

    async def _discard(self, client: EngineCoreClient, state: RequestState) -> None:
        internal_ids = self._processor.discard(state)
        if internal_ids:
            await client.abort(internal_ids)

    async def _call(self, method: str, *args: Any) -> Any:
        return await (await self._ready()).call_utility(method, *args)

    async def _stop_engine(self) -> None:
        await asyncio.to_thread(self._resources.close)
