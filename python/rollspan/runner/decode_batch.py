"""DecodeBatch: the tensors of a run of steps in which the same requests decode, one token each."""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt
import torch

from rollspan.engine.request import PENDING, Request
from rollspan.kernels.attention import AttentionBatch
from rollspan.runner.input_batch import InputBatch, PendingTokens, block_table


class DecodeBatch:
    """One step's inputs, which :meth:`advance` turns into the next one's where they are.

    On a CPU the tensors are views of the numpy arrays: a forward pass has read them when it returns. Another device has
    copies, which change in the order of its stream: a step that was launched before still reads its own numbers. The
    arrays are not pinned, so that they have been read when the call that copies them returns.

    Args:
        requests: the last known token of each is run.
        block_size: tokens per KV block.
        device: where the tensors go.
    """

    def __init__(self, requests: list[Request], block_size: int, device: torch.device) -> None:
        count = len(requests)
        self._requests = requests
        self._lists = [request.block_ids for request in requests]
        self._block_size = block_size
        self._table = block_table(requests)
        numbers = np.zeros((4, count), dtype=np.int64)  # what changes in each step, to be copied as one
        self._ids, self._positions, self._slots, lens = numbers
        self._seq_lens = lens.view(np.int32)[:count]
        self._places = numbers[1:3]
        # Adding an array is faster than adding a number, whose type has to be found first.
        self._one, self._ones = np.ones(count, dtype=np.int32), np.ones((2, count), dtype=np.int64)
        self._positions[:] = [request.num_computed_tokens for request in requests]
        self._seq_lens[:] = self._positions + 1
        self._enter_blocks(np.arange(count))
        self._copied = [_Copied(numbers, device), _Copied(self._table, device)]
        numbers_there, table = (copied.tensor for copied in self._copied)
        rows = torch.arange(count + 1, device=device)
        self._inputs = InputBatch(
            input_ids=numbers_there[:1],
            positions=numbers_there[1:2],
            attention=AttentionBatch(
                query_start=rows.int(),
                seq_lens=numbers_there[3].view(torch.int32)[:count],
                block_table=table,
                slot_mapping=numbers_there[2],
                max_query_len=1,
                max_seq_len=int(self._seq_lens.max()),
            ),
            sample_rows=rows[:count],
            sampled=requests,
            scored=[],
        )

    def advance(self, requests: list[Request]) -> bool:
        """Moves on by one token of each request; False, with nothing changed, where the next step is another one.

        Those who were in the last step have computed it, or none of them has: the longest one stands for all.
        """
        attention = self._inputs.attention
        longest = max([request.num_computed_tokens for request in requests])
        if (
            requests != self._requests
            or longest != attention.max_seq_len
            or longest >= self._table.shape[1] * self._block_size
            # A list only grows while its request runs; who was preempted in between has another one.
            or not all(map(operator.is_, self._lists, [request.block_ids for request in requests]))
        ):
            return False
        np.add(self._places, self._ones, out=self._places)
        np.add(self._seq_lens, self._one, out=self._seq_lens)
        attention.advance(longest + 1)
        if self._room > 0:
            self._room -= 1
        else:
            self._enter_blocks(np.flatnonzero(self._positions % self._block_size == 0))
            self._copied[1].changed()
        return True

    def _enter_blocks(self, rows: npt.NDArray[np.intp]) -> None:
        """These sequences go on in another block than before."""
        size = self._block_size
        positions = self._positions[rows]
        columns = positions // size
        blocks = [self._lists[row][column] for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]
        self._table[rows, columns] = blocks
        self._slots[rows] = np.array(blocks, dtype=np.int64) * size + positions % size
        self._room = size - 1 - int((self._positions % size).max())  # steps in which no sequence does so again

    def fill(self, pending: PendingTokens | None) -> InputBatch:
        """The step, valid until the next one; tokens that are still being sampled are taken from ``pending``."""
        requests, inputs = self._requests, self._inputs
        self._ids[:] = [request.token_ids[-1] for request in requests]
        self._copied[0].changed()
        if pending is not None:
            rows = np.flatnonzero(self._ids == PENDING)
            pending.put(inputs.input_ids, rows, [requests[row] for row in rows.tolist()])
        return inputs


class _Copied:
    """An array and its tensor on a device, which share memory on a CPU."""

    def __init__(self, array: npt.NDArray[np.integer], device: torch.device) -> None:
        self._array = torch.from_numpy(array)
        self.tensor = self._array.to(device)

    def changed(self) -> None:
        if self.tensor is not self._array:
            self.tensor.copy_(self._array, non_blocking=True)
