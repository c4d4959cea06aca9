"""Which weights computed what a token attends to, slot by slot of the KV cache, whatever the engine believes."""

from __future__ import annotations

from typing import Any

from engine.harness import Engine, Result
from rollspan.engine.request import Request

Stamp = tuple[str, int]


class KvTruth:
    """Looks on while the engine launches steps.

    Attributes:
        seen: by request id, for each token that was sampled, the stamps of the slots that held its positions.
        renamed: numbers of commits that have had several labels. What the prefix cache holds of those goes by the label
            that its chain began with.
    """

    def __init__(self, engine: Engine) -> None:
        self.seen: dict[str, list[list[Stamp]]] = {}
        self.renamed: set[int] = set()
        self._core = engine.core
        self._slots: dict[int, Stamp] = {}
        self._labels: dict[int, str] = {}
        run = engine.core._runner.run

        def launch(scheduled: Any, *rest: Any) -> Any:
            logits = run(scheduled, *rest)
            for entry in scheduled:
                self._note(entry.request, entry.num_tokens, samples=entry.samples)
            return logits

        engine.core._runner.run = launch  # type: ignore[method-assign]

    def _note(self, request: Request, num_tokens: int, *, samples: bool) -> None:
        size, stamp = self._core.config.block_size, self._core.weights.stamp
        if self._labels.setdefault(stamp[1], stamp[0]) != stamp[0]:
            self.renamed.add(stamp[1])
        start = request.num_computed_tokens
        slots = [request.block_ids[p // size] * size + p % size for p in range(start + num_tokens)]
        self._slots.update(dict.fromkeys(slots[start:], stamp))
        if samples:
            self.seen.setdefault(request.request_id, []).append([self._slots[slot] for slot in slots])

    def check(self, request_id: str, result: Result) -> None:
        """Asserts that the request's KV versions say what its tokens attended to."""
        segments = result.kv_versions()
        assert segments is not None
        assert sum(segment["end"] - segment["start"] for segment in segments) == len(result.token_ids)
        for segment in segments:
            told = [
                (span["version"], span["commit"]) for span in segment["kv"] for _ in range(span["start"], span["end"])
            ]
            assert len(told) == result.prompt_length + segment["end"] - 1
            for token in range(segment["start"], segment["end"]):
                truth = self.seen[request_id][token]
                mine = told[: len(truth)]
                assert [self._named(stamp) for stamp in mine] == [self._named(stamp) for stamp in truth]

    def _named(self, stamp: Any) -> Any:
        return stamp[1] if stamp[1] in self.renamed else stamp
