"""What the counting model must have emitted, held against what the server says it did."""

from __future__ import annotations

from itertools import count, pairwise
from pathlib import Path
from typing import Any

from counting_model import Checkpoints

from support.drivers import Choice, Driver, Rollout

_serial = count(1)


class CountingOracle:
    """Knows the token of each commit number and label that it put in force through one driver."""

    def __init__(self, driver: Driver, checkpoints: Checkpoints) -> None:
        self.driver = driver
        self.commit = -1
        self.label = ""
        self._checkpoints, self.root = checkpoints, checkpoints.root
        self._token_of_commit: dict[int, int] = {}
        self._tokens_of_label: dict[str, set[int]] = {}

    @classmethod
    async def begin(cls, driver: Driver, checkpoints: Checkpoints, token: int = 1) -> CountingOracle:
        """An oracle that knows what is in force: it has just put it there."""
        oracle = cls(driver, checkpoints)
        await oracle.update(token)
        return oracle

    async def update(self, token: int, label: str | None = None, *, keep_label: bool = False) -> str:
        """Puts the weights that emit ``token`` in force, under a label never used before unless told otherwise."""
        await self.driver.start_update()
        await self.driver.send_weights({"path": str(self._checkpoints.emitting(token))})
        return await self.finish(token, label, keep_label=keep_label)

    async def finish(self, token: int, label: str | None = None, *, keep_label: bool = False, **options: Any) -> str:
        """Finishes an update to the weights that emit ``token``; returns the label now in force."""
        sent = None if keep_label else label or f"{token}#{next(_serial)}"
        # Registered first: the first tokens may be here before the answer is.
        self.foresee(sent or self.label, token)
        answer = await self.driver.finish_update(sent, **options)
        assert answer["weight_version"] == (sent or self.label)
        assert self.commit in (-1, answer["weight_commit"] - 1), "commit numbers count by one"
        self.commit, self.label = answer["weight_commit"], answer["weight_version"]
        self._token_of_commit[self.commit] = token
        return self.label

    def adopt(self, record: dict[str, Any], token: int) -> None:
        """Somebody else has put the weights that emit ``token`` in force, as the engine's record says."""
        assert record["weight_commit"] == self.commit + 1
        self.commit, self.label = record["weight_commit"], record["weight_version"]
        self._token_of_commit[self.commit] = token
        self.foresee(self.label, token)

    def foresee(self, label: str, token: int) -> None:
        """Weights that emit ``token`` may come into force under this label."""
        self._tokens_of_label.setdefault(label, set()).add(token)

    def emitting(self, token: int) -> Path:
        """A directory of the weights that emit ``token``."""
        return self._checkpoints.emitting(token)

    async def relabel(self) -> str:
        """Renames the weights in force."""
        label = f"renamed#{next(_serial)}"
        self._tokens_of_label[label] = {self._token_of_commit[self.commit]}
        await self.driver.relabel(label)
        self.label = label
        return label

    def check(self, rollout: Rollout) -> None:
        """Every token of every sequence was sampled by the weights that the spans name.

        Raises:
            AssertionError: one was not, or the spans are not a cover of the tokens.
        """
        for choice in rollout.choices:
            self._check_choice(choice)
            if rollout.weight_commit is not None and choice.weight_commits:
                assert rollout.weight_commit <= choice.weight_commits[0]["commit"], "admitted under a later commit"
        if rollout.weight_commit is not None:
            assert rollout.weight_commit in self._token_of_commit
            assert rollout.weight_version in self._tokens_of_label

    def _check_choice(self, choice: Choice) -> None:
        assert choice.finals == 1
        versions, commits = choice.weight_versions, choice.weight_commits
        assert_cover(versions, "version", len(choice.token_ids))
        assert_cover(commits, "commit", len(choice.token_ids))
        assert versions is not None
        assert commits is not None
        for span in versions:
            tokens = set(choice.token_ids[span["start"] : span["end"]])
            assert tokens <= self._tokens_of_label[span["version"]], f"{choice} has foreign tokens in {span}"
        for span in commits:
            tokens = set(choice.token_ids[span["start"] : span["end"]])
            assert tokens == {self._token_of_commit[span["commit"]]}, f"{choice} has foreign tokens in {span}"
        commits_in_order = [span["commit"] for span in commits]
        assert commits_in_order == sorted(commits_in_order)
        for chunk_spans, spans, key in (
            (choice.chunk_versions, versions, "version"),
            (choice.chunk_commits, commits, "commit"),
        ):
            for part in chunk_spans:
                whole = next(span for span in spans if span["start"] <= part["start"] < span["end"])
                assert part[key] == whole[key]
                assert part["end"] <= whole["end"]


def assert_cover(spans: list[dict[str, Any]] | None, key: str, tokens: int) -> None:
    """The spans cover ``tokens`` tokens exactly once, in order, and neighbours differ."""
    assert spans is not None
    position = 0
    for span in spans:
        assert set(span) == {key, "start", "end"}
        assert span["start"] == position < span["end"]
        position = span["end"]
    assert position == tokens
    assert all(left[key] != right[key] for left, right in pairwise(spans))


def versions(choice: Choice) -> list[str | None]:
    """Labels of a sequence's spans, in order."""
    assert choice.weight_versions is not None
    return [span["version"] for span in choice.weight_versions]
