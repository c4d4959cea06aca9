"""EditTables: masks, biases and penalties of a batch's requests, as tables of cells that follow the batch."""

from __future__ import annotations

from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollspan.engine.request import Request
from rollspan.kernels import logit_edits

_TOKEN_IDS = attrgetter("token_ids")
_LAST = itemgetter(-1)
_ANY = -2  # matches whatever token is there, or none
_NONE = -1  # no token there yet

Ints = npt.NDArray[np.int64]


class _Table:
    """Cells of the edited rows: columns of one length, the row's number first."""

    def __init__(self, *types: npt.DTypeLike) -> None:
        self.columns: list[npt.NDArray[Any]] = [np.zeros(0, np.dtype(kind)) for kind in (np.int64, *types)]

    @property
    def rows(self) -> Ints:
        return self.columns[0]

    def move(self, places: Ints) -> None:
        """Row r becomes row ``places[r]``; where that is negative its cells go."""
        self.columns[0] = places[self.rows]
        self.keep(self.rows >= 0)

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        """Keeps these cells only."""
        self.columns = [column[mask] for column in self.columns]

    def add(self, *values: npt.ArrayLike) -> None:
        """Appends cells: one row's number or one for each cell, then a value for each column."""
        count = np.size(values[1])
        more = (
            np.broadcast_to(np.asarray(value, c.dtype), count) for value, c in zip(values, self.columns, strict=True)
        )
        self.columns = [np.concatenate(pair) for pair in zip(self.columns, more, strict=True)]

    def cells(self, places: Ints, device: torch.device) -> logit_edits.Cells:
        return logit_edits.Cells(
            torch.from_numpy(places[self.rows]).to(device), torch.from_numpy(self.columns[1]).to(device)
        )

    def __len__(self) -> int:
        return len(self.rows)


