"""The backend over torch's flash attention: what it hands over, on the CPU; what comes back, on a GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention_cases import CPU, Sequences, Shape
from kernels.varlen_fake import CpuVarlenAttention
from rollspan.kernels.attention import AttentionBatch, TorchAttention, VarlenAttention, select

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
LENGTHS = [1, 65, 300, 17]
PLAIN = Shape(block_size=256, dtype=torch.bfloat16)
SHAPES = [
    PLAIN,
    Shape(heads=7, kv_heads=1, block_size=256, dtype=torch.float16),
    Shape(heads=3, kv_heads=3, head_dim=128, value_dim=128, block_size=512, dtype=torch.bfloat16),
    Shape(sliding_window=70, block_size=256, dtype=torch.float16),
    Shape(sliding_window=1, block_size=256, dtype=torch.bfloat16),
]
#: What flash attention cannot do, and another backend does over the same pages.
OTHERS = [
    Shape(block_size=256, dtype=torch.bfloat16, softcap=2.0),
    Shape(block_size=256, dtype=torch.float16, with_sinks=True, sliding_window=33),
]
SCHEDULES = ["at_once", "one_by_one", "decode", "chunked", "staggered"]


class CudaVarlenAttention(VarlenAttention):
    """The backend on a GPU, for callers on the CPU."""

    cuda = torch.device("cuda")

    def allocate(self, *args: Any) -> tuple[Tensor, Tensor]:
        return super().allocate(*args[:-1], self.cuda)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: tuple[Tensor, Tensor], batch: AttentionBatch, **how: Any
    ) -> Tensor:
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
        moved = {name: part.to(self.cuda) if isinstance(part, Tensor) else part for name, part in fields.items()}
        how["sinks"] = None if how["sinks"] is None else how["sinks"].to(self.cuda)
        rows = (part.to(self.cuda) for part in (query, key, value))
        return super().attend(*rows, cache, AttentionBatch(**moved), **how).cpu()


@pytest.fixture(params=["fake", pytest.param("cuda", marks=needs_cuda)])
def backend(request: pytest.FixtureRequest) -> VarlenAttention:
    return CpuVarlenAttention() if request.param == "fake" else CudaVarlenAttention()


def steps(sequences: Sequences, schedule: str) -> list[list[tuple[int, int, int]]]:
    if schedule == "decode":
        # The last rows one by one: a row more makes no other case.
        prompts = [(s, 0, n - min(n - 1, 9)) for s, n in enumerate(sequences.lengths)]
        singles = [
            [(s, stop + i, stop + i + 1) for s, _, stop in prompts if stop + i < sequences.lengths[s]] for i in range(9)
        ]
        return [prompts, *singles]
    chosen = {
        "at_once": sequences.at_once,
        "one_by_one": sequences.one_by_one,
        "chunked": lambda: sequences.chunked(80),
        "staggered": lambda: sequences.staggered([7, 1, 120]),
    }
    return chosen[schedule]()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS], ids=str)
def test_every_schedule_gives_dense_attention(shape: Shape, schedule: str, backend: VarlenAttention) -> None:
    sequences = Sequences(shape, LENGTHS)
    results = sequences.run(backend, steps(sequences, schedule), stale=1e4)
    tolerance = 2e-2 if shape.dtype == torch.bfloat16 else 4e-3
    for result, expected in zip(results, sequences.reference(), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_contiguous_and_launched_with_bounds_of_the_batch(shape: Shape) -> None:
    backend, sequences = CpuVarlenAttention(), Sequences(shape, LENGTHS)
    cache = backend.allocate(sequences.num_blocks, shape.block_size, shape.kv_heads, shape.head_dim, *_rest(shape))
    query, key, value, batch = sequences.step(sequences.at_once()[0])
    assert not query.is_contiguous()
    output = backend.attend(query, key, value, cache, batch, scale=1.0, sliding_window=shape.sliding_window)
    assert output.is_contiguous()
    left = -1 if shape.sliding_window is None else shape.sliding_window - 1
    assert backend.fake.calls == [{"max_q": 300, "max_k": 300, "window_size": (left, 0), "rows": sum(LENGTHS)}]


def _rest(shape: Shape) -> tuple[int, torch.dtype, torch.device]:
    return shape.value_dim, shape.dtype, CPU


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    backend, sequences = CpuVarlenAttention(), Sequences(PLAIN, LENGTHS)
    cache = backend.allocate(sequences.num_blocks, 256, 2, 32, 32, torch.bfloat16, CPU)
    query, key, value, batch = sequences.step([(2, 0, 300), (0, 0, 1)])
    backend.attend(query, key, value, cache, batch, scale=1.0)
    for cached, new in zip(cache, (key, value), strict=True):
        slots = cached.flatten(0, 1)
        assert torch.equal(slots[batch.slot_mapping], new)
        rest = torch.ones(len(slots), dtype=torch.bool)
        rest[batch.slot_mapping] = False
        assert not slots[rest].any()


@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_caps_and_sinks_are_left_to_the_backend_with_the_same_pages(shape: Shape) -> None:
    backend, sequences = CpuVarlenAttention(), Sequences(shape, LENGTHS)
    results = sequences.run(backend, sequences.chunked(50))
    assert not backend.fake.calls
    for result, expected in zip(results, sequences.run(TorchAttention(), sequences.chunked(50)), strict=True):
        assert torch.equal(result, expected)


GOOD = {"dtype": torch.bfloat16, "head_dim": 128, "value_dim": 128, "block_size": 256, "device": torch.device("cuda")}


@pytest.mark.parametrize(
    ("change", "able"),
    [
        ({}, True),
        ({"dtype": torch.float16, "head_dim": 256, "value_dim": 256, "block_size": 1024}, True),
        ({"head_dim": 8, "value_dim": 8}, True),
        ({"device": CPU}, False),
        ({"dtype": torch.float32}, False),
        ({"head_dim": 264, "value_dim": 264}, False),
        ({"head_dim": 100, "value_dim": 100}, False),
        ({"head_dim": 192}, False),
        ({"block_size": 16}, False),
        ({"block_size": 128}, False),
    ],
)
def test_layers_that_flash_attention_can_do(
    change: dict[str, Any], able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollspan.kernels.attention_varlen._has_flash_attention", lambda device: device.type == "cuda")
    layer = {**GOOD, **change}
    assert VarlenAttention().supports(**layer) == able
    device = layer.pop("device")
    if device.type == "cuda":
        assert select(device, **layer).name == ("varlen" if able else "torch")
    else:
        assert select(device, **layer).name != "varlen"


@pytest.mark.parametrize(
    ("hip", "built", "capability", "has"),
    [
        (None, True, (8, 0), True),
        (None, True, (9, 0), True),
        (None, True, (7, 5), False),
        (None, False, (9, 0), False),
        ("6.4", True, (9, 4), False),
    ],
)
def test_gpus_that_have_flash_attention(
    hip: str | None, built: bool, capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollspan.kernels import attention_varlen

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert attention_varlen._has_flash_attention.__wrapped__(torch.device("cuda")) == has


def test_torch_has_the_function_with_the_arguments_that_are_passed() -> None:
    import inspect

    from rollspan.kernels.attention_varlen import _varlen_attn

    parameters = inspect.signature(_varlen_attn()).parameters
    wanted = inspect.signature(CpuVarlenAttention().fake.__call__).parameters
    assert [parameters[name].kind for name in wanted] == [parameter.kind for parameter in wanted.values()]
    assert list(parameters)[:7] == list(wanted)[:7]


@needs_cuda
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_single_row_has_the_same_bits_beside_other_single_rows(shape: Shape) -> None:
    sequences = Sequences(shape, LENGTHS)
    prompts = [(s, 0, n - 1) for s, n in enumerate(LENGTHS) if n > 1]
    lasts = [(s, n - 1, n) for s, n in enumerate(LENGTHS)]
    together = sequences.run(CudaVarlenAttention(), [prompts, lasts])
    alone = sequences.run(CudaVarlenAttention(), [prompts, *([span] for span in lasts)])
    for result, expected in zip(together, alone, strict=True):
        assert torch.equal(result[-1], expected[-1])


@needs_cuda
def test_stale_slots_may_hold_anything() -> None:
    sequences = Sequences(PLAIN, LENGTHS)
    results = sequences.run(CudaVarlenAttention(), steps(sequences, "decode"), stale=math.nan)
    assert all(bool(result.isfinite().all()) for result in results)
