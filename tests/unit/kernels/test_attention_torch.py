"""The torch attention backend against dense attention."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention_cases import Sequences, Shape
from rollspan.kernels.attention import TorchAttention

SHAPES = [
    Shape(),
    Shape(heads=3, kv_heads=3, head_dim=48, value_dim=16, block_size=8),
    Shape(sliding_window=70, block_size=32),
    Shape(sliding_window=1, softcap=2.0),
    Shape(heads=7, kv_heads=1, softcap=5.0, with_sinks=True),
    Shape(sliding_window=33, with_sinks=True, dtype=torch.bfloat16),
    Shape(head_dim=20, value_dim=12, block_size=1, dtype=torch.float16),
]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("schedule", ["at_once", "one_by_one", "decode", "chunked", "staggered"])
def test_every_schedule_gives_dense_attention(shape: Shape, schedule: str) -> None:
    sequences = Sequences(shape, [1, 65, 200, 64, 17])
    steps = {
        "at_once": sequences.at_once,
        "one_by_one": sequences.one_by_one,
        "decode": lambda: sequences.chunked(1),
        "chunked": lambda: sequences.chunked(50),
        "staggered": lambda: sequences.staggered([7, 1, 64]),
    }[schedule]()
    results = sequences.run(TorchAttention(), steps, stale=math.nan)
    for result, expected in zip(results, sequences.reference(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance(shape.dtype))


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    chunks=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 100),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_chunks_gives_dense_attention(
    lengths: list[int], chunks: list[int], window: int | None, seed: int
) -> None:
    sequences = Sequences(Shape(sliding_window=window), lengths, seed)
    results = sequences.run(TorchAttention(), sequences.staggered(chunks), stale=math.inf)
    for result, expected in zip(results, sequences.reference(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=3e-6)
