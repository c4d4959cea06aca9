"""InputBatchBuilder: from what the scheduler picked to the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rollspan.engine.request import PENDING, Request
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.kernels.attention import AttentionBatch
from rollspan.runner.decode_batch import DecodeBatch
from rollspan.runner.input_batch import InputBatch, PendingTokens, block_table


class InputBatchBuilder:
    """Builds each step's tensors; a step that decodes what the last one did gets those of the last one, moved on.

    Steps must be built in the order in which they run: a batch is valid until the next call.

    Args:
        block_size: tokens per KV block.
        device: where the tensors go.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._decode: DecodeBatch | None = None  # the last step, if it was a decode step

    def build(self, scheduled: Sequence[ScheduledRequest], pending: PendingTokens | None = None) -> InputBatch:
        """Lays the scheduled tokens out; those that are still being sampled are taken from ``pending``."""
        requests = [entry.request for entry in scheduled]
        # A prompt of one token, or the last piece of one, may have to be scored and need not be sampled from.
        for entry in scheduled:
            if entry.num_tokens != 1 or not entry.samples or entry.request.params.prompt_logprobs is not None:
                self._decode = None
                return self._mixed_step(scheduled, requests, pending)
        decode = self._decode
        if decode is None or not decode.advance(requests):
            decode = self._decode = DecodeBatch(requests, self._block_size, self._device)
        return decode.fill(pending)

    def _mixed_step(
        self, scheduled: Sequence[ScheduledRequest], requests: list[Request], pending: PendingTokens | None
    ) -> InputBatch:
        """Any number of tokens of each request."""
        table = block_table(requests)
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
        known = np.array(ids, dtype=np.int64)
        input_ids = self._tensor(known[None])
        if pending is not None:
            rows = np.flatnonzero(known == PENDING)
            pending.put(input_ids, rows, [requests[owner[row]] for row in rows])
        return InputBatch(
            input_ids=input_ids,
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

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
