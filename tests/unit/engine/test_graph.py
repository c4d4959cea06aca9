"""The captured forward: the same bits as the model's own, and close to them with fusions."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.architectures import PAGED
from engine.graph_cases import Context, build, deviation, eager, inputs
from engine.models import COMMON, CONFIGS
from rollspan.kernels import fused, linear
from rollspan.runner.graph import CapturedForward, CaptureOptions, capture

ROWS = (1, 2, 7, 40)
EXACT = CaptureOptions(exact=True)
ARCHITECTURES = {**CONFIGS, **PAGED}
#: Each has the patterns that the fusions look for.
FUSED = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt2",
    "qwen3_moe",
    "mixtral",
    "nanochat",
]
packed = pytest.mark.skipif(not linear.packs(torch.bfloat16), reason="this CPU multiplies no packed bfloat16")
native = pytest.mark.skipif(not fused.supported(torch.float32), reason="without the extension module")


def captured(model: transformers.PreTrainedModel, options: CaptureOptions | None = None) -> CapturedForward:
    forward = capture(model, Context(), options)
    assert forward is not None
    return forward


def run(forward: CapturedForward, rows: int) -> torch.Tensor:
    with torch.inference_mode():
        return forward(*inputs(rows))


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_a_captured_forward_has_the_bits_of_the_models_own(kind: str) -> None:
    model = build(ARCHITECTURES[kind]())
    forward = captured(model, EXACT)
    for rows in ROWS:
        assert torch.equal(run(forward, rows), eager(model, Context(), rows)), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", FUSED)
def test_fusions_change_no_more_than_rounding(kind: str, dtype: torch.dtype) -> None:
    model = build(ARCHITECTURES[kind](), dtype)
    forward = captured(model)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for rows in ROWS:
        found = run(forward, rows)
        assert found.dtype == dtype
        assert deviation(found, eager(model, Context(), rows)) < tolerance, rows


@native
@pytest.mark.parametrize(
    ("kind", "name", "kernel", "calls"),
    [
        ("llama", "norms", "rms_norm", 5),
        ("qwen3", "norms", "rms_norm", 9),
        ("gemma2", "norms", "rms_norm", 9),
        ("olmo2", "norms", "rms_norm", 9),
        ("llama", "rotations", "rotary", 2),
        ("qwen3", "rotations", "rotary", 2),
        ("gemma3", "rotations", "rotary", 2),
        ("phi3", "rotations", "rotary", 2),
        ("llama", "gates", "gated", 2),
        ("phi3", "gates", "gated_halves", 2),
        ("gemma2", "gates", "gated", 2),
    ],
)
def test_each_fusion_applies_alone_wherever_its_pattern_is(kind: str, name: str, kernel: str, calls: int) -> None:
    model = build(ARCHITECTURES[kind]())
    forward = captured(model, CaptureOptions(fusions=frozenset({name})))
    assert forward.program.source.count(f"{kernel}_") == calls
    assert deviation(run(forward, 7), eager(model, Context(), 7)) < 1e-5


@native
@pytest.mark.parametrize(("kind", "others"), [("qwen3", 2), ("gemma3", 4)])
def test_a_norm_of_each_head_goes_into_the_rotation(kind: str, others: int) -> None:
    source = captured(build(ARCHITECTURES[kind]())).program.source
    between = source.split("attend_")[1]
    assert "rsqrt" not in source
    assert between.count("rms_norm_") == others


def test_a_swapped_parameter_is_used_by_the_next_call() -> None:
    model = build(CONFIGS["qwen3"]())
    forward = captured(model)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.01
    forward.after_commit()
    assert deviation(run(forward, 7), eager(model, Context(), 7)) < 1e-5


@packed
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_repacked_weights_follow_a_commit_whole(kind: str) -> None:
    model = build(CONFIGS[kind](), torch.bfloat16)
    forward = captured(model)
    before = run(forward, 7)
    assert forward.derived_bytes > 0
    old = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    forward.after_commit()
    assert deviation(run(forward, 7), eager(model, Context(), 7)) < 3e-2
    for name, parameter in model.named_parameters():
        parameter.data = old[name]
    forward.after_commit()
    assert torch.equal(run(forward, 7), before)


@packed
def test_layers_of_one_input_are_multiplied_at_once() -> None:
    model = build(CONFIGS["llama"](), torch.bfloat16)
    forward = captured(model)
    # Per layer: queries, keys and values; the output; gate and up; down. And the head.
    assert forward.program.source.count("packed_linear_") == 4 * 2 + 1
    weights = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    assert forward.derived_bytes == weights


def test_exact_takes_replacements_and_no_fusions() -> None:
    calls = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(weight.shape)
        return torch.nn.functional.linear(x, weight, bias)

    model = build(CONFIGS["llama"]())
    forward = captured(model, CaptureOptions(exact=True, replacements={torch.ops.aten.linear.default: counted}))
    assert torch.equal(run(forward, 7), eager(model, Context(), 7))
    assert len(calls) == 7 * 2 + 1
    assert forward.derived_bytes == 0


def test_positions_that_decide_the_shape_are_left_to_the_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollspan.engine")
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    context = Context()
    assert capture(build(transformers.LlamaConfig(**COMMON, rope_parameters=rope)), context) is None
    assert "LlamaForCausalLM runs uncaptured" in caplog.text
    assert context.tracing is False


@pytest.mark.parametrize("wrong", ["branch", "constant", "alias"])
def test_code_that_holds_for_some_inputs_only_is_not_captured(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rollspan.engine")
    model = build(CONFIGS["llama"]())
    norm: Any = model.model.norm
    alias = norm.weight.detach()

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] > 30 else x

    def constant(x: torch.Tensor) -> torch.Tensor:
        return x + x.shape[1] ** 2 * 1e-3

    def shares(x: torch.Tensor) -> torch.Tensor:
        return x * alias

    norm.forward = {"branch": branch, "constant": constant, "alias": shares}[wrong]
    assert capture(model, Context()) is None
    assert "runs uncaptured" in caplog.text


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_thousand_steps_take_no_memory() -> None:
    forward = captured(build(CONFIGS["qwen3"](), torch.bfloat16))
    for rows in range(1, 40):
        run(forward, rows)
    gc.collect()
    before = _resident_bytes()
    for step in range(1000):
        run(forward, 1 + step % 39)
    gc.collect()
    assert _resident_bytes() - before < 8 << 20


def test_sizes_computed_from_the_number_of_rows_follow_it() -> None:
    model = build(CONFIGS["llama"]())
    norm: Any = model.model.norm

    def doubled(x: torch.Tensor) -> torch.Tensor:
        weights = torch.arange(2 * x.shape[1]).view(1, x.shape[1], 2).sum(-1, keepdim=True)
        return torch.cat((x * weights, x.mean(1, keepdim=True).expand(1, x.shape[1] + 3, -1)), dim=1)[:, : x.shape[1]]

    norm.forward = doubled
    forward = captured(model, EXACT)
    for rows in ROWS:
        assert torch.equal(run(forward, rows), eager(model, Context(), rows)), rows


def test_tracebacks_show_the_generated_lines() -> None:
    forward = captured(build(CONFIGS["llama"]()))
    ids, positions, sampled = inputs(3)
    with pytest.raises(IndexError) as caught:
        forward(ids + 10_000, positions, sampled)
    assert "embedding" in str(caught.traceback[-1].statement)