class EditTables:
    """What is done to which logits of the rows in ``index`` (of the batch, ascending) before they are sampled from."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._requests: list[Request] = []
        self._places: dict[Request, int] = {}
        self._lengths: Ints = np.zeros(0, np.int64)
        self._penalties: npt.NDArray[np.float32] = np.zeros((0, 3), np.float32)
        self._allowed = _Table(np.int64)
        self._bias = _Table(np.int64, np.float32)
        self._stops = _Table(np.int64, np.int64)
        self._output = _Table(np.int64)
        self._seen = _Table(np.int64)
        self._words: _BadWords | None = None
        self.index: npt.NDArray[np.intp] = np.zeros(0, np.intp)

    @property
    def _tables(self) -> tuple[_Table, ...]:
        return self._allowed, self._bias, self._stops, self._output, self._seen

    def update(self, requests: list[Request], index: npt.NDArray[np.intp], lengths: Ints, *, same: bool) -> None:
        """Follows the batch.

        Args:
            requests: of this step.
            index: those with edits.
            lengths: known tokens of each of ``requests``.
            same: the requests are those of the last step.
        """
        lengths = lengths[index]
        steady = same and np.array_equal(index, self.index)
        if steady and bool((lengths == self._lengths).all()):
            return
        if not steady or bool((lengths - self._lengths != 1).any()):
            self._replace([requests[row] for row in index.tolist()], lengths)
        elif self._words is not None or bool((self._penalties != (0, 0, 1)).any()):
            self._append(np.arange(len(index)))
        if len(self._stops):  # forbidden until the output has its least length
            self._stops.keep(lengths[self._stops.rows] < self._stops.columns[2])
        self.index, self._lengths = index, lengths

    def _append(self, rows: npt.NDArray[np.intp]) -> None:
        """The requests of these rows have got one token more."""
        requests = (
            self._requests if len(rows) == len(self._requests) else [self._requests[row] for row in rows.tolist()]
        )
        last = np.fromiter(map(_LAST, map(_TOKEN_IDS, requests)), np.int64, len(requests))
        frequency, presence, repetition = self._penalties[rows].T
        for table, mine in ((self._output, (frequency != 0) | (presence != 0)), (self._seen, repetition != 1)):
            table.add(rows[mine], last[mine])
        if self._words is not None:
            self._words.append(last)

    def _replace(self, requests: list[Request], lengths: Ints) -> None:
        before = np.fromiter((self._places.get(request, -1) for request in requests), np.intp, len(requests))
        known: npt.NDArray[np.bool_] = before >= 0
        grown = lengths - (self._lengths[before] if len(self._lengths) else 0)
        known = known & ((grown == 0) | (grown == 1))
        places = np.full(len(self._requests), -1, np.int64)
        places[before[known]] = np.flatnonzero(known)
        for table in self._tables:
            table.move(places)
        self._penalties = self._penalties[before] if len(self._penalties) else np.zeros((len(requests), 3), np.float32)
        self._requests = requests
        self._places = {request: row for row, request in enumerate(requests)}
        self._words = None
        self._append(np.flatnonzero(known & (grown == 1)))
        for row in np.flatnonzero(~known).tolist():
            self._add(row, requests[row])
        if any(request.params.bad_words_token_ids for request in requests):
            self._words = _BadWords(requests, self._vocabulary)

    def _add(self, row: int, request: Request) -> None:
        params, size = request.params, self._vocabulary
        for table, ids in ((self._allowed, params.allowed_token_ids), (self._stops, params.all_stop_token_ids)):
            if inside := [token for token in ids or () if token < size]:
                until = (request.num_prompt_tokens + params.min_tokens,) if table is self._stops else ()
                table.add(row, inside, *until)
        if bias := {token: value for token, value in (params.logit_bias or {}).items() if token < size}:
            self._bias.add(row, list(bias), list(bias.values()))
        penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
        self._penalties[row] = penalties
        if penalties[0] or penalties[1]:
            self._output.add(row, request.token_ids[request.num_prompt_tokens :])
        if penalties[2] != 1:
            self._seen.add(row, np.unique(request.token_ids))

    def apply(self, logits: Tensor, places: npt.NDArray[np.intp]) -> None:
        """Edits rows ``places`` of ``logits`` (float32) in vLLM's order: allowed tokens, bad words, minimum length and
        bias, repetition penalty, frequency and presence penalty.
        """
        device = logits.device
        if len(self._allowed):
            logit_edits.allow(logits, self._allowed.cells(places, device))
        if self._words is not None:
            self._words.apply(logits, places)
        if len(self._stops):
            logit_edits.add(logits, self._stops.cells(places, device), -torch.inf)
        if len(self._bias):
            values = torch.from_numpy(self._bias.columns[2]).to(device)
            logit_edits.add(logits, self._bias.cells(places, device), values)
        if not len(self._seen) and not len(self._output):
            return
        penalties = np.zeros((len(logits), 3), np.float32)
        penalties[places] = self._penalties
        frequency, presence, repetition = torch.from_numpy(penalties).to(device).unbind(1)
        if len(self._seen):
            logit_edits.repeat(logits, self._seen.cells(places, device), repetition)
        if len(self._output):
            logit_edits.penalize(logits, self._output.cells(places, device), frequency, presence)


class _BadWords:
    """Sequences of tokens that the outputs must not hold: the last token is masked where the others came before it."""

    def __init__(self, requests: list[Request], vocabulary: int) -> None:
        words = [
            (row, word)
            for row, request in enumerate(requests)
            for word in request.params.bad_words_token_ids
            if word and max(word) < vocabulary
        ]
        longest = max((len(word) - 1 for _, word in words), default=0)
        self._rows: Ints = np.array([row for row, _ in words], np.int64)
        self._last: Ints = np.array([word[-1] for _, word in words], np.int64)
        beginnings = [[_ANY] * (longest + 1 - len(word)) + list(word[:-1]) for _, word in words]
        self._beginnings: Ints = np.array(beginnings, np.int64).reshape(len(words), longest)
        self._recent: Ints = np.full((len(requests), longest), _NONE, np.int64)
        for row, request in enumerate(requests):
            if recent := request.token_ids[max(request.num_prompt_tokens, len(request.token_ids) - longest) :]:
                self._recent[row, longest - len(recent) :] = recent

    def append(self, last: Ints) -> None:
        """Each request has got one token more."""
        if self._recent.shape[1]:
            self._recent = np.concatenate((self._recent[:, 1:], last[:, None]), axis=1)

    def apply(self, logits: Tensor, places: npt.NDArray[np.intp]) -> None:
        """Masks what would complete a word."""
        recent = self._recent[self._rows]
        complete = ((self._beginnings == recent) | (self._beginnings == _ANY)).all(axis=1)
        rows, tokens = torch.from_numpy(places[self._rows[complete]]), torch.from_numpy(self._last[complete])
        logit_edits.add(logits, logit_edits.Cells(rows.to(logits.device), tokens.to(logits.device)), -torch.inf)
