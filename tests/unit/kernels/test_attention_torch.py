"""The torch attention backend against dense attention."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

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


PROGRAM = """
import math, torch
from kernels.attention_cases import Sequences
from kernels.test_attention_torch import SHAPES
from rollspan.kernels.attention import TorchAttention

for shape in SHAPES:
    sequences = Sequences(shape, [1, 65, 200, 64, 17])
    expected = sequences.run(TorchAttention(), sequences.at_once())
    for schedule in (sequences.one_by_one(), sequences.chunked(1), sequences.chunked(50), sequences.staggered([7, 1])):
        results = sequences.run(TorchAttention(), schedule, stale=math.nan)
        assert all(torch.equal(*pair) for pair in zip(results, expected)), shape
"""


def strict_branch() -> str | None:
    """MKL's branch whose strict mode this CPU has; it has none for other makers' CPUs."""
    facts = Path("/proc/cpuinfo")
    text = facts.read_text(encoding="utf-8") if facts.exists() else ""
    if "GenuineIntel" not in text or not torch.backends.mkl.is_available():
        return None
    return next((branch for flag, branch in (("avx512f", "AVX512"), ("avx2", "AVX2")) if flag in text), None)


def test_with_strict_matrix_products_no_schedule_changes_a_bit() -> None:
    if (branch := strict_branch()) is None:
        pytest.skip("no MKL, or no CPU that its strict mode knows")
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    environment = os.environ | {"MKL_CBWR": f"{branch},STRICT", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=110)
