"""One way to drive a rollout server, whatever is in front of it: HTTP (either frontend) or AsyncLLM.

A driver keeps no state of its own, so what a test sees is what the server said.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rollspan.async_llm import AsyncLLM
from rollspan.errors import RollspanError
from rollspan.http_client import Content, HttpClient, HttpError
from rollspan.outputs import RequestOutput
from rollspan.sampling_params import RequestOutputKind, SamplingParams

TokenListener = Callable[[int, int], None]
"""Called for each chunk with (index of the sequence, number of tokens that it has now)."""


@dataclass
class Choice:
    """One output sequence as the client got it."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    weight_versions: list[dict[str, Any]] | None = None
    weight_commits: list[dict[str, Any]] | None = None
    chunk_versions: list[dict[str, Any]] = field(default_factory=list)
    chunk_commits: list[dict[str, Any]] = field(default_factory=list)
    finals: int = 0


@dataclass
class Rollout:
    """One finished request as the client got it."""

    request_id: str
    weight_version: str | None
    weight_commit: int | None
    choices: list[Choice]

    @property
    def only(self) -> Choice:
        """The sequence of a request for one."""
        (choice,) = self.choices
        return choice


@dataclass(frozen=True)
class Order:
    """One request. ``chunk_spans`` asks for spans on each chunk of a stream."""

    token_ids: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    stream: bool = False
    chunk_spans: bool = False
    request_id: str | None = None

    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that differ from the defaults; the output always has max_tokens tokens."""
        params: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature, "ignore_eos": True}
        optional = {"n": self.n, "seed": self.seed, "logprobs": self.logprobs}
        return params | {key: value for key, value in optional.items() if value is not None}


def _ignore(index: int, tokens: int) -> None:
    """Nobody listens."""


class Driver(ABC):
    """The calls of a trainer. A refusal raises RollspanError with the server's reason, over HTTP too."""

    name: str

    @abstractmethod
    async def generate(self, order: Order, listener: TokenListener = _ignore) -> Rollout: ...
    @abstractmethod
    async def abort(self, request_ids: list[str] | None = None) -> int: ...
    @abstractmethod
    async def pause(self, mode: str, clear_cache: bool) -> None: ...
    @abstractmethod
    async def resume(self) -> None: ...
    @abstractmethod
    async def is_paused(self) -> bool: ...
    @abstractmethod
    async def init_transfer(self, info: dict[str, Any]) -> None: ...
    @abstractmethod
    async def shut_down_transfer(self) -> None: ...
    @abstractmethod
    async def start_update(self, mode: str | None = None) -> None: ...
    @abstractmethod
    async def send_weights(self, info: dict[str, Any]) -> None: ...
    @abstractmethod
    async def finish_update(
        self, label: str | int | None = None, *, digest: str | None = None, partial: bool | None = None
    ) -> dict[str, Any]: ...
    @abstractmethod
    async def abort_update(self) -> bool: ...
    @abstractmethod
    async def history(self) -> dict[str, Any]:
        """The engine's record."""

    @abstractmethod
    async def relabel(self, label: str | int) -> None: ...
    @abstractmethod
    async def weight_version(self) -> str: ...
    @abstractmethod
    async def close(self) -> None: ...

    async def settle(self) -> None:
        """Ends whatever a test has left open: requests, a pause, an update."""
        await self.abort()
        await self.abort_update()
        await self.resume()

    async def update(self, path: Any, label: str | int | None = None) -> dict[str, Any]:
        """A whole weight update from a directory."""
        await self.start_update()
        await self.send_weights({"path": str(path)})
        return await self.finish_update(label)


