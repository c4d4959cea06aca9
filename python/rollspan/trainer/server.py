"""Server: the control routes of one server of engines, called from a loop that is not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import torch

from rollspan.http_client import HttpClient, HttpError

_RETRIES = 4
_FIRST_PAUSE_SECONDS = 0.2


class WeightSendError(RuntimeError):
    """An update did not take place; every server has its old weights, unless the text names one that has not.

    Attributes:
        url: the server that refused it or could not be reached.
        reason: its stable code, as in :class:`~rollspan.http_client.HttpError`.
    """

    def __init__(self, message: str, *, url: str, reason: str) -> None:
        super().__init__(f"{url}: {message}")
        self.url = url
        self.reason = reason


class Loop:
    """A thread that runs coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollspan-weight-sender", daemon=True)
        self._thread.start()

    def begin(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        """Runs a coroutine; to cancel the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Ends the thread; what still runs there is cancelled."""
        self.begin(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Server:
    """One server.

    Args:
        loop: runs its calls.
        url: its root.
        api_key: sent with each call, or None.
        timeout: seconds for an answer.

    Attributes:
        url: as given.
        num_engines: behind it; None until :meth:`greet`.
        dtype: of its model; None where it does not say, and until :meth:`greet`.
    """

    def __init__(self, loop: Loop, url: str, api_key: str | None, timeout: float) -> None:
        self.url = url
        self.num_engines: int | None = None
        self.dtype: torch.dtype | None = None
        self._loop = loop
        self._client = HttpClient(url, api_key=api_key)
        self._timeout = timeout

    def greet(self) -> None:
        """Learns what is behind the server, once.

        Raises:
            WeightSendError: it does not answer.
        """
        if self.num_engines is None:
            info = self.call("GET", "/server_info", repeat=True)
            self.num_engines = int(self.call("GET", "/get_world_size", repeat=True)["world_size"])
            name = str(info["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")
            dtype = getattr(torch, name, None)
            self.dtype = dtype if isinstance(dtype, torch.dtype) else None

    def call(self, method: str, path: str, body: Any = None, *, repeat: bool = False) -> Any:
        """One call and its decoded answer.

        Args:
            method: of HTTP.
            path: with its query.
            body: JSON, or a :class:`~rollspan.http_client.Content`.
            repeat: the call may reach the server twice, so it is repeated when its answer did not come.

        Raises:
            WeightSendError: any answer but success, or none.
        """
        return self.result(self.begin(method, path, body, repeat=repeat))

    def begin(
        self, method: str, path: str, body: Any = None, *, repeat: bool = False
    ) -> concurrent.futures.Future[Any]:
        """As :meth:`call`, without waiting; :meth:`result` waits."""
        return self._loop.begin(self._request(method, path, body, _RETRIES if repeat else 0))

    def result(self, call: concurrent.futures.Future[Any]) -> Any:
        """The answer of what :meth:`begin` returned.

        Raises:
            WeightSendError: any answer but success, or none.
        """
        try:
            return call.result()
        except HttpError as error:
            raise WeightSendError(error.message, url=self.url, reason=error.reason) from None

    async def _request(self, method: str, path: str, body: Any, retries: int) -> Any:
        pause, once = _FIRST_PAUSE_SECONDS, not retries
        while True:
            try:
                return await asyncio.wait_for(self._client.request(method, path, body, once=once), self._timeout)
            except asyncio.TimeoutError:
                text = f"{method} {path}: no answer within {self._timeout:g} s"
                raise HttpError(text, status=None, reason="timeout") from None
            except HttpError as error:
                if not retries or error.reason not in ("connection", "engine_starting"):
                    raise
            retries -= 1
            await asyncio.sleep(pause)
            pause *= 2

    def quietly(self, method: str, path: str, seconds: float) -> None:
        """A call that cleans up: its failure is no news."""
        call = self.begin(method, path)
        try:
            call.result(seconds)
        except (HttpError, concurrent.futures.TimeoutError):
            call.cancel()

    def close(self) -> None:
        """Closes its connections."""
        self._loop.begin(self._client.__aexit__()).result()


Moved = Callable[[int], None]
"""Told how many bytes more were handed over."""
