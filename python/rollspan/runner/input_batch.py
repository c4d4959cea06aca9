"""InputBatch: the tensors of one step, built from what the scheduler picked."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollspan.engine.request import PENDING, Request
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.kernels.attention import AttentionBatch


@dataclass(frozen=True)
class InputBatch:
    """One step as a single flattened row of T tokens, one request after the other.

    Attributes:
        input_ids: int64 ``[1, T]``.
        positions: int64 ``[1, T]``, counted from the start of each sequence.
        attention: which keys each row sees, and where its own go.
        sample_rows: int64 ``[S + R]``, rows whose logits are needed: S to sample from, then R that score prompt tokens.
        sampled: the S requests whose next token can be sampled, in the order of their rows.
        scored: for each request whose prompt is scored in this step, the prompt tokens ``start`` to ``stop - 1``
            that the next ``stop - start`` of the R rows predict.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    sample_rows: torch.Tensor
    sampled: list[Request]
    scored: list[tuple[Request, int, int]]


@dataclass(frozen=True)
class PendingTokens:
    """What a step that has been launched, but not collected, samples.

    Attributes:
        requests: S of them.
        token_ids: int64 ``[S]``, on the device.
    """

    requests: list[Request]
    token_ids: torch.Tensor


@dataclass(frozen=True)
class StepLogits:
    """What a runner makes of a step.

    Attributes:
        logits: ``[S + R, vocabulary]``, rows as in :class:`InputBatch`.
        sampled: the S requests of the first rows.
        scored: whose prompt tokens the other rows predict, as in :class:`InputBatch`.
    """

    logits: torch.Tensor
    sampled: list[Request]
    scored: list[tuple[Request, int, int]]


