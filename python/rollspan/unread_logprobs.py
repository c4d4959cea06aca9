"""Log-probs of outputs as arrays, which become objects when they are first read."""

from __future__ import annotations

from collections.abc import Sequence

from rollspan.outputs import Logprob, PositionLogprobs, UnreadLogprobs
from rollspan.protocol.messages import LogprobsLists
from rollspan.protocol.packed_logprobs import PackedLogprobs, numbers_of


class LogprobsPiece:
    """Consecutive positions, made into objects once, whichever outputs they are part of.

    Args:
        lists: the arrays.
        top: how many log-probs a position has besides the sampled one, -1 for all.
    """

    __slots__ = ("_lists", "_positions", "_top")

    def __init__(self, lists: LogprobsLists, top: int) -> None:
        self._lists: LogprobsLists | None = lists
        self._positions: list[PositionLogprobs] = []
        self._top = top

    def positions(self) -> list[PositionLogprobs]:
        """One entry for each position: its own token, then the ``top`` most probable ones, which may name it again."""
        # The reader of an output need not be in the thread that pushes: twice the work is all that may happen.
        lists = self._lists
        if lists is not None:
            self._positions = _positions(lists, self._top)
            self._lists = None
        return self._positions


class UnreadPositions(UnreadLogprobs[PositionLogprobs]):
    """Log-probs of an output's tokens."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[LogprobsPiece]) -> None:
        self._pieces = pieces

    def read(self) -> list[PositionLogprobs]:
        return [position for piece in self._pieces for position in piece.positions()]


class UnreadPrompt(UnreadLogprobs["PositionLogprobs | None"]):
    """Log-probs of a prompt's tokens, whose first has none.

    Args:
        piece: the others; None where there are none.
    """

    __slots__ = ("_piece",)

    def __init__(self, piece: LogprobsPiece | None) -> None:
        self._piece = piece

    def read(self) -> list[PositionLogprobs | None]:
        return [None, *([] if self._piece is None else self._piece.positions())]


def _positions(lists: LogprobsLists, top: int) -> list[PositionLogprobs]:
    count = lists.layout.columns if isinstance(lists, PackedLogprobs) else lists.token_ids.shape[1]
    columns = count if top < 0 else min(count, top + 1)
    if columns == 1:
        return [{ids[0]: Logprob(values[0], rank)} for ids, values, rank in numbers_of(lists)]
    found = []
    for ids, values, rank in numbers_of(lists):
        own = ids[0]
        position = {own: Logprob(values[0], rank)}
        for column in range(1, columns):
            if ids[column] != own:
                position[ids[column]] = Logprob(values[column], column)
        found.append(position)
    return found
