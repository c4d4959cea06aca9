"""Stage two: group relative policy optimisation (GRPO) with a verifiable reward.

Shao et al. 2024, "DeepSeekMath", section 4.1: several answers are sampled for each prompt, an answer's advantage is
its reward less its group's mean over the group's deviation, and the policy-gradient loss clips the probability ratio.
There is no reference model: the reward can't be gamed, it is arithmetic. What the reward doesn't touch, going on with
the next sum after ``<eos>``, is rehearsed by a supervised loss on questions (Ouyang et al. 2022, "InstructGPT",
PPO-ptx); answers are left out of it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from transformers import DynamicCache

from rollspan.models import task
from rollspan.models.network import cache_argument
from rollspan.models.supervised import pack_rows

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM


@dataclass(frozen=True, slots=True)
class ReinforcementSettings:
    """Prompts a step, samples a prompt, and the optimiser's constants; the learning rate falls to 0.3 of itself."""

    steps: int = 500
    prompts_per_step: int = 48
    samples_per_prompt: int = 8
    learning_rate: float = 1e-3
    clip: float = 0.2
    longest_context: int = 24
    rehearsal_documents: int = 48
    rehearsal_weight: float = 0.3


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled answers: ids [N, P + A] with prompt, log-probs [N, A] and mask [N, A], true up to and with ``<eos>``."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    mask: torch.Tensor

    def outputs(self) -> list[list[int]]:
        """Output ids of each sample, without what follows ``<eos>``."""
        answers = self.token_ids[:, task.PROMPT_TOKENS :]
        return [answers[index][self.mask[index]].tolist() for index in range(len(answers))]


@torch.no_grad()
def sample_answers(
    network: Qwen3ForCausalLM,
    problems: Sequence[task.Problem],
    generator: torch.Generator | None,
    context: DynamicCache | None = None,
) -> Samples:
    """One answer to each problem at temperature 1, or greedily without a generator.

    ``context`` holds what comes before each problem, if anything does; it is left as it is.
    """
    token_ids = torch.tensor([problem.prompt_ids for problem in problems])
    cache = DynamicCache() if context is None else copy.deepcopy(context)
    ended = torch.zeros(len(problems), dtype=torch.bool)
    logprobs, masks = [], []
    pending = token_ids
    for _ in range(task.ANSWER_TOKENS):
        logits = network(input_ids=pending, logits_to_keep=1, **cache_argument(network, cache)).logits[:, -1]
        scores = functional.log_softmax(logits.float(), dim=-1)
        if generator is None:
            chosen = scores.argmax(dim=-1)
        else:
            chosen = torch.multinomial(scores.exp(), 1, generator=generator)[:, 0]
        masks.append(~ended)
        logprobs.append(scores.gather(1, chosen[:, None])[:, 0])
        pending = chosen[:, None]
        token_ids = torch.cat([token_ids, pending], dim=1)
        ended = ended | (chosen == task.EOS)
    return Samples(token_ids, torch.stack(logprobs, dim=1), torch.stack(masks, dim=1))


@torch.no_grad()
def read_context(
    network: Qwen3ForCausalLM, problems: Sequence[task.Problem], rows: int, length: int, chooser: random.Random
) -> DynamicCache:
    """Keys and values of ``length`` solved problems in each of ``rows`` rows.

    Problems at the same place of every row have answers of the same length, so that no row needs padding.
    """
    by_length: dict[int, list[task.Problem]] = {}
    for problem in problems:
        by_length.setdefault(len(problem.answer_ids), []).append(problem)
    columns = [chooser.choices(by_length[len(chooser.choice(problems).answer_ids)], k=rows) for _ in range(length)]
    documents = [
        [token for problem in row for token in problem.prompt_ids + problem.answer_ids]
        for row in zip(*columns, strict=True)
    ]
    cache = DynamicCache()
    if length:
        network(input_ids=torch.tensor(documents), logits_to_keep=1, **cache_argument(network, cache))
    return cache


def accuracy(network: Qwen3ForCausalLM, problems: Sequence[task.Problem], seed: int | None) -> float:
    """Share of problems whose answer is exactly right: sampled at temperature 1 with ``seed``, greedy without one."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    solved = 0
    for begin in range(0, len(problems), 512):
        batch = problems[begin : begin + 512]
        outputs = sample_answers(network, batch, generator).outputs()
        solved += sum(problem.is_solved_by(output) for problem, output in zip(batch, outputs, strict=True))
    return solved / len(problems)


def train_reinforcement(
    network: Qwen3ForCausalLM,
    problems: Sequence[task.Problem],
    settings: ReinforcementSettings,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Train ``network`` in place; ``report(step, mean reward)`` is called after every step, counted from 1."""
    chooser = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.0, foreach=True)
    group = settings.samples_per_prompt
    for step in range(1, settings.steps + 1):
        for parameters in optimizer.param_groups:
            parameters["lr"] = settings.learning_rate * min(1.0, step / 10, 1.5 - 1.2 * step / settings.steps)
        chosen = chooser.choices(problems, k=settings.prompts_per_step)
        asked = [problem for problem in chosen for _ in range(group)]
        network.eval()
        # Every other step asks after some solved problems, or the network would unlearn to answer there.
        length = chooser.randrange(settings.longest_context + 1) if step % 2 else 0
        context = read_context(network, problems, len(chosen), length, chooser)
        if length:
            context.batch_repeat_interleave(group)
        samples = sample_answers(network, asked, generator, context)
        solved = [problem.is_solved_by(ids) for problem, ids in zip(asked, samples.outputs(), strict=True)]
        rewards = torch.tensor(solved, dtype=torch.float32)
        grouped = rewards.view(-1, group)
        deviation = grouped.std(dim=1, keepdim=True, correction=0)
        advantages = ((grouped - grouped.mean(dim=1, keepdim=True)) / (deviation + 1e-4)).view(-1, 1)
        network.train()
        loss = _policy_loss(network, samples, advantages, context, settings.clip)
        rehearsed = chooser.choices(problems, k=settings.rehearsal_documents)
        loss = loss + settings.rehearsal_weight * _question_loss(network, rehearsed)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        report(step, rewards.mean().item())
    network.eval()


def _policy_loss(
    network: Qwen3ForCausalLM, samples: Samples, advantages: torch.Tensor, context: DynamicCache, clip: float
) -> torch.Tensor:
    """Clipped policy-gradient loss. Keys and values of the context are constants of it."""
    inputs = samples.token_ids[:, :-1]
    logits = network(
        input_ids=inputs, logits_to_keep=task.ANSWER_TOKENS, **cache_argument(network, context)
    ).logits.float()
    answers = samples.token_ids[:, task.PROMPT_TOKENS :]
    logprobs = functional.log_softmax(logits, dim=-1).gather(2, answers[:, :, None])[:, :, 0]
    ratio = (logprobs - samples.logprobs).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * samples.mask).sum() / samples.mask.sum()


def _question_loss(network: Qwen3ForCausalLM, problems: Sequence[task.Problem]) -> torch.Tensor:
    token_ids, is_answer = pack_rows(problems, documents_per_row=12)
    targets = token_ids[:, 1:]
    logits = network(input_ids=token_ids[:, :-1], use_cache=False).logits
    losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    weights = (~is_answer[:, 1:] & (targets != task.PAD)).float()
    return (losses * weights).sum() / weights.sum()