class AsyncLLMDriver(Driver):
    """Drives AsyncLLM."""

    name = "async_llm"

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm

    async def generate(self, order: Order, listener: TokenListener = _ignore) -> Rollout:
        kind = RequestOutputKind.DELTA if order.stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**order.sampling(), output_kind=kind)
        choices = {index: Choice(index) for index in range(order.n)}
        last: RequestOutput | None = None
        async for last in self.llm.generate(
            order.token_ids, params, order.request_id, include_weight_versions=order.chunk_spans
        ):
            for output in last.outputs:
                choice = choices[output.index]
                choice.token_ids += output.token_ids
                choice.logprobs += [position[token].logprob for position, token in _logprobs(output)]
                if output.finished():
                    choice.finals += 1
                    choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
                    choice.weight_versions = _plain(output.weight_versions)
                    choice.weight_commits = _plain(output.weight_commits)
                elif order.chunk_spans:
                    choice.chunk_versions += _plain(output.weight_versions) or []
                    choice.chunk_commits += _plain(output.weight_commits) or []
                listener(output.index, len(choice.token_ids))
        assert last is not None
        assert last.finished
        return Rollout(last.request_id, last.weight_version, last.weight_commit, list(choices.values()))

    async def abort(self, request_ids: list[str] | None = None) -> int:
        return await self.llm.abort(request_ids)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self.llm.pause_generation(mode, clear_cache)

    async def resume(self) -> None:
        await self.llm.resume_generation()

    async def is_paused(self) -> bool:
        return await self.llm.is_paused()

    async def init_transfer(self, info: dict[str, Any]) -> None:
        await self.llm.init_weight_transfer_engine(info)

    async def shut_down_transfer(self) -> None:
        await self.llm.shutdown_weight_transfer_engine()

    async def start_update(self, mode: str | None = None) -> None:
        await self.llm.start_weight_update(mode)

    async def send_weights(self, info: dict[str, Any]) -> None:
        await self.llm.update_weights(info)

    async def finish_update(
        self, label: str | int | None = None, *, digest: str | None = None, partial: bool | None = None
    ) -> dict[str, Any]:
        return await self.llm.finish_weight_update(label, digest=digest, partial=partial)

    async def abort_update(self) -> bool:
        return await self.llm.abort_weight_update()

    async def history(self) -> dict[str, Any]:
        return await self.llm.get_weight_history()

    async def relabel(self, label: str | int) -> None:
        await self.llm.update_weight_version(label)

    async def weight_version(self) -> str:
        return await self.llm.get_weight_version()

    async def close(self) -> None:
        await self.llm.shutdown()


class HttpDriver(Driver):
    """Drives a frontend over HTTP."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self._http = HttpClient(url)

    async def generate(self, order: Order, listener: TokenListener = _ignore) -> Rollout:
        body: dict[str, Any] = {"token_ids": order.token_ids, "sampling_params": order.sampling()}
        if order.request_id is not None:
            body["request_id"] = order.request_id
        if not order.stream:
            return _collected(await self._post("/inference/v1/generate", body), listener)
        body |= {"stream": True, "stream_options": {"include_weight_versions": order.chunk_spans}}
        return await self._stream(body, order, listener)

    async def _stream(self, body: dict[str, Any], order: Order, listener: TokenListener) -> Rollout:
        rollout = Rollout("", None, None, [Choice(index) for index in range(order.n)])
        try:
            async with aclosing(self._http.stream("/inference/v1/generate", body)) as chunks:
                async for chunk in chunks:
                    _read_chunk(chunk, rollout, order.chunk_spans, listener)
        except HttpError as error:
            raise _refusal(error) from error
        if order.n > 1:
            # The root stamp of a stream's terminal chunk is the request's, as far as it is known by then.
            rollout.weight_version = rollout.weight_commit = None
        return rollout

    async def abort(self, request_ids: list[str] | None = None) -> int:
        body = {} if request_ids is None else {"request_ids": request_ids}
        return int((await self._post("/abort_requests", body))["aborted"])

    async def pause(self, mode: str, clear_cache: bool) -> None:
        answer = await self._post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")
        assert answer == {"status": "paused"}

    async def resume(self) -> None:
        assert await self._post("/resume") == {"status": "resumed"}

    async def is_paused(self) -> bool:
        return bool((await self._get("/is_paused"))["is_paused"])

    async def init_transfer(self, info: dict[str, Any]) -> None:
        answer = await self._post("/init_weight_transfer_engine", {"init_info": info})
        assert answer == {"message": "Weight transfer initialized"}

    async def shut_down_transfer(self) -> None:
        assert await self._post("/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}

    async def start_update(self, mode: str | None = None) -> None:
        answer = await self._post("/start_weight_update", None if mode is None else {"mode": mode})
        assert answer == {"message": "Weight update started"}

    async def send_weights(self, info: dict[str, Any]) -> None:
        assert await self._post("/update_weights", {"update_info": info}) == {"message": "Weights updated"}

    async def finish_update(
        self, label: str | int | None = None, *, digest: str | None = None, partial: bool | None = None
    ) -> dict[str, Any]:
        fields = {"weight_version": label, "weight_digest": digest, "partial": partial}
        body = {name: value for name, value in fields.items() if value is not None}
        answer = await self._post("/finish_weight_update", body or None)
        assert answer.pop("message") == "Weight update finished"
        return answer

    async def abort_update(self) -> bool:
        answer = await self._post("/abort_weight_update")
        assert answer["status"] == "aborted"
        return bool(answer["aborted"])

    async def history(self) -> dict[str, Any]:
        (record,) = (await self._get("/weight_history"))["engines"]
        return dict(record)

    async def upload(self, upload: str, file: str, content: Content) -> dict[str, Any]:
        """Uploads a file of weights, or a piece of one, as its headers say."""
        return await self.request("PUT", f"/weight_uploads/{upload}/{file}", content)

    async def relabel(self, label: str | int) -> None:
        answer = await self._post("/update_weight_version", {"new_version": label})
        assert answer == {"success": True, "new_version": str(label)}

    async def weight_version(self) -> str:
        return str((await self._get("/weight_info"))["weight_version"])

    async def close(self) -> None:
        await self._http.__aexit__()

    async def _post(self, path: str, body: Any = None) -> dict[str, Any]:
        return await self.request("POST", path, body)

    async def _get(self, path: str) -> dict[str, Any]:
        return await self.request("GET", path)

    async def request(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Any call that answers with an object."""
        try:
            answer = await self._http.request(method, path, body)
        except HttpError as error:
            raise _refusal(error) from error
        assert isinstance(answer, dict)
        return answer


