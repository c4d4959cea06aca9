"""Both frontends, given the same random outputs by their engines, give the same answers, collected and streamed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_frontend import FRONTENDS, Mocked, MockFactory

from rollspan.protocol.messages import EngineCoreOutput, EngineError, FinishReason, LogprobsLists

pytestmark = pytest.mark.skipif(len(FRONTENDS) < 2, reason="one frontend agrees with itself")

Batch = tuple[list[dict[str, Any]], str | None, int | None]
LOGPROBS = [-0.1, -1e-7, -37.5, 0.0, float("-inf"), float("nan")]
ENDS = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.REPETITION]


@pytest.fixture(scope="module")
def both(socket_directory: Path) -> Iterator[list[Mocked]]:
    factories = [MockFactory(kind, socket_directory) for kind in FRONTENDS]
    try:
        yield [factory.start() for factory in factories]
    finally:
        for factory in factories:
            factory.close()


class Script:
    """A request and what the engine says to it, batch by batch."""

    def __init__(self, seed: int) -> None:
        numbers = random.Random(seed)
        self.stream = seed % 2 == 1
        self.n = numbers.choice([1, 1, 2, 3])
        self.top = numbers.choice([None, None, 0, 2])
        self.options = {name: numbers.random() < 0.5 for name in ("include_usage", "include_weight_versions")}
        self.options["continuous_usage_stats"] = numbers.random() < 0.5
        self.return_token_ids = numbers.random() < 0.5
        self.prompt_top = numbers.choice([None, None, 0, 1])
        self.experts = numbers.choice(["|u1", "<i2", "<i4"])
        # Whether a failure finds a stream begun depends on who is faster; collected answers fail either way.
        self.fails = not self.stream and numbers.random() < 0.2
        self.batches: list[Batch] = []
        label, commit = numbers.choice(["a", None]), 0
        running = set(range(self.n))
        while running:
            if numbers.random() < 0.4:
                label = numbers.choice(["a", "b", "c", None])
                commit += 1
            batch = [self._output(numbers, index, running) for index in sorted(running) if numbers.random() < 0.8]
            if batch:
                self.batches.append((batch, label, None if label is None else commit))
        if self.fails:
            last = self.batches[-1][0]
            last.append({"index": 0, "error": EngineError("nan_logits", "not finite")})

    def _output(self, numbers: random.Random, index: int, running: set[int]) -> dict[str, Any]:
        tokens = [numbers.randrange(32) for _ in range(numbers.choice([0, 1, 1, 1, 2]))]
        output: dict[str, Any] = {"index": index, "tokens": tokens, "rows": None, "finish": None, "stop": None}
        if self.top is not None and tokens:
            output["rows"] = [
                [(token, -numbers.random())]
                + [(other, numbers.choice(LOGPROBS)) for other in numbers.sample(range(32), self.top)]
                for token in tokens
            ]
        if numbers.random() < 0.25 and not (self.fails and index == 0):
            output["finish"] = numbers.choice(ENDS)
            output["stop"] = numbers.choice([None, 7, "text"])
            running.discard(index)
        elif self.fails and index == 0 and running == {0}:
            running.discard(index)
        return output

    @property
    def body(self) -> dict[str, Any]:
        params = {"n": self.n, "max_tokens": 60, **({} if self.top is None else {"logprobs": self.top})}
        if self.prompt_top is not None:
            params["prompt_logprobs"] = self.prompt_top
        return {
            "sampling_params": params,
            "stream": self.stream,
            "stream_options": self.options,
            "return_token_ids": self.return_token_ids,
        }

    def play(self, mock: Mocked, request_ids: list[str]) -> None:
        seen: set[int] = set()
        for outputs, label, commit in self.batches:
            messages = [self._message(output, request_ids, seen) for output in outputs]
            mock.engine.batch(messages, label, commit)

    def _message(self, output: dict[str, Any], request_ids: list[str], seen: set[int]) -> EngineCoreOutput:
        index = output["index"]
        request_id = request_ids[index]
        if "error" in output:
            return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=output["error"])
        first = index not in seen
        seen.add(index)
        prompt = [[(2, -0.5), (3, -0.25)], [(3, float("-inf")), (3, float("-inf"))]]
        experts = np.arange(4 * len(output["tokens"])).reshape(-1, 2, 2).astype(self.experts)
        return EngineCoreOutput(
            request_id,
            output["tokens"],
            new_logprobs=lists(output["rows"]),
            finish_reason=output["finish"],
            stop_reason=output["stop"],
            admission=(f"admitted-{index % 2}", index % 2) if first or output["finish"] is not None else None,
            prefill_stats={"num_cached_tokens": 2 + index} if first else None,
            new_prompt_logprobs=lists(prompt) if first and index == 0 else None,
            routed_experts=None if output["finish"] is None else experts,
        )


def lists(rows: list[list[tuple[int, float]]] | None) -> LogprobsLists | None:
    if rows is None:
        return None
    return LogprobsLists(
        token_ids=np.array([[token for token, _ in row] for row in rows], dtype=np.int32),
        logprobs=np.array([[value for _, value in row] for row in rows], dtype=np.float32),
        sampled_ranks=np.array([1 + row[0][0] % 5 for row in rows], dtype=np.int32),
    )


def answer_of(mock: Mocked, pool: ThreadPoolExecutor, script: Script) -> Any:
    ask = mock.frontend.stream_or_error if script.stream else mock.frontend.generate
    answer = pool.submit(ask, [1, 2, 3], **script.body)
    script.play(mock, [mock.engine.next_request().request_id for _ in range(script.n)])
    result = answer.result()
    return merged(result) if isinstance(result, list) else without_names(result.json())


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what is different by nature."""
    return {key: value for key, value in body.items() if key not in ("request_id", "created")}


