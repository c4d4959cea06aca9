"""Weight-version spans: which weights sampled which output tokens, and which computed the KV that these attended to.

`SpanBuilder` is the executable definition of a span list, `KvVersionBuilder` that of KV versions. The Rust frontend has
the same logic; shared vectors and property tests hold the two against each other.

A span is half-open and counts output tokens only, the prompt is excluded:

* version span ``{"version": label, "start": i, "end": j}``
* commit span  ``{"commit": n, "start": i, "end": j}``

Laws, for each of the two lists on its own:

1. A list covers the returned tokens exactly once, contiguously and in generation order.
2. Adjacent spans have different values: A then A is one span, A then B then A is three.
3. Outputs without tokens never open a span, whatever they are stamped with.
4. Tokens without a stamp get a span of their own whose value is ``None``: never the neighbour's value, never a hole.
5. No tokens: the list is empty. Tokens, but not one of them stamped: there is no list (``None``), as from an engine
   that reports no labels at all. Trimming stamped tokens away does not make the engine one that reports none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Generic, TypedDict, TypeVar


class VersionSpan(TypedDict):
    """Tokens ``start`` to ``end - 1`` were sampled by the weights called ``version`` (None: the engine did not say)."""

    version: str | None
    start: int
    end: int


class CommitSpan(TypedDict):
    """Tokens ``start`` to ``end - 1`` were sampled by the weights of commit ``commit`` (None: the engine is silent)."""

    commit: int | None
    start: int
    end: int


class WeightSpan(TypedDict):
    """Positions ``start`` to ``end - 1`` belong to the weights of a label and a commit number (None: nobody said)."""

    version: str | None
    commit: int | None
    start: int
    end: int


class KvVersionSpan(TypedDict):
    """What output tokens ``start`` to ``end - 1`` attended to.

    ``kv`` says which weights computed the keys and values of positions 0 (the first of the prompt) to the last that
    token ``end - 1`` attended to, its own input's: as many as prompt and output together have before that token.
    """

    start: int
    end: int
    kv: list[WeightSpan]


Stamp = TypeVar("Stamp", str, int)


class _Runs(Generic[Stamp]):
    """Run-length list of the stamps of consecutive tokens."""

    __slots__ = ("ends", "stamped", "stamps")

    def __init__(self) -> None:
        self.stamps: list[Stamp | None] = []
        self.ends: list[int] = []
        self.stamped = False

    def extend(self, stamp: Stamp | None, end: int) -> None:
        if stamp is not None:
            self.stamped = True
        if self.stamps and self.stamps[-1] == stamp:
            self.ends[-1] = end
        else:
            self.stamps.append(stamp)
            self.ends.append(end)

    def between(self, start: int, end: int) -> list[tuple[Stamp | None, int, int]] | None:
        """Runs cut to tokens ``start`` to ``end - 1``: O(runs from ``start`` on), for it walks back from the newest."""
        if end <= start:
            return []
        if not self.stamped:
            return None
        found = []
        for position in range(len(self.ends) - 1, -1, -1):
            run_start = self.ends[position - 1] if position else 0
            if self.ends[position] <= start:
                break
            if run_start < end:
                found.append((self.stamps[position], max(run_start, start), min(self.ends[position], end)))
        found.reverse()
        return found


class SpanBuilder:
    """Collects the stamps of one output sequence. O(1) for each engine output, O(spans) memory."""

    __slots__ = ("_commits", "_tokens", "_versions")

    def __init__(self) -> None:
        self._versions: _Runs[str] = _Runs()
        self._commits: _Runs[int] = _Runs()
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Number of tokens pushed so far."""
        return self._tokens

    def push(self, version: str | None, commit: int | None, tokens: int) -> None:
        """Record that the next ``tokens`` output tokens were sampled under this label and commit number.

        Raises ValueError for a negative number of tokens.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}")
        if tokens == 0:
            return
        self._tokens += tokens
        self._versions.extend(version, self._tokens)
        self._commits.extend(commit, self._tokens)

    def runs(self, total: int) -> list[tuple[str | None, int | None, int]]:
        """(label, commit number, end) of the first ``total`` tokens, in order; neighbours differ in one of them."""
        versions, commits = self._versions, self._commits
        ends = sorted({*versions.ends, *commits.ends})
        found: list[tuple[str | None, int | None, int]] = []
        for end in ends:
            if found and found[-1][2] >= total:
                break
            version = versions.stamps[bisect_left(versions.ends, end)]
            commit = commits.stamps[bisect_left(commits.ends, end)]
            found.append((version, commit, min(end, total)))
        return found if total else []

    def finish(self, total: int | None = None) -> tuple[list[VersionSpan] | None, list[CommitSpan] | None]:
        """Version spans and commit spans of the first ``total`` tokens (default: all), for an output trimmed to them.

        The builder is unchanged, so this may be called at any time. Raises ValueError when ``total`` is negative or
        more than was pushed.
        """
        return self.between(0, self._tokens if total is None else total)

    def between(self, start: int, end: int) -> tuple[list[VersionSpan] | None, list[CommitSpan] | None]:
        """Version spans and commit spans of tokens ``start`` to ``end - 1``: one chunk of a stream.

        Indexes in the spans count from the start of the output. Raises ValueError unless
        ``0 <= start <= end <= tokens``.
        """
        if not 0 <= start <= end <= self._tokens:
            raise ValueError(
                f"spans of tokens {start} to {end} asked for, but tokens 0 to {self._tokens} were recorded"
            )
        versions = self._versions.between(start, end)
        commits = self._commits.between(start, end)
        return (
            None
            if versions is None
            else [{"version": value, "start": first, "end": last} for value, first, last in versions],
            None
            if commits is None
            else [{"commit": value, "start": first, "end": last} for value, first, last in commits],
        )


#: (label, commit number, start, end), as an engine announces them.
_Announced = Sequence[tuple[str, int, int, int]]
#: (label, commit number, end): what belongs to them from the end of the run before, or 0, up to ``end - 1``.
_Run = tuple[str | None, int | None, int]


class KvVersionBuilder:
    """Collects which weights computed the KV of one sequence. Costs nothing for outputs without KV spans.

    With P prompt tokens, output token i attends to positions 0 to P + i - 1, the last of which is its own input's.

    Laws:

    1. Segments cover the returned tokens exactly once, contiguously and in generation order. One begins with the first
       token, with each token that KV spans came with, and with each whose stamp (label or commit number) differs from
       that of the token before.
    2. KV spans that come with an output describe the KV at positions 0 to P + i - 1 of its first token i, all of them.
       Each token after that adds the position before it, under its own stamp.
    3. ``kv`` of a segment that ends with token e - 1 covers positions 0 to P + e - 2, contiguously; neighbours differ
       in label or commit number. It is what the segment's last token attended to; that of token i before it is the
       same, cut behind position P + i - 1.
    4. Before the first KV spans nobody has said whose the prompt's KV is: there ``version`` and ``commit`` are None.
       When none have come at all, there is no list (``None``), as from an engine that knows nothing of them; but no
       tokens make an empty list.
    5. Outputs without tokens say nothing, whatever they are stamped with.

    Args:
        prompt_length: P.
        stamps: of the tokens, when somebody else collects them; `push` is not for use then.
    """

    __slots__ = ("_announced", "_prompt_length", "_stamps")

    def __init__(self, prompt_length: int, stamps: SpanBuilder | None = None) -> None:
        self._prompt_length = prompt_length
        self._stamps = SpanBuilder() if stamps is None else stamps
        self._announced: dict[int, list[_Run]] = {}

    def push(self, version: str | None, commit: int | None, tokens: int, kv_spans: _Announced | None = None) -> None:
        """Records that the next ``tokens`` output tokens were sampled under this stamp; ``kv_spans`` came with them.

        Raises ValueError for a negative number of tokens, or KV spans that don't cover what comes before the first one.
        """
        if tokens > 0 and kv_spans is not None:
            self.announce(kv_spans)
        self._stamps.push(version, commit, tokens)

    def announce(self, kv_spans: _Announced) -> None:
        """Records that ``kv_spans`` come with the token that is the next one to be stamped.

        Raises ValueError when they don't cover what comes before it.
        """
        index = self._stamps.tokens
        self._announced[index] = _checked(kv_spans, self._prompt_length + index)

    def finish(self, total: int | None = None) -> list[KvVersionSpan] | None:
        """Segments of the first ``total`` tokens (default: all), for an output trimmed to them.

        The builder is unchanged. Raises ValueError when ``total`` is negative or more than was pushed.
        """
        total = self._stamps.tokens if total is None else total
        if not 0 <= total <= self._stamps.tokens:
            raise ValueError(f"KV versions of {total} tokens asked for, but {self._stamps.tokens} were recorded")
        if total and not self._announced:
            return None
        found: list[KvVersionSpan] = []
        kv: list[_Run] = [(None, None, self._prompt_length)]
        start = 0
        for version, commit, stop in self._stamps.runs(total):
            for end in (*(index for index in self._announced if start < index < stop), stop):
                kv = list(self._announced.get(start, kv))
                length = self._prompt_length + end - 1
                if kv[-1][2] < length:
                    if kv[-1][:2] == (version, commit):
                        kv.pop()
                    kv.append((version, commit, length))
                found.append({"start": start, "end": end, "kv": _spans(kv)})
                start = end
        return found


def _checked(kv_spans: _Announced, length: int) -> list[_Run]:
    """Announced spans as runs, equal neighbours merged.

    Raises ValueError unless they cover positions 0 to ``length - 1`` in order.
    """
    runs: list[_Run] = []
    position = 0
    for version, commit, start, end in kv_spans:
        if start != position or end <= start:
            raise ValueError(f"KV spans name positions {start} to {end} where {position} comes next")
        if runs and runs[-1][:2] == (version, commit):
            runs.pop()
        runs.append((version, commit, end))
        position = end
    if position != length:
        raise ValueError(f"KV spans cover {position} positions, but {length} come before the token")
    return runs


def _spans(runs: list[_Run]) -> list[WeightSpan]:
    starts = [0, *(end for _, _, end in runs)]
    return [
        {"version": version, "commit": commit, "start": start, "end": end}
        for (version, commit, end), start in zip(runs, starts, strict=False)
    ]
