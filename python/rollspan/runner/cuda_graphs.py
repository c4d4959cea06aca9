"""CUDA graphs of decode steps: one launch instead of the hundreds that a forward pass is made of."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from rollspan.kernels.attention import AttentionBatch
from rollspan.runner.attention import PagedCache, StepContext
from rollspan.runner.loader import one_line

logger = logging.getLogger("rollspan.engine")

Replay = Callable[[], object]
_Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def padded_sizes(largest: int) -> list[int]:
    """Rows of the graphs for steps of 1 to ``largest`` rows: 1, 2, 4, and from there on multiples of 8."""
    return [*(size for size in (1, 2, 4) if size < largest), *range(8, largest, 8), largest]


class Recorder:
    """Records what functions launch on a device; the graphs share their memory, so that one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], object]) -> Replay:
        """Calls ``run``, which must not wait for the device: what it launches takes place in the replay only."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            try:
                # Other threads may use the device meanwhile.
                with torch.cuda.graph(graph, self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    run()
            finally:
                torch.cuda.set_stream(current)  # torch 2.13 leaves its own one current when a recording fails
        return graph.replay


class StepBuffers:
    """Inputs of recorded steps, at addresses that stay; rows that no sequence of the step uses hold padding.

    A padding row is a sequence of one token whose keys and values lie in the last block: block 0 has to keep its zeros.
    """

    def __init__(self, rows: int, max_model_len: int, cache: PagedCache, device: torch.device) -> None:
        size, scratch = cache.block_size, cache.num_blocks - 1
        self.input_ids = torch.zeros((1, rows), dtype=torch.int64, device=device)
        self.positions = torch.zeros((1, rows), dtype=torch.int64, device=device)
        self.sample_rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self._table = torch.zeros((rows, -(-max_model_len // size)), dtype=torch.int32, device=device)
        self._table[:, 0] = self._scratch = scratch
        self._padding = scratch * size + torch.arange(rows, dtype=torch.int64, device=device) % size
        self._slots = self._padding.clone()
        self._max_seq_len = self._table.shape[1] * size
        self._used = 0  # rows that may hold anything else than padding

    def batch(self, rows: int) -> AttentionBatch:
        """The first ``rows`` rows, with bounds that hold for every step: graphs keep numbers, and read tensors anew."""
        # Not the same object twice: what backends derive from it has to be computed within each graph.
        return AttentionBatch(
            query_start=self._query_start[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            block_table=self._table[:rows],
            slot_mapping=self._slots[:rows],
            max_query_len=1,
            max_seq_len=self._max_seq_len,
        )

    def fill(self, ids: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, batch: AttentionBatch) -> None:
        """Takes over a step in which each sequence has one row; without waiting for the device."""
        rows, samples = batch.seq_lens.shape[0], sampled.shape[0]
        # The builder's table has room to grow, and columns past the end of a sequence are not read.
        width = min(batch.block_table.shape[1], self._table.shape[1])
        self.input_ids[:, :rows].copy_(ids)
        self.positions[:, :rows].copy_(positions)
        self.sample_rows[:samples].copy_(sampled)
        self._seq_lens[:rows].copy_(batch.seq_lens)
        self._table[:rows, :width].copy_(batch.block_table[:, :width])
        self._slots[:rows].copy_(batch.slot_mapping)
        if rows < self._used:
            unused = slice(rows, self._used)
            self._seq_lens[unused] = 1
            self._table[unused, 0] = self._scratch
            self._slots[unused].copy_(self._padding[unused])
        if samples < self._used:
            self.sample_rows[samples : self._used] = 0
        self._used = rows


class CudaGraphs:
    """A forward that runs decode steps as CUDA graphs and leaves other steps to the model.

    The graph for a number of rows is recorded when it is first needed, for the KV cache in use then; a new cache
    discards all graphs. A commit does not: on CUDA devices weights are updated where they are
    (:mod:`rollspan.weights`), and graphs read them there. Where recording fails, because code of the model or of the
    attention waits for the device, all further steps are left to the model.

    Args:
        forward: the model's own.
        context: the forward's ``rollspan_step``; the last block of its cache must be nobody's.
        sizes: numbers of rows that graphs are recorded for, ascending.
        max_model_len: most tokens of a sequence.
        recorder: makes what records graphs.

    Attributes:
        failed: recording has failed.
    """

    def __init__(
        self,
        forward: _Forward,
        context: StepContext,
        *,
        sizes: Sequence[int],
        max_model_len: int,
        recorder: Callable[[torch.device], Callable[[Callable[[], object]], Replay]] = Recorder,
    ) -> None:
        self._forward, self._context, self._make_recorder = forward, context, recorder
        self._sizes, self._max_model_len = sizes, max_model_len
        self._cache: PagedCache | None = None
        self.failed = False

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, sample_rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[S, vocabulary]``; those of a decode step are overwritten by the next one, on the same stream."""
        batch = self._context.batch
        assert batch is not None, "no step is running"
        rows = batch.seq_lens.shape[0]
        if self.failed or batch.max_query_len > 1 or not sample_rows.shape[0] <= rows <= self._sizes[-1]:
            return self._forward(input_ids, positions, sample_rows)
        if self._cache is not self._context.cache:
            self._cache, self._replays = self._context.cache, dict[int, Replay]()
            self._recorder = self._make_recorder(input_ids.device)
            self._buffers = StepBuffers(self._sizes[-1], self._max_model_len, self._cache, input_ids.device)
        self._buffers.fill(input_ids, positions, sample_rows, batch)
        size = self._sizes[bisect_left(self._sizes, rows)]
        if size not in self._replays and not self._record(size):
            return self._forward(input_ids, positions, sample_rows)
        self._replays[size]()
        return self._logits[: sample_rows.shape[0]]

    def drop(self) -> None:
        """Gives back the graphs and their memory; they are recorded anew when they are needed."""
        if self._cache is not None:
            self._cache = None
            del self._replays, self._recorder, self._buffers
            self._logits = torch.empty(0)

    def _record(self, size: int) -> bool:
        try:
            logits = self._run(size)  # what is made on first use, such as the cache of a layer, is not for the graph
            if not self._replays:
                self._logits = logits.new_empty((self._sizes[-1], logits.shape[1]))
            result = self._logits[:size]  # in one place for all graphs: what they compute in, others overwrite
            self._replays[size] = self._recorder(lambda: result.copy_(self._run(size)))
        except Exception as error:  # noqa: BLE001 (model code may raise anything)
            logger.warning("decode steps run without CUDA graphs: %s", one_line(error))
            self.failed, self._replays = True, {}
        return not self.failed

    def _run(self, size: int) -> torch.Tensor:
        buffers, batch = self._buffers, self._context.batch
        self._context.batch = buffers.batch(size)
        try:
            return self._forward(buffers.input_ids[:, :size], buffers.positions[:, :size], buffers.sample_rows[:size])
        finally:
            self._context.batch = batch
