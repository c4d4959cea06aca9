"""``rollspan verify``: recorded rollouts against the checkpoints that their spans name."""

from __future__ import annotations

from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Run ``rollspan verify WORDS``; returns the exit code."""
    from rollspan.verify.command import run

    return run(words)