class InputBatchBuilder:
    """Builds each step's tensors; what a run of decode steps has in common is kept from one to the next.

    Args:
        block_size: tokens per KV block.
        device: where the tensors go.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._lists: list[list[int]] = []  # block_ids of the last step's requests, if it was a decode step
        self._num_blocks: list[int] = []
        self._table: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._query_start = np.zeros(1, dtype=np.int32)
        self._rows = np.zeros(0, dtype=np.int64)

    def build(self, scheduled: Sequence[ScheduledRequest], pending: PendingTokens | None = None) -> InputBatch:
        """Lays the scheduled tokens out; those that are still being sampled are taken from ``pending``."""
        requests = [entry.request for entry in scheduled]
        # A prompt of one token, or the last piece of one, may have to be scored and need not be sampled from.
        if all(
            entry.num_tokens == 1 and entry.samples and entry.request.params.prompt_logprobs is None
            for entry in scheduled
        ):
            return self._decode_step(requests, pending)
        self._lists = []
        return self._mixed_step(scheduled, requests, pending)

    def _decode_step(self, requests: list[Request], pending: PendingTokens | None) -> InputBatch:
        """One token of each request."""
        count = len(requests)
        lists = [request.block_ids for request in requests]
        # A list only grows while its request runs; who was preempted in between has another one.
        if len(lists) != len(self._lists) or not all(map(operator.is_, lists, self._lists)):
            self._lists = lists
            self._table = self._block_table(requests)
            self._query_start = np.arange(count + 1, dtype=np.int32)
            self._rows = np.arange(count, dtype=np.int64)
        else:
            for row, blocks in enumerate(lists):
                if len(blocks) != self._num_blocks[row]:
                    if len(blocks) > self._table.shape[1]:
                        self._table = self._block_table(requests)
                        break
                    self._table[row, : len(blocks)] = blocks
        self._num_blocks = list(map(len, lists))
        positions = np.array([request.num_computed_tokens for request in requests], dtype=np.int64)
        ids = np.array([request.token_ids[-1] for request in requests], dtype=np.int64)
        slots = self._table[self._rows, positions // self._block_size].astype(np.int64) * self._block_size
        slots += positions % self._block_size
        return InputBatch(
            input_ids=self._input_ids(ids, requests, self._rows, pending),
            positions=self._tensor(positions[None]),
            attention=AttentionBatch(
                query_start=self._tensor(self._query_start),
                seq_lens=self._tensor((positions + 1).astype(np.int32)),
                block_table=self._tensor(self._table),
                slot_mapping=self._tensor(slots),
                max_query_len=1,
                max_seq_len=int(positions.max()) + 1,
            ),
            sample_rows=self._tensor(self._rows),
            sampled=requests,
            scored=[],
        )

    def _mixed_step(
        self, scheduled: Sequence[ScheduledRequest], requests: list[Request], pending: PendingTokens | None
    ) -> InputBatch:
        """Any number of tokens of each request."""
        table = self._block_table(requests)
        counts = np.array([entry.num_tokens for entry in scheduled], dtype=np.int64)
        starts = np.array([request.num_computed_tokens for request in requests], dtype=np.int64)
        query_start = np.zeros(len(requests) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        owner = np.repeat(np.arange(len(requests)), counts)
        positions = np.arange(int(counts.sum()), dtype=np.int64) - (query_start[:-1] - starts)[owner]
        slots = table[owner, positions // self._block_size].astype(np.int64) * self._block_size
        slots += positions % self._block_size
        ids: list[int] = []
        sample_rows: list[int] = []
        prompt_rows: list[int] = []
        sampled: list[Request] = []
        scored: list[tuple[Request, int, int]] = []
        for entry, request in zip(scheduled, requests, strict=True):
            row, start = len(ids), request.num_computed_tokens
            stop = start + entry.num_tokens
            ids += request.token_ids[start:stop]
            if entry.samples:
                sample_rows.append(len(ids) - 1)
                sampled.append(request)
            if request.params.prompt_logprobs is not None:
                first, last = max(request.num_scored_tokens, start + 1), min(request.num_prompt_tokens, stop + 1)
                if first < last:  # row of position p predicts the token at p + 1
                    prompt_rows += range(row + first - 1 - start, row + last - 1 - start)
                    scored.append((request, first, last))
        return InputBatch(
            input_ids=self._input_ids(np.array(ids, dtype=np.int64), requests, owner, pending),
            positions=self._tensor(positions[None]),
            attention=AttentionBatch(
                query_start=self._tensor(query_start),
                seq_lens=self._tensor((starts + counts).astype(np.int32)),
                block_table=self._tensor(table),
                slot_mapping=self._tensor(slots),
                max_query_len=int(counts.max()),
                max_seq_len=int((starts + counts).max()),
            ),
            sample_rows=self._tensor(np.array(sample_rows + prompt_rows, dtype=np.int64)),
            sampled=sampled,
            scored=scored,
        )

    def _input_ids(
        self,
        ids: npt.NDArray[np.int64],
        requests: list[Request],
        owner: npt.NDArray[np.int64],
        pending: PendingTokens | None,
    ) -> torch.Tensor:
        """int64 ``[1, T]``; row i belongs to ``requests[owner[i]]``."""
        input_ids = self._tensor(ids[None])
        if pending is not None:
            rows = np.flatnonzero(ids == PENDING)
            places = {request: place for place, request in enumerate(pending.requests)}
            sources = np.array([places[requests[owner[row]]] for row in rows], dtype=np.int64)
            input_ids[0, self._tensor(rows)] = pending.token_ids[self._tensor(sources)]
        return input_ids

    @staticmethod
    def _block_table(requests: list[Request]) -> npt.NDArray[np.int32]:
        """int32 ``[requests, longest]``, with room to grow: the next blocks need no new table."""
        width = max(len(request.block_ids) for request in requests) + 8
        table = np.zeros((len(requests), width), dtype=np.int32)
        for row, request in enumerate(requests):
            table[row, : len(request.block_ids)] = request.block_ids
        return table

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
