"""Attention of one layer: the native kernel, its torch twin, and SDPA over contiguous keys, on one thread.

    python benchmarks/attention.py [--repeats 7] [--threads 1] [--case NAME]

Sequences are L/2 to L keys long. Times are thread CPU milliseconds, or wall ones with several threads: the best of the
repeats and, in brackets, the median; candidates alternate. The caches of several layers are cycled through, as a model
does, so that keys come from memory. SDPA gets its keys gathered for nothing: it is what the arithmetic costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rollspan.kernels import native
from rollspan.kernels.attention import AttentionBackend, AttentionBatch, NativeAttention, TorchAttention

BLOCK = 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A batch of sequences that each compute their last ``rows`` tokens."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    sequences: int
    length: int
    rows: int = 1
    dtype: torch.dtype = torch.float32
    layers: int = 4

    def lengths(self) -> list[int]:
        low, count = self.length // 2, self.sequences
        if self.rows > 1 or count == 1:
            return [self.length] * count
        return [low + (self.length - low) * i // (count - 1) for i in range(count)]


CASES = [
    Case("decode 8/4 x64 B32 L512", 8, 4, 64, 32, 512),
    Case("decode 8/4 x64 B32 L512 bf16", 8, 4, 64, 32, 512, dtype=torch.bfloat16),
    Case("decode 8/4 x64 B128 L512", 8, 4, 64, 128, 512, layers=2),
    Case("decode 14/2 x64 B32 L512", 14, 2, 64, 32, 512),
    Case("decode 14/2 x64 B32 L512 bf16", 14, 2, 64, 32, 512, dtype=torch.bfloat16),
    Case("decode 16/8 x128 B8 L1024 bf16", 16, 8, 128, 8, 1024, dtype=torch.bfloat16),
    Case("decode 8/4 x64 B1 L512", 8, 4, 64, 1, 512),
    Case("decode 4/2 x32 B8 L32", 4, 2, 32, 8, 32),
    Case("prefill 8/4 x64 4x256 of 512", 8, 4, 64, 4, 512, rows=256),
    Case("prefill 8/4 x64 4x256 of 512 bf16", 8, 4, 64, 4, 512, rows=256, dtype=torch.bfloat16),
    Case("prefill 8/8 x64 1x512 of 512", 8, 8, 64, 1, 512, rows=512),
    Case("prefill 14/2 x64 1x512 of 2048", 14, 2, 64, 1, 2048, rows=512),
]


class Inputs:
    """Queries, keys and values of one case, and a batch that names the pages in random order."""

    def __init__(self, case: Case) -> None:
        lengths, rows = case.lengths(), case.rows
        counts = [-(-length // BLOCK) for length in lengths]
        self.num_blocks = sum(counts) + 1
        order = (torch.randperm(self.num_blocks - 1) + 1).tolist()
        tables, at = [], 0
        for count in counts:
            tables.append(order[at : at + count] + [0] * (max(counts) - count))
            at += count
        positions = [range(length - rows, length) for length in lengths]
        slots = [table[p // BLOCK] * BLOCK + p % BLOCK for table, ps in zip(tables, positions, strict=True) for p in ps]
        self.batch = AttentionBatch(
            query_start=torch.arange(len(lengths) + 1, dtype=torch.int32) * rows,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            max_query_len=rows,
            max_seq_len=max(lengths),
        )
        total = rows * len(lengths)
        self.query = torch.randn(1, case.heads, total, case.head_dim).to(case.dtype)[0].transpose(0, 1)
        self.key = torch.randn(total, case.kv_heads, case.head_dim).to(case.dtype)
        self.value = torch.randn(total, case.kv_heads, case.head_dim).to(case.dtype)


def paged(case: Case, inputs: Inputs, backend: AttentionBackend) -> Callable[[], None]:
    """One layer's attention, of the next of several layers."""
    caches = [
        backend.allocate(inputs.num_blocks, BLOCK, case.kv_heads, case.head_dim, case.head_dim, case.dtype, CPU)
        for _ in range(case.layers)
    ]
    for cache in caches:
        for part in cache:
            part.normal_()
    turn = 0

    def run() -> None:
        nonlocal turn
        turn = (turn + 1) % len(caches)
        backend.attend(inputs.query, inputs.key, inputs.value, caches[turn], inputs.batch, scale=case.head_dim**-0.5)

    return run


def sdpa(case: Case, inputs: Inputs) -> Callable[[], None]:
    """A call of SDPA for each sequence, over contiguous keys."""
    layers: list[list[tuple[Tensor, Tensor]]] = [
        [
            (
                torch.randn(1, case.kv_heads, length, case.head_dim).to(case.dtype),
                torch.randn(1, case.kv_heads, length, case.head_dim).to(case.dtype),
            )
            for length in case.lengths()
        ]
        for _ in range(case.layers)
    ]
    query = inputs.query.transpose(0, 1)[None]
    rows, group = case.rows, case.heads // case.kv_heads
    masks = {}
    if rows > 1:
        masks = {n: torch.ones(rows, n, dtype=torch.bool).tril(n - rows) for n in set(case.lengths())}
    turn = 0

    def run() -> None:
        nonlocal turn
        turn = (turn + 1) % len(layers)
        for s, (key, value) in enumerate(layers[turn]):
            part = query[:, :, s * rows : (s + 1) * rows]
            if rows == 1:
                # The heads of a group are rows of one product.
                functional.scaled_dot_product_attention(part.view(1, case.kv_heads, group, -1), key, value)
            else:
                functional.scaled_dot_product_attention(
                    part, key, value, attn_mask=masks[key.shape[2]], enable_gqa=group > 1
                )

    return run


def main() -> None:
    """Measures each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", default="", help="only cases whose name contains it")
    parser.add_argument("--only", default="", help="only the candidate of this name")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    print(f"{native.isa()}, {arguments.threads} thread(s), ms: best (median)")
    for case in CASES:
        if arguments.case not in case.name:
            continue
        inputs = Inputs(case)
        candidates = {
            "native": lambda case=case, inputs=inputs: paged(case, inputs, NativeAttention()),
            "torch": lambda case=case, inputs=inputs: paged(case, inputs, TorchAttention()),
            "sdpa": lambda case=case, inputs=inputs: sdpa(case, inputs),
        }
        runs = {name: make() for name, make in candidates.items() if arguments.only in ("", name)}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(arguments.repeats):
            for name, run in runs.items():
                start = clock()
                for _ in range(case.layers):
                    run()
                times[name].append((clock() - start) * 1e3 / case.layers)
        results = "  ".join(f"{n} {min(t):8.3f} ({statistics.median(t):8.3f})" for n, t in times.items())
        print(f"{case.name:36} {results}", flush=True)


if __name__ == "__main__":
    main()
