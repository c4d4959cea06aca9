"""The native attention kernel: dense attention, and the same bits whatever is computed beside a row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention_cases import CPU, Sequences, Shape
from rollspan.kernels import native
from rollspan.kernels.attention import AttentionBatch, NativeAttention, TorchAttention, select

pytestmark = pytest.mark.skipif(not native.available(), reason="the extension module is not built")

TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DIMS = st.sampled_from([32, 48, 64, 80, 96, 128, 256])
SHAPES = st.builds(
    Shape,
    heads=st.sampled_from([6, 12]),
    kv_heads=st.sampled_from([1, 2, 3, 6]),
    head_dim=DIMS,
    value_dim=DIMS,
    block_size=st.sampled_from([16, 32, 48, 128]),
    dtype=st.sampled_from(list(TOLERANCES)),
    sliding_window=st.none() | st.integers(1, 150),
    softcap=st.none() | st.sampled_from([0.5, 30.0]),
    with_sinks=st.booleans(),
)
MIXED = [
    Shape(),
    Shape(heads=3, kv_heads=3, head_dim=48, value_dim=80, softcap=3.0),
    Shape(heads=14, kv_heads=2, head_dim=64, value_dim=64, block_size=32, sliding_window=40, with_sinks=True),
    Shape(heads=20, kv_heads=1, dtype=torch.bfloat16, sliding_window=1),
    Shape(heads=64, kv_heads=1, dtype=torch.float16, with_sinks=True),
]
LENGTHS = [1, 65, 200, 64, 17, 130]


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    before = native.isa()
    try:
        native.module().set_kernel_isa(name)
    except ValueError as error:
        pytest.skip(str(error))
    yield
    native.module().set_kernel_isa(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = native.module().kernel_threads()
    native.set_num_threads(count)
    yield
    native.set_num_threads(before)


def assert_same_bits(results: list[Tensor], expected: list[Tensor]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


@settings(deadline=None, max_examples=60)
@given(
    shape=SHAPES,
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    chunks=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    stale=st.sampled_from([math.nan, math.inf, 0.0]),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_chunks_gives_dense_attention(
    shape: Shape, lengths: list[int], chunks: list[int], stale: float, seed: int
) -> None:
    sequences = Sequences(shape, lengths, seed)
    results = sequences.run(NativeAttention(), sequences.staggered(chunks), stale=stale)
    for result, expected in zip(results, sequences.reference(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=TOLERANCES[shape.dtype])
    assert_same_bits(sequences.run(NativeAttention(), sequences.one_by_one()), results)


@pytest.mark.parametrize("shape", MIXED, ids=str)
def test_the_twin_gives_nearly_the_same(shape: Shape) -> None:
    sequences = Sequences(shape, LENGTHS)
    schedule = sequences.staggered([50, 1, 7])
    results, expected = (sequences.run(backend, schedule) for backend in (NativeAttention(), TorchAttention()))
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=TOLERANCES[shape.dtype])


@pytest.mark.parametrize("shape", MIXED, ids=str)
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_neighbours_chunks_threads_and_instruction_set_never_change_a_bit(shape: Shape, isa: str) -> None:
    sequences = Sequences(shape, LENGTHS)
    expected = sequences.run(NativeAttention(), sequences.one_by_one())
    schedules = [sequences.at_once(), sequences.chunked(1), sequences.chunked(50), sequences.staggered([7, 1, 64])]
    with instruction_set(isa):
        for schedule in schedules:
            assert_same_bits(sequences.run(NativeAttention(), schedule, stale=math.nan), expected)
        with threads(3):
            assert_same_bits(sequences.run(NativeAttention(), schedules[0]), expected)
            assert_same_bits(sequences.run(NativeAttention(), schedules[3]), expected)


def test_other_pages_and_other_page_sizes_never_change_a_bit() -> None:
    def run(block_size: int, other: int) -> list[Tensor]:
        sequences = Sequences(Shape(block_size=block_size), LENGTHS)
        sequences.tables = [table[:] for table in sequences.tables]
        if other:
            used = sum(len(table) for table in sequences.tables)
            blocks = iter(range(used, 0, -1))
            sequences.tables = [[next(blocks) for _ in table] for table in sequences.tables]
        return sequences.run(NativeAttention(), sequences.at_once())

    expected = run(16, 0)
    for block_size, other in [(16, 1), (32, 0), (64, 1), (128, 0)]:
        assert_same_bits(run(block_size, other), expected)


def test_nan_in_later_tokens_of_a_sequence_does_not_reach_earlier_rows() -> None:
    sequences = Sequences(Shape(heads=3, kv_heads=3), [100])
    expected = sequences.run(NativeAttention(), sequences.at_once())[0]
    sequences.keys[0][71:], sequences.values[0][71:] = math.nan, math.inf
    result = sequences.run(NativeAttention(), sequences.at_once())[0]
    assert torch.equal(result[:71], expected[:71])
    assert not result[71:].isfinite().any()


def test_scores_of_minus_infinity_get_no_weight() -> None:
    sequences = Sequences(Shape(heads=1, kv_heads=1), [140])
    sequences.queries[0].fill_(1.0)
    sequences.keys[0][:70] = -math.inf
    result = sequences.run(NativeAttention(), sequences.at_once())[0]
    assert result[:70].isnan().all()
    torch.testing.assert_close(result[70:].double(), sequences.reference()[0][70:], rtol=0, atol=4e-6)


@pytest.mark.parametrize("cache_dtype", list(TOLERANCES))
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_the_cache_may_have_a_type_of_its_own(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    sequences = Sequences(Shape(dtype=dtype), [90, 3])
    rounded = Sequences(Shape(dtype=dtype), [90, 3])
    for part in (rounded.keys, rounded.values):
        part[:] = [t.to(cache_dtype).to(dtype) for t in part]
    query, key, value, batch = sequences.step([(0, 0, 90), (1, 0, 3)])
    cache = NativeAttention().allocate(sequences.num_blocks, 16, 2, 32, 32, cache_dtype, CPU)
    output = NativeAttention().attend(query, key, value, cache, batch, scale=sequences.shape.scale)
    expected = torch.cat(rounded.reference())
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=max(TOLERANCES[dtype], 4e-6))


def test_inputs_may_be_views() -> None:
    sequences = Sequences(Shape(), [70, 5])
    query, key, value, batch = sequences.step([(0, 0, 70), (1, 0, 5)])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = NativeAttention().allocate(sequences.num_blocks, 16, 2, 32, 32, torch.float32, CPU)
        return NativeAttention().attend(query, key, value, cache, batch, scale=0.2)

    expected = attend(query.contiguous(), key.contiguous(), value.contiguous())
    fused = torch.cat((query, key, value), dim=1)
    assert torch.equal(attend(fused[:, :4], fused[:, 4:6], fused[:, 6:]), expected)
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (query, key, value)]
    assert torch.equal(attend(*heads_first), expected)
    last_strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    assert torch.equal(attend(*last_strided), expected)


def test_what_does_not_fit_is_refused() -> None:
    sequences = Sequences(Shape(), [20])
    query, key, value, batch = sequences.step([(0, 0, 20)])
    backend = NativeAttention()
    cache = backend.allocate(sequences.num_blocks, 16, 2, 32, 32, torch.float32, CPU)

    def attend(
        changed: AttentionBatch = batch, query: Tensor = query, key: Tensor = key, value: Tensor = value
    ) -> None:
        backend.attend(query, key, value, cache, changed, scale=1.0)

    def change(**fields: object) -> AttentionBatch:
        return dataclasses.replace(batch, **fields)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="slot outside the cache"):
        attend(change(slot_mapping=batch.slot_mapping + 1000))
    with pytest.raises(ValueError, match="slot outside the cache"):
        attend(change(slot_mapping=batch.slot_mapping - 1000))
    with pytest.raises(ValueError, match="block outside the cache"):
        attend(change(block_table=batch.block_table - 1000))
    with pytest.raises(ValueError, match="seq_lens must cover"):
        attend(change(seq_lens=batch.seq_lens * 100))
    with pytest.raises(ValueError, match="rows that there are not"):
        attend(change(query_start=batch.query_start * 2, seq_lens=batch.seq_lens + 12))
    with pytest.raises(ValueError, match="int32 but for slot_mapping"):
        attend(change(seq_lens=batch.seq_lens.long()))
    with pytest.raises(ValueError, match="do not fit each other, or 20 rows"):
        attend(change(slot_mapping=batch.slot_mapping[:3]))
    used = change()
    attend(used)
    with pytest.raises(ValueError, match="3 rows given, but the batch has 20"):
        attend(used, query[:3], key[:3], value[:3])
    for wrong in ({"query": query[..., :16]}, {"key": key.double()}, {"value": value[:, :1]}):
        with pytest.raises(ValueError, match="do not fit each other"):
            attend(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float64},
        {"head_dim": 24},
        {"head_dim": 272},
        {"value_dim": 16},
        {"block_size": 8},
        {"device": torch.device("meta")},
    ],
    ids=str,
)
def test_layers_of_other_kinds_get_the_twin(other: dict[str, object]) -> None:
    kind = {"dtype": torch.float32, "head_dim": 64, "value_dim": 64, "block_size": 16, "device": CPU}
    assert select(**kind).name == "native"  # type: ignore[arg-type]
    assert select(**(kind | other)).name == "torch"  # type: ignore[arg-type]
    assert select(**kind, name="torch").name == "torch"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention backend 'native'"):
        select(**(kind | other), name="native")  # type: ignore[arg-type]
