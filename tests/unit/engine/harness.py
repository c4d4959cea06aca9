"""Drives an EngineCore step by step and keeps what it says about each request."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.models import TinyModel
from rollspan.config import EngineConfig
from rollspan.engine.core import EngineCore
from rollspan.protocol import codec
from rollspan.protocol.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineError,
    FinishReason,
    UtilityCall,
    UtilityOutput,
)
from rollspan.sampling_params import SamplingParams
from rollspan.spans import KvVersionBuilder, KvVersionSpan

Stamp = tuple[str | None, int | None]


@dataclass
class Result:
    """All that came for one request."""

    prompt_length: int = 0
    token_ids: list[int] = field(default_factory=list)
    stamps: list[Stamp] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: EngineError | None = None

    @property
    def admissions(self) -> list[tuple[str, int]]:
        """Admission stamps, in order of arrival."""
        return [tuple(output.admission) for output in self.outputs if output.admission is not None]

    @property
    def kv_announced(self) -> list[int]:
        """Output indexes of the tokens that KV spans came with."""
        counts = itertools.accumulate((len(output.new_token_ids) for output in self.outputs), initial=0)
        return [count for count, output in zip(counts, self.outputs, strict=False) if output.kv_spans is not None]

    def kv_versions(self) -> list[KvVersionSpan] | None:
        """What a frontend makes of the KV spans."""
        builder = KvVersionBuilder(self.prompt_length)
        stamps = iter(self.stamps)
        for output in self.outputs:
            for number, _ in enumerate(output.new_token_ids):
                builder.push(*next(stamps), 1, None if number else output.kv_spans)
        return builder.finish()

    def kv_runs(self) -> list[list[tuple[str | None, int | None, int, int]]]:
        """(label, commit, start, end) of the positions that the last token of each segment attended to."""
        return [[tuple(span.values()) for span in segment["kv"]] for segment in self.kv_versions() or []]

    def add(self, output: EngineCoreOutput, stamp: Stamp) -> None:
        assert self.finish_reason is None, "an output after the terminal one"
        self.outputs.append(output)
        self.token_ids += output.new_token_ids
        self.stamps += [stamp] * len(output.new_token_ids)
        self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error


def _key(client: int, request_id: str) -> str:
    return f"{client}:{request_id}" if client else request_id


class Engine:
    """An EngineCore in this thread. Every message goes through the codec, as on a link.

    ``results`` holds what was said to client 0 by request id, to another one by ``"client:id"``.
    """

    def __init__(self, model: TinyModel | str, **config: Any) -> None:
        path = model if isinstance(model, str) else str(model.path)
        if isinstance(model, TinyModel) and "kv_cache_memory" not in config:
            block = model.bytes_per_token * config.get("block_size", 16)
            config["kv_cache_memory"] = block * (1 + config.pop("num_blocks", 64))
        self.core = EngineCore(EngineConfig(model=path, num_threads=1, **{"device": "cpu", **config}))
        self.hello = self.core.hello()
        self.results: dict[str, Result] = {}
        self.stats: dict[int, list[dict[str, Any]]] = {}
        self.replies: dict[tuple[int, int], UtilityOutput] = {}
        self._calls = 0

    def add(self, request_id: str, prompt: list[int] | tuple[int, ...], *, client: int = 0, **params: Any) -> Result:
        """Admits a request, resolved as a frontend does.

        ``priority``, ``cache_salt`` and ``provenance`` are the request's, the rest are its sampling parameters.
        """
        rest = {name: params.pop(name) for name in ("priority", "cache_salt", "provenance") if name in params}
        params = {"temperature": 0.0, **params}
        resolved = SamplingParams(**params).resolve(
            prompt_length=len(prompt),
            max_model_len=self.hello.limits.max_model_len,
            eos_token_ids=self.hello.model.eos_token_ids,
        )
        return self.send(EngineCoreRequest(request_id, list(prompt), resolved, client_index=client, **rest))

    def send(self, request: EngineCoreRequest) -> Result:
        """Admits a request as it is."""
        result = Result(len(request.prompt_token_ids))
        self.results[_key(request.client_index, request.request_id)] = result
        self.core.add_request(codec.decode_request(codec.encode_request(request)))
        return result

    def step(self) -> list[tuple[int, EngineCoreOutputs]]:
        """One step; what it says is filed."""
        messages = [(c, codec.decode_outputs([codec.encode_outputs(message)])) for c, message in self.core.step()]
        for client, message in messages:
            for output in message.outputs:
                result = self.results.setdefault(_key(client, output.request_id), Result())
                result.add(output, (message.weight_version, message.weight_commit))
            if message.scheduler_stats is not None:
                self.stats.setdefault(client, []).append(message.scheduler_stats)
            if message.utility_output is not None:
                self.replies[client, message.utility_output.call_id] = message.utility_output
        return messages

    def step_until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Steps until the condition holds; waits without stepping while there is nothing to do.

        Raises:
            AssertionError: it does not within so many seconds.
        """
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"nothing came of {seconds} s"
            self.core.wait(1.0)
            self.step()

    def run(self) -> None:
        """Steps until there is nothing to do."""
        self.step_until(lambda: not self.core.has_work())

    def start_call(self, method: str, *args: Any, client: int = 0) -> Callable[[], UtilityOutput | None]:
        """Calls a method; the returned function gives its answer once there is one."""
        self._calls += 1
        call_id = self._calls
        call = UtilityCall(client, call_id, method, list(args))
        self.core.call_utility(client, codec.decode_utility_call(codec.encode_utility_call(call)))
        return lambda: self.replies.get((client, call_id))

    def call(self, method: str, *args: Any, client: int = 0) -> UtilityOutput:
        """Calls a method and steps until it is answered."""
        answer = self.start_call(method, *args, client=client)
        self.step_until(answer)
        reply = answer()
        assert reply is not None
        return reply

    def result_of(self, method: str, *args: Any) -> Any:
        """The result of a call that must succeed."""
        reply = self.call(method, *args)
        assert reply.failure is None, reply
        return reply.result

    def failure_of(self, method: str, *args: Any) -> tuple[str, str]:
        """(reason, message) of a call that must fail."""
        reply = self.call(method, *args)
        assert reply.failure is not None, reply
        assert reply.reason is not None, reply
        return reply.reason, reply.failure

    def commit(self, path: object, label: str | None = None) -> None:
        """Other weights between two steps: whatever is open goes on as it stands when generation does."""
        self.result_of("pause_generation", "keep", False)
        self.result_of("start_weight_update")
        self.commit_open(path, label)

    def commit_open(self, path: object, label: str | None = None) -> None:
        """The same with an update that is open already."""
        self.result_of("pause_generation", "keep", False)
        self.result_of("update_weights", {"path": str(path)})
        self.result_of("finish_weight_update", label)
        self.start_call("resume_scheduler")

    def wait_for_worker(self) -> None:
        """Returns when the worker has done all that it has been given so far."""
        self.core.weights._worker.submit(int).result(60)

    def parameters(self, name: str) -> list[torch.nn.Parameter]:
        """The parameter of the model in use, to be damaged; a test has no business with it otherwise."""
        model = self.core._runner._model
        return [parameter for key, parameter in model.named_parameters(remove_duplicate=False) if key == name]

    @contextlib.contextmanager
    def broken_model(self, text: str) -> Iterator[None]:
        """Inside, every forward pass raises."""

        def fail(*_: object) -> None:
            raise RuntimeError(text)

        runner = self.core._runner
        forward, runner._forward = runner._forward, fail
        try:
            yield
        finally:
            runner._forward = forward

    def generate(self, prompts: list[tuple[int, ...]], **params: Any) -> list[Result]:
        """Runs prompts together to their end."""
        base = len(self.results)
        results = [self.add(f"g{base + index}", prompt, **params) for index, prompt in enumerate(prompts)]
        self.run()
        return results
