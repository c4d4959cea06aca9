"""SamplingBatch: how the requests of a step are sampled, as arrays that follow the batch instead of being rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollspan.engine.request import Request
from rollspan.kernels import logit_edits
from rollspan.kernels.sampling import Edited, Rows, make_rows
from rollspan.sampler.edit_tables import EditTables

_TOKEN_IDS = attrgetter("token_ids")

#: What is remembered of each request besides its row: constants.
_FACTS = np.dtype([("num_prompt_tokens", np.int64), ("min_tokens", np.int64), ("edited", np.bool_)])


class SamplingBatch:
    """The requests of the last step, and what the sampler needs to know about them.

    Everything follows from the requests' parameters, seeds and token ids, so that it does not matter which requests
    came before, or whether one was preempted.

    Attributes:
        vocabulary: columns of the logits.
        rows: the parameters of each request, as :func:`rollspan.kernels.sampling.sample` takes them.
        wanted: rows of the requests that want log-probs, ascending, by the number of columns that they want, the
            sampled token's included.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._requests: list[Request] = []
        self._places: dict[Request, int] = {}
        self._facts: npt.NDArray[np.void] = np.zeros(0, _FACTS)
        self._edits = EditTables(vocabulary)
        self._editable = False
        self.rows: Rows = make_rows(0)
        self.wanted: dict[int, npt.NDArray[np.intp]] = {}

    def update(self, requests: Sequence[Request]) -> None:
        """Takes over the requests of this step; where they are those of the last step, no Python runs per request."""
        requests = requests if isinstance(requests, list) else list(requests)
        same = requests == self._requests
        if not same:
            self._replace(requests)
        lengths = np.fromiter(map(len, map(_TOKEN_IDS, requests)), np.int64, len(requests))
        positions = lengths - self._facts["num_prompt_tokens"]
        self.rows["position"] = positions
        if self._editable or self._edits.index.size:
            edited = self._facts["edited"] | (positions < self._facts["min_tokens"])
            self._edits.update(requests, np.flatnonzero(edited), lengths, same=same)

    def _replace(self, requests: list[Request]) -> None:
        places = self._places
        index = np.fromiter((places.get(request, -1) for request in requests), np.intp, len(requests))
        if len(self.rows):
            self.rows, self._facts = self.rows[index], self._facts[index]
        else:
            self.rows, self._facts = make_rows(len(requests)), np.zeros(len(requests), _FACTS)
        for place in np.flatnonzero(index < 0).tolist():
            self.rows[place] = self._row(requests[place])
            self._facts[place] = self._fact(requests[place])
        self._requests = list(requests)
        self._places = {request: place for place, request in enumerate(requests)}
        self._editable = bool((self._facts["edited"] | (self._facts["min_tokens"] > 0)).any())
        columns = self.rows["num_top"] + 1
        self.wanted = {count: np.flatnonzero(columns == count) for count in np.unique(columns).tolist() if count}

    def _row(self, request: Request) -> tuple[float, ...]:
        params, size = request.params, self.vocabulary
        temperature = 0.0 if params.greedy else params.temperature
        top_k = params.top_k if 0 < params.top_k < size else 0
        count = params.logprobs
        num_top = -1 if count is None else size if count == -1 else min(count, size)
        return (0, 0, request.seed, 0, temperature, params.top_p, params.min_p, top_k, num_top, 0, 0, 0)

    def _fact(self, request: Request) -> tuple[int, int, bool]:
        params = request.params
        edited = bool(
            params.allowed_token_ids
            or params.logit_bias
            or params.bad_words_token_ids
            or params.frequency_penalty
            or params.presence_penalty
            or params.repetition_penalty != 1
        )
        ends = any(token < self.vocabulary for token in params.all_stop_token_ids)
        return request.num_prompt_tokens, params.min_tokens if ends else 0, edited

    def edit(self, logits: Tensor, mask: Tensor | None) -> Edited | None:
        """The rows that masks, biases or penalties change, changed; None when there are none.

        Args:
            logits: ``[S, vocabulary]``, left as they are.
            mask: allowed tokens, see :meth:`rollspan.sampler.sampler.Sampler.sample`.
        """
        index = own = self._edits.index
        if mask is not None:
            mask = mask.to(logits.device)
            bound = (mask != -1 if mask.dtype == torch.int32 else ~mask).any(dim=-1)
            index = np.union1d(own, np.flatnonzero(bound.cpu().numpy()))
        if not index.size:
            return None
        at = torch.from_numpy(index).to(logits.device)
        changed = logits.index_select(0, at).float()
        if mask is not None:
            mine = mask.index_select(0, at)
            logit_edits.allow_mask(
                changed, logit_edits.unpack(mine, logits.shape[1]) if mine.dtype == torch.int32 else mine
            )
        self._edits.apply(changed, np.searchsorted(index, own))
        return index, changed
