"""The trainer's attention: eager's values and gradients, for whatever models and batches ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.architectures import PAGED
from engine.models import CONFIGS
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from rollspan import trainer
from rollspan.trainer.attention import Attention, Scoring, attention

ALL_CONFIGS = {**CONFIGS, **PAGED}


@pytest.fixture(autouse=True)
def registered() -> None:
    trainer.register()


def make(kind: str, implementation: str = "eager") -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        ALL_CONFIGS[kind](), attn_implementation=implementation, dtype=torch.float32
    )
    return model.eval()


def padded_batch() -> dict[str, torch.Tensor]:
    """Three sequences of 30, 17 (padded right) and 22 tokens (padded left)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (3, 30), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 17:] = 0
    mask[2, :8] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def log_probs_and_gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = padded_batch()
    model.zero_grad()
    tokens = batch["attention_mask"].bool()
    log_probs = torch.log_softmax(model(**batch, use_cache=False).logits, dim=-1)[tokens]
    chosen = log_probs.gather(1, batch["input_ids"][tokens][:, None])
    (chosen * torch.linspace(-1, 1, len(chosen))[:, None]).sum().backward()
    return log_probs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3"])
def test_values_and_gradients_are_those_of_eager_attention(kind: str) -> None:
    model = make(kind)
    expected, expected_gradients = log_probs_and_gradients(model)
    model.set_attn_implementation(trainer.NAME)
    found, gradients = log_probs_and_gradients(model)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        reference = expected_gradients[name]
        limit = 1e-4 * max(float(reference.abs().max()), 1e-2)
        assert float((gradient - reference).abs().max()) < limit, name


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients_pass_gradcheck(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(2)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    lengths = (4, 1, 6)
    query, key, value = numbers(11, 4, 3), numbers(11, 2, 3), numbers(11, 2, 5)
    sinks = numbers(4) if with_sinks else None

    def function(*tensors: torch.Tensor | None) -> Any:
        return Attention.apply(*tensors, lengths, Scoring(0.6, window, softcap))

    assert torch.autograd.gradcheck(function, (query, key, value, sinks))


def test_gradients_of_more_rows_than_are_held_at_a_time() -> None:
    generator = torch.Generator().manual_seed(3)
    states = [torch.randn(1, 2, 600, 32, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(1, 600, 2, 32, generator=generator)
    output, _ = attention(nn.Module(), *states, None, sliding_window=300)
    found = torch.autograd.grad(output, states, upstream)
    position = torch.arange(600)
    visible = (position <= position[:, None]) & (position > position[:, None] - 300)
    reference = nn.functional.scaled_dot_product_attention(*states, attn_mask=visible).transpose(1, 2)
    torch.testing.assert_close(output, reference, atol=1e-5, rtol=0)
    for mine, theirs in zip(found, torch.autograd.grad(reference, states, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)


def test_bfloat16_gradients_are_computed_in_float32_and_come_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(4)
    wide = [torch.randn(1, 2, 40, 32, generator=generator).bfloat16().float().requires_grad_() for _ in range(3)]
    narrow = [states.detach().bfloat16().requires_grad_() for states in wide]
    upstream = torch.randn(1, 40, 2, 32, generator=generator).bfloat16()
    expected = torch.autograd.grad(attention(nn.Module(), *wide, None)[0], wide, upstream.float())
    found = torch.autograd.grad(attention(nn.Module(), *narrow, None)[0], narrow, upstream)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), theirs, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("tell", ["position_ids", "cu_seq_lens_q"])
def test_packed_sequences_do_not_see_each_other(tell: str) -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(1, 2, 20, 8, generator=generator) for _ in range(3))
    parts = ((0, 7), (7, 8), (8, 20))
    facts = {
        "position_ids": torch.cat([torch.arange(stop - start) for start, stop in parts])[None],
        "cu_seq_lens_q": torch.tensor([0, 7, 8, 20], dtype=torch.int32),
    }
    packed, _ = attention(nn.Module(), query, key, value, None, **{tell: facts[tell]})
    alone = [attention(nn.Module(), *(t[:, :, a:b] for t in (query, key, value)), None)[0] for a, b in parts]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_generation_with_a_cache_goes_as_with_eager_attention() -> None:
    model = make("llama")
    prompt = torch.tensor([[5, 17, 3, 60, 8, 8, 21]])
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments)
    model.set_attn_implementation(trainer.NAME)
    assert torch.equal(model.generate(prompt, attention_mask=torch.ones_like(prompt), **arguments), expected)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = make("llama", trainer.NAME)
    _, expected = log_probs_and_gradients(model)
    model.train()
    # The name since transformers 5.24; the older one warns there.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    _, found = log_probs_and_gradients(model)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


def states(tokens: int = 4) -> list[torch.Tensor]:
    return [torch.ones(1, 2, tokens, 4) for _ in range(3)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention(nn.Module(), *states(), None, dropout=0.1), "dropout"),
        (lambda: attention(nn.Module(), *states(), None, is_causal=False), "not causal"),
        (lambda: attention(nn.Module(), *states(), None, position_bias=torch.zeros(1)), "position bias"),
        (lambda: attention(nn.Module(), *states(), torch.tensor([[1, 0, 1, 1]])), "padding between its tokens"),
        (lambda: attention(nn.Module(), *states(), torch.zeros(1, 1, 4, 4)), r"\[batch, tokens\] \[1, 4\]"),
    ],
)
def test_what_it_does_not_compute_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_other_kinds_of_layers_are_refused() -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        layer_types=["chunked_attention"],
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=trainer.NAME)
    with pytest.raises(ValueError, match="does not support layers of type chunked_attention"):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
