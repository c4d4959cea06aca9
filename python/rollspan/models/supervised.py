"""Stage one: supervised training on worked sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from rollspan.models import task

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class SupervisedSettings:
    """How long and how fast; ``question_weight`` is the loss weight of tokens that can't be known from their prefix."""

    steps: int = 440
    documents_per_step: int = 144
    documents_per_row: int = 28
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    question_weight: float = 0.1


def pack_rows(problems: Sequence[task.Problem], documents_per_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents one after the other, so that a model which is not stopped at ``<eos>`` goes on with the next sum.

    Returns:
        token ids [rows, T] int64, padded on the right, and a mask [rows, T] bool that is true on answers and ``<eos>``.
    """
    rows: list[list[int]] = []
    masks: list[list[bool]] = []
    for begin in range(0, len(problems), documents_per_row):
        row: list[int] = []
        mask: list[bool] = []
        for problem in problems[begin : begin + documents_per_row]:
            prompt, answer = problem.prompt_ids, problem.answer_ids
            row += prompt + answer
            mask += [False] * len(prompt) + [True] * len(answer)
        rows.append(row)
        masks.append(mask)
    width = max(len(row) for row in rows)
    token_ids = torch.tensor([row + [task.PAD] * (width - len(row)) for row in rows])
    is_answer = torch.tensor([mask + [False] * (width - len(mask)) for mask in masks])
    return token_ids, is_answer


def train_supervised(
    network: Qwen3ForCausalLM,
    problems: Sequence[task.Problem],
    settings: SupervisedSettings,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Train ``network`` in place; ``report(step, loss)`` is called after every step, counted from 1."""
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.01, foreach=True)
    network.train()
    for step in range(1, settings.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, step / settings.warmup_steps)
        batch = generator.choices(problems, k=settings.documents_per_step)
        # Rows of every length, single documents included: answers must not lean on the sums before them.
        token_ids, is_answer = pack_rows(batch, generator.choice((1, 4, settings.documents_per_row)))
        targets = token_ids[:, 1:]
        logits = network(input_ids=token_ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        weights = torch.where(is_answer[:, 1:], 1.0, settings.question_weight) * (targets != task.PAD)
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        report(step, loss.item())
    network.eval()