def _collected(body: dict[str, Any], listener: TokenListener) -> Rollout:
    choices = [
        Choice(
            index=item["index"],
            token_ids=item["token_ids"],
            logprobs=[entry["logprob"] for entry in (item["logprobs"] or {"content": []})["content"]],
            finish_reason=item["finish_reason"],
            stop_reason=item["stop_reason"],
            weight_versions=item["weight_versions"],
            weight_commits=item["weight_commits"],
            finals=1,
        )
        for item in body["choices"]
    ]
    for choice in choices:
        listener(choice.index, len(choice.token_ids))
    return Rollout(body["request_id"], body["weight_version"], body["weight_commit"], choices)


def _read_chunk(chunk: dict[str, Any], rollout: Rollout, chunk_spans: bool, listener: TokenListener) -> None:
    rollout.request_id = chunk["request_id"]
    for item in chunk["choices"]:
        choice = rollout.choices[item["index"]]
        assert choice.finals == 0, "a chunk after the terminal one"
        choice.token_ids += item["token_ids"]
        choice.logprobs += [entry["logprob"] for entry in (item.get("logprobs") or {"content": []})["content"]]
        if item["finish_reason"] is not None:
            choice.finals += 1
            choice.finish_reason, choice.stop_reason = item["finish_reason"], item["stop_reason"]
            choice.weight_versions, choice.weight_commits = item["weight_versions"], item["weight_commits"]
            rollout.weight_version, rollout.weight_commit = chunk["weight_version"], chunk["weight_commit"]
        elif chunk_spans:
            choice.chunk_versions += item["weight_versions"]
            choice.chunk_commits += item["weight_commits"]
        else:
            assert item.get("weight_versions") is None, "spans on a chunk that nobody asked for"
        listener(choice.index, len(choice.token_ids))


def _refusal(error: HttpError) -> RollspanError:
    refusal = RollspanError(error.message, reason=error.reason)
    assert (refusal.reason, refusal.status) == (error.reason, error.status)
    return refusal


def _logprobs(output: Any) -> list[tuple[dict[int, Any], int]]:
    return list(zip(output.logprobs, output.token_ids, strict=True)) if output.logprobs is not None else []


def _plain(spans: Any) -> list[dict[str, Any]] | None:
    return None if spans is None else [dict(span) for span in spans]
