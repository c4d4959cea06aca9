"""Decode steps through graphs: padding, static inputs, sizes and the way back; recorded on the CPU, or on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernels.varlen_fake import CpuVarlenAttention

from engine import recorded
from engine.conftest import TOKENS, References
from engine.harness import Engine
from engine.models import MAX_MODEL_LEN, VOCABULARY, TinyModel
from rollspan.config import EngineConfig
from rollspan.kernels import attention
from rollspan.kernels.attention import AttentionBatch
from rollspan.runner import cuda_graphs
from rollspan.runner.attention import PagedCache, StepContext
from rollspan.runner.cuda_graphs import CudaGraphs, StepBuffers, padded_sizes
from rollspan.runner.loader import load_model
from rollspan.runner.model_runner import ModelRunner
from rollspan.runner.placement import fit
from rollspan.runner.self_check import SelfCheck

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_sizes_that_steps_are_padded_to(largest: int, sizes: list[int]) -> None:
    assert padded_sizes(largest) == sizes


def test_padding_never_wastes_more_than_half_of_a_step_or_seven_rows() -> None:
    sizes = padded_sizes(256)
    for rows in range(1, 257):
        size = min(size for size in sizes if size >= rows)
        assert size - rows <= min(7, rows)


# Buffers


def step(tables: list[list[int]], lens: list[int], size: int, device: torch.device = CPU) -> AttentionBatch:
    """A decode step of sequences with these blocks and numbers of keys."""
    width = max(map(len, tables)) + 8
    slots = [table[(n - 1) // size] * size + (n - 1) % size for table, n in zip(tables, lens, strict=True)]
    return AttentionBatch(
        query_start=torch.arange(len(lens) + 1, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        max_query_len=1,
        max_seq_len=max(lens),
    )


def fill(buffers: StepBuffers, tables: list[list[int]], lens: list[int], sample_rows: list[int]) -> None:
    batch = step(tables, lens, 4)
    ids = torch.arange(len(lens))[None] + 50
    buffers.fill(ids, torch.tensor([[n - 1 for n in lens]]), torch.tensor(sample_rows, dtype=torch.int64), batch)


def check_padding(buffers: StepBuffers, used: int, rows: int, scratch: int) -> None:
    batch = buffers.batch(rows)
    slots = batch.slot_mapping[used:].tolist()
    assert all(slot // 4 == scratch for slot in slots)
    assert batch.seq_lens[used:].tolist() == [1] * (rows - used)
    assert batch.block_table[used:, 0].tolist() == [scratch] * (rows - used)
    assert batch.query_start.tolist() == list(range(rows + 1))
    assert int(buffers.sample_rows.max()) < max(used, 1)


def test_rows_without_a_sequence_write_to_the_last_block_and_read_there() -> None:
    buffers = StepBuffers(8, 20, PagedCache(10, 4), CPU)
    check_padding(buffers, 0, 8, 9)
    fill(buffers, [[1, 2], [3], [4, 5, 6]], [7, 1, 12], [0, 1, 2])
    check_padding(buffers, 3, 4, 9)
    batch = buffers.batch(4)
    assert batch.seq_lens.tolist() == [7, 1, 12, 1]
    assert batch.slot_mapping[:3].tolist() == [2 * 4 + 2, 3 * 4, 6 * 4 + 3]
    assert batch.block_table[:3, :3].tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert (batch.max_query_len, batch.max_seq_len) == (1, 20)
    assert buffers.positions[0, :3].tolist() == [6, 0, 11]
    assert buffers.input_ids[0, :3].tolist() == [50, 51, 52]


def test_rows_that_a_longer_step_has_used_become_padding_again() -> None:
    buffers = StepBuffers(8, 20, PagedCache(10, 4), CPU)
    fill(buffers, [[1], [2], [3], [4], [5], [6]], [1, 2, 3, 4, 1, 2], [5, 4, 3, 2, 1, 0])
    fill(buffers, [[1], [2]], [2, 3], [1])
    check_padding(buffers, 2, 8, 9)
    assert buffers.sample_rows.tolist() == [1, *[0] * 7]
    fill(buffers, [[1], [2], [7]], [3, 4, 1], [0, 1, 2])
    check_padding(buffers, 3, 8, 9)
    assert buffers.sample_rows.tolist() == [0, 1, 2, *[0] * 5]


def test_batches_of_the_same_buffers_share_tensors_and_nothing_that_was_derived() -> None:
    buffers = StepBuffers(8, 20, PagedCache(10, 4), CPU)
    first, second = buffers.batch(4), buffers.batch(8)
    first.derived["x"] = 1
    assert not second.derived
    assert not buffers.batch(4).derived
    assert first.seq_lens.data_ptr() == second.seq_lens.data_ptr()
    for batch in (first, second):
        assert batch.block_table.is_contiguous()
        assert batch.slot_mapping.is_contiguous()


# The forward


@dataclass
class Case:
    """A model, its own forward, and graphs over it."""

    context: StepContext
    forward: Callable[..., torch.Tensor]
    graphs: CudaGraphs
    model: Any
    device: torch.device
    page: int
    recorders: list[recorded.Recorder]
    tolerance: float

    def compare(self, tables: list[list[int]], lens: list[int], sample_rows: list[int] | None = None) -> None:
        """One decode step both ways, over the same cache."""
        self.context.batch = batch = step(tables, lens, self.page, self.device)
        generator = torch.Generator().manual_seed(sum(lens))
        ids = torch.randint(VOCABULARY, (1, len(lens)), generator=generator).to(self.device)
        positions = (batch.seq_lens - 1).long()[None]
        rows = torch.tensor(range(len(lens)) if sample_rows is None else sample_rows, device=self.device).long()
        with torch.inference_mode():
            found = self.graphs(ids, positions, rows).clone()
            expected = self.forward(ids, positions, rows)
        assert self.context.batch is batch
        assert found.shape == (len(rows), VOCABULARY)
        torch.testing.assert_close(found, expected, rtol=0, atol=self.tolerance)


@pytest.fixture(params=["recorded", pytest.param("cuda", marks=needs_cuda)])
def case(request: pytest.FixtureRequest, llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    on_gpu = request.param == "cuda"
    device = torch.device("cuda") if on_gpu else CPU
    page = 256 if on_gpu else 4
    if not on_gpu:
        monkeypatch.setattr(attention, "BACKENDS", (CpuVarlenAttention(page),))
    config = EngineConfig(model=str(llama.path), device=device.type, dtype="bfloat16" if on_gpu else "float32")
    model, _ = load_model(config, device)
    context = StepContext(PagedCache(30, page))
    recorders: list[recorded.Recorder] = []

    def forward(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows, rollspan_step=context
        ).logits[0]

    def recorder(device: torch.device) -> Any:
        recorders.append(recorded.Recorder(device))
        return cuda_graphs.Recorder(device) if on_gpu else recorders[-1]

    graphs = CudaGraphs(forward, context, sizes=[1, 2, 4, 8], max_model_len=MAX_MODEL_LEN, recorder=recorder)
    yield Case(context, forward, graphs, model, device, page, recorders, 0.2 if on_gpu else 1e-5)
    assert not graphs.failed


def test_steps_of_all_sizes_give_what_the_model_gives(case: Case) -> None:
    tables = [[3 * i + 1, 3 * i + 2, 3 * i + 3] for i in range(8)]
    lens = [1] * 8
    for count in (3, 3, 8, 1, 5, 2, 7, 4, 1, 6):
        case.compare(tables[:count], lens[:count])
        lens[:count] = [n + 1 for n in lens[:count]]
    if case.device.type == "cpu":
        (recorder,) = case.recorders
        assert (recorder.recordings, recorder.replays) == (4, 10)


def test_only_the_rows_that_are_asked_for_come_back(case: Case) -> None:
    tables = [[1], [2], [3]]
    case.compare(tables, [1, 1, 1], [2, 0])
    case.compare(tables, [2, 2, 2], [])
    case.compare(tables, [3, 3, 3], [1])


def test_block_zero_keeps_its_zeros_and_other_sequences_their_keys(case: Case) -> None:
    case.compare([[1], [2], [3]], [1, 1, 1])
    layers = [pair for _, pair in case.context.cache._layers.values()]
    before = [[part.clone() for part in pair] for pair in layers]
    case.compare([[2]], [2])  # after a longer step
    for pair, old in zip(layers, before, strict=True):
        for part, was in zip(pair, old, strict=True):
            assert not part[0].any()
            assert torch.equal(part[[1, 3]], was[[1, 3]])
            assert part[29].any()  # the scratch block


def test_weights_that_change_in_place_are_read_by_graphs_that_exist(case: Case) -> None:
    case.compare([[1], [2]], [1, 1])
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.copy_(parameter.roll(1))
    case.compare([[1], [2]], [2, 2])
    if case.recorders:
        assert len(case.recorders) == 1


def test_another_cache_needs_other_graphs(case: Case) -> None:
    case.compare([[1], [2]], [1, 1])
    case.context.cache = PagedCache(12, case.page)
    case.compare([[10], [9]], [1, 1])
    case.compare([[10], [9]], [2, 2])
    assert len(case.recorders) == 2


def test_steps_with_several_rows_of_a_sequence_and_larger_ones_are_left_to_the_model(case: Case) -> None:
    tables = [[i + 1] for i in range(9)]
    case.compare(tables, [1] * 9)
    assert not case.recorders
    case.context.batch = batch = AttentionBatch(
        query_start=torch.tensor([0, 3], dtype=torch.int32, device=case.device),
        seq_lens=torch.tensor([3], dtype=torch.int32, device=case.device),
        block_table=torch.tensor([[1]], dtype=torch.int32, device=case.device),
        slot_mapping=torch.arange(3, device=case.device) + case.page,
        max_query_len=3,
        max_seq_len=3,
    )
    ids = torch.tensor([[5, 6, 7]], device=case.device)
    with torch.inference_mode():
        case.graphs(ids, torch.arange(3, device=case.device)[None], torch.tensor([2], device=case.device))
    assert case.context.batch is batch
    assert not case.recorders


@pytest.mark.parametrize("waits", [lambda ids: ids.sum().item(), lambda ids: ids.nonzero(), lambda ids: 1 // 0])
def test_a_model_that_waits_for_the_device_is_run_without_graphs(
    waits: Callable[[torch.Tensor], Any], case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, plain, calls = case.graphs, case.forward, [0]

    def forward(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 2:  # in the recording: the call before is the rehearsal
            waits(ids)
        return plain(ids, positions, rows)

    graphs._forward = forward
    with caplog.at_level(logging.WARNING, "rollspan.engine"):
        case.compare([[1], [2], [3]], [1, 1, 1])
        case.compare([[1], [2], [3]], [2, 2, 2])
    assert graphs.failed
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "decode steps run without CUDA graphs"
    ]
    assert calls[0] == 4
    graphs.failed = False


# The engine


def with_graphs(engine: Engine) -> list[recorded.Recorder]:
    """Puts graphs under an engine on the CPU, as it has them on a GPU."""
    runner: Any = engine.core._runner
    recorders: list[recorded.Recorder] = []

    def recorder(device: torch.device) -> recorded.Recorder:
        recorders.append(recorded.Recorder(device))
        return recorders[-1]

    runner._graphs = runner._forward = CudaGraphs(
        runner._eager, runner._context, sizes=padded_sizes(8), max_model_len=MAX_MODEL_LEN, recorder=recorder
    )
    runner.allocate(engine.hello.limits.num_blocks)
    return recorders


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_an_engine_generates_through_graphs_what_transformers_generates(
    kind: str,
    asynchronous: bool,
    tiny: Callable[[str], TinyModel],
    references: Callable[[str], References],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "BACKENDS", (CpuVarlenAttention(4),))
    engine = Engine(tiny(kind), block_size=4, num_blocks=40, max_num_seqs=8, async_scheduling=asynchronous)
    recorders = with_graphs(engine)
    expected = references(kind)
    results = []
    for index, prompt in enumerate(expected):  # one more in each step: all sizes
        scores = 0 if index % 3 == 0 else None
        results.append(engine.add(f"r{index}", prompt, max_tokens=TOKENS, prompt_logprobs=scores))
        engine.step()
    engine.run()
    assert [result.token_ids for result in results] == list(expected.values())
    (recorder,) = recorders
    assert recorder.replays > TOKENS
    assert recorder.recordings <= 4
    assert engine.core.facts()["runner"] == "cuda graphs"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_scores_of_prompt_tokens_are_those_of_their_own_step(
    asynchronous: bool, llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BACKENDS", (CpuVarlenAttention(4),))
    limits = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
    engine = Engine(llama, block_size=4, num_blocks=40, async_scheduling=asynchronous, **limits)
    (recorders, prompt) = with_graphs(engine), [5, 9, 2, 44, 17, 80]
    result = engine.add("r", prompt, max_tokens=2, prompt_logprobs=0)
    engine.run()
    assert recorders[0].replays == len(prompt) + 1
    scores = result.outputs[0].new_prompt_logprobs
    assert scores is not None
    expected = torch.log_softmax(llama.logits(prompt), dim=-1)[range(5), prompt[1:]]
    torch.testing.assert_close(torch.from_numpy(scores.logprobs[:, 0].copy()), expected, rtol=0, atol=1e-4)


def test_the_self_check_runs_through_graphs_with_padding(llama: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BACKENDS", (CpuVarlenAttention(16),))
    config = EngineConfig(model=str(llama.path), device="cpu", dtype="float32")
    model, _ = load_model(config, CPU)
    check = SelfCheck(model, vocab_size=VOCABULARY, block_size=16, device=CPU)
    runner = ModelRunner(model, config, CPU, num_blocks=check.num_blocks, max_model_len=MAX_MODEL_LEN)
    graphs = CudaGraphs(
        runner._eager, runner._context, sizes=[1, 2, 4], max_model_len=MAX_MODEL_LEN, recorder=recorded.Recorder
    )
    runner._graphs = graphs
    runner.allocate(check.num_blocks)
    monkeypatch.setattr("rollspan.runner.graph.capture", lambda *_: None)
    assert runner.choose_forward(check) is None
    assert runner.facts()["runner"] == "cuda graphs"
    assert sorted(graphs._replays) == [2, 4]


@pytest.mark.parametrize(
    ("device", "dtype", "given", "fitted"),
    [
        ("cuda", torch.bfloat16, 16, 256),
        ("cuda", torch.float16, 257, 512),
        ("cuda", torch.bfloat16, 512, 512),
        ("cuda", torch.float32, 16, 16),
        ("cpu", torch.bfloat16, 16, 16),
    ],
)
def test_blocks_are_pages_of_flash_attention_where_that_is_used(
    device: str, dtype: torch.dtype, given: int, fitted: int
) -> None:
    assert fit(EngineConfig(block_size=given), torch.device(device), dtype).block_size == fitted


# On a GPU


@needs_cuda
def test_an_engine_on_a_gpu_uses_flash_attention_and_graphs_over_commits(llama: TinyModel, tmp_path: Any) -> None:
    prompts = [[1, 2, 3], [4] * 20, [5], [6, 7]]
    answers = {}
    for graphs in (True, False):
        engine = Engine(
            str(llama.path), device="cuda", dtype="bfloat16", cuda_graphs=graphs, kv_cache_memory=1 << 26, seed=1,
            weights_root=str(llama.path.parent),
        )  # fmt: skip
        facts = engine.core.facts()
        assert facts["attention"] == "varlen"
        assert facts["runner"] == ("cuda graphs" if graphs else "eager")
        first = engine.generate(prompts, max_tokens=TOKENS, logprobs=0)
        engine.result_of("start_weight_update")
        engine.result_of("update_weights", {"path": str(llama.path)})
        engine.result_of("finish_weight_update", "again")
        second = engine.generate(prompts, max_tokens=TOKENS, logprobs=0)
        assert [result.token_ids for result in first] == [result.token_ids for result in second]
        assert {stamp[0] for result in second for stamp in result.stamps} == {"again"}
        answers[graphs] = [float(result.outputs[0].new_logprobs.logprobs[0, 0]) for result in first]
    assert answers[True] == pytest.approx(answers[False], abs=0.1)
