"""Learner: GRPO on rollouts that are a few commits old, corrected token by token with the log-probs they came with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rollouts import Rollout
from torch.nn import functional
from transformers import AutoModelForCausalLM

from rollspan.models import task
from rollspan.models.supervised import pack_rows


@dataclass(frozen=True)
class Settings:
    """Constants of the optimisation.

    Attributes:
        learning_rate, warm_up_steps: of AdamW; the rate is reached after so many steps.
        clip: probability ratios are clipped to 1 - clip .. 1 + clip.
        max_lag: tokens that are more commits behind do not count.
        rehearsal_documents, rehearsal_weight: supervised questions a step, so that posing sums is not unlearned.
    """

    learning_rate: float = 1e-3
    warm_up_steps: int = 10
    clip: float = 0.2
    max_lag: int = 4
    rehearsal_documents: int = 48
    rehearsal_weight: float = 0.3


@dataclass
class Report:
    """What one step saw.

    Attributes:
        reward: share of right answers.
        lags: tokens by how many commits they were behind.
        drift: mean |log ratio| of the tokens of each lag: how far the policy has moved since they were sampled.
        numerics: largest |difference| between reported and recomputed log-probs of rollouts wholly of lag 0: what
            remains when the weights are the same.
        left_out: answer tokens that were too old.
    """

    reward: float
    lags: Counter[int] = field(default_factory=Counter)
    drift: dict[int, float] = field(default_factory=dict)
    numerics: float = 0.0
    left_out: int = 0


class Learner:
    """The policy that is trained, and its optimiser."""

    def __init__(self, directory: Path, settings: Settings, seed: int) -> None:
        self.network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.network.eval()  # there is no dropout; what is sampled and what is trained are one function
        self._settings = settings
        self._optimizer = torch.optim.AdamW(self.network.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self._steps = 0
        self._random = random.Random(seed)
        self._problems, _ = task.split_problems()

    def step(self, groups: Sequence[Sequence[Rollout]], commit: int) -> Report:
        """Trains on groups of rollouts; ``commit`` is the number of this policy's present weights in the server."""
        rollouts = [rollout for group in groups for rollout in group if rollout.token_ids]
        advantages, reward = _advantages(groups)
        width = max(len(rollout.token_ids) for rollout in rollouts)
        ids = torch.full((len(rollouts), task.PROMPT_TOKENS + width), task.PAD)
        reported, weight = torch.zeros(len(rollouts), width), torch.zeros(len(rollouts), width)
        lag = torch.full((len(rollouts), width), -1)
        for row, rollout in enumerate(rollouts):
            count = len(rollout.token_ids)
            ids[row, : task.PROMPT_TOKENS + count] = torch.tensor([*rollout.problem.prompt_ids, *rollout.token_ids])
            reported[row, :count] = torch.tensor(rollout.logprobs)
            lag[row, :count] = commit - torch.tensor(rollout.commits)
            for start, end, advantage in advantages[id(rollout)]:
                weight[row, start:end] = advantage
        current = self._logprobs(ids, width)
        report = _report(reward, current.detach(), reported, lag, weight, self._settings.max_lag)
        weight = weight * (lag <= self._settings.max_lag)
        # Each token is corrected for the weights that sampled it: its own span's log-prob is the denominator.
        ratio = (current - reported).exp()
        clip = self._settings.clip
        gain = torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight)
        loss = -gain.sum() / (weight != 0).sum().clamp(min=1)
        loss = loss + self._settings.rehearsal_weight * self._question_loss()
        self._steps += 1
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._settings.learning_rate * min(1.0, self._steps / self._settings.warm_up_steps)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self._optimizer.step()
        return report

    def _logprobs(self, ids: torch.Tensor, width: int) -> torch.Tensor:
        logits = self.network(input_ids=ids[:, :-1], logits_to_keep=width, use_cache=False).logits
        scores = functional.log_softmax(logits.float(), dim=-1)
        return scores.gather(2, ids[:, task.PROMPT_TOKENS :, None])[:, :, 0]

    def _question_loss(self) -> torch.Tensor:
        chosen = self._random.choices(self._problems, k=self._settings.rehearsal_documents)
        token_ids, is_answer = pack_rows(chosen, documents_per_row=12)
        targets = token_ids[:, 1:]
        logits = self.network(input_ids=token_ids[:, :-1], use_cache=False).logits
        losses = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        counted = (~is_answer[:, 1:] & (targets != task.PAD)).float()
        return (losses * counted).sum() / counted.sum()


def _advantages(groups: Sequence[Sequence[Rollout]]) -> tuple[dict[int, list[tuple[int, int, float]]], float]:
    """For each rollout its answers as (start, end, advantage), and the share of right answers.

    The first answer of a rollout is compared with those of its group, to the same sum; later ones, to sums that the
    policy has posed itself, with those of the whole batch.
    """
    found: dict[int, list[tuple[int, int, float]]] = {id(rollout): [] for group in groups for rollout in group}
    later: list[tuple[int, int, int, bool]] = []
    right = total = 0
    for group in groups:
        first: list[tuple[int, int, int, bool]] = []
        for rollout in group:
            for number, (start, end, solved) in enumerate(rollout.answers()):
                (later if number else first).append((id(rollout), start, end, solved))
                right, total = right + solved, total + 1
        _normalise(first, found)
    _normalise(later, found)
    return found, right / max(total, 1)


def _normalise(answers: list[tuple[int, int, int, bool]], found: dict[int, list[tuple[int, int, float]]]) -> None:
    rewards = torch.tensor([float(solved) for *_, solved in answers])
    if len(answers) < 2:
        return
    scaled = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
    for (rollout, start, end, _), advantage in zip(answers, scaled.tolist(), strict=True):
        found[rollout].append((start, end, advantage))


def _report(
    reward: float,
    current: torch.Tensor,
    reported: torch.Tensor,
    lag: torch.Tensor,
    weight: torch.Tensor,
    max_lag: int,
) -> Report:
    report = Report(reward)
    difference = (current - reported).abs()
    for value in lag[lag >= 0].unique().tolist():
        mine = lag == value
        report.lags[value] = int(mine.sum())
        report.drift[value] = float(difference[mine].mean())
    fresh = ((lag == 0) | (lag == -1)).all(dim=1)
    report.numerics = float((difference * (lag == 0))[fresh].amax()) if bool(fresh.any()) else 0.0
    report.left_out = int(((lag > max_lag) & (weight != 0)).sum())
    return report