def merged(chunks: list[dict[str, Any]]) -> Any:
    """A stream as one object: chunks may be cut differently, so the pieces of each choice are joined."""
    choices: dict[int, dict[str, Any]] = {}
    ends, rest, prompts = [], [], []
    for number, chunk in enumerate(chunks):
        assert ("prompt_token_ids" in chunk) <= (number == 0)
        if not chunk.get("choices"):
            rest.append(without_names(chunk))
            continue
        (piece,) = chunk["choices"]
        if "prompt_logprobs" in chunk:
            prompts.append((piece["index"], piece["token_ids"][:1], chunk["prompt_logprobs"]))
        whole = choices.setdefault(piece["index"], {"token_ids": [], "logprobs": [], "chunk_spans": []})
        assert whole.get("finish_reason") is None, "a chunk after the last one of its choice"
        whole["token_ids"] += piece["token_ids"]
        whole["logprobs"] += (piece.get("logprobs") or {"content": []})["content"]
        whole["finish_reason"] = piece["finish_reason"]
        if piece["finish_reason"] is None:
            whole["chunk_spans"] += piece.get("weight_versions") or []
        else:
            whole.update({key: piece[key] for key in ("stop_reason", "weight_versions", "weight_commits")})
            whole["routed_experts"] = piece.get("routed_experts")
            ends.append((piece["index"], {key: chunk[key] for key in ("model", "engine_index")}))
    first = chunks[0].get("prompt_token_ids")
    return choices, sorted(ends, key=lambda end: end[0]), rest, first, prompts


@pytest.mark.parametrize("group", range(4))
def test_the_same_outputs_give_the_same_answer(both: list[Mocked], group: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        for seed in range(60 * group, 60 * (group + 1)):
            script = Script(seed)
            answers = [answer_of(mock, pool, script) for mock in both]
            if script.stream:
                for answer in answers:
                    check_against_script(answer[0], script)
            assert answers[0] == answers[1], seed


def check_against_script(choices: dict[int, dict[str, Any]], script: Script) -> None:
    """The spans of a whole output cover its tokens with the labels that their batches had."""
    for index, whole in choices.items():
        labels = [
            label
            for outputs, label, _ in script.batches
            for output in outputs
            if output["index"] == index
            for _ in output["tokens"]
        ]
        spans = whole["weight_versions"]
        for span in whole.pop("chunk_spans"):
            assert set(labels[span["start"] : span["end"]]) == {span["version"]}
        if not any(label is not None for label in labels):
            assert spans == ([] if not labels else None)
            continue
        assert [span["version"] for span in spans for _ in range(span["start"], span["end"])] == labels
