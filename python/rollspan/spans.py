"""Weight-version spans: which weights sampled which output tokens.

`SpanBuilder` is the executable definition of a span list. The Rust frontend has the same logic; shared vectors and a
property test hold the two against each other.

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
