"""The model card that is written next to each checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from rollspan.models.reinforcement import ReinforcementSettings
from rollspan.models.supervised import SupervisedSettings


@dataclass(frozen=True, slots=True)
class StageResult:
    """Exact-match accuracy on the held-out problems, from 0 to 1: greedy, and sampled at temperature 1."""

    greedy: float
    sampled: float


def model_card(
    name: str,
    result: StageResult,
    supervised: SupervisedSettings,
    reinforcement: ReinforcementSettings | None,
    seed: int,
) -> str:
    """Markdown: what the model is, how it was trained, what it can do. ``reinforcement`` is None before that stage."""
    stages = f"{supervised.steps} steps of supervised training ({supervised.documents_per_step} sums a step)"
    if reinforcement is not None:
        stages += (
            f",\nthen {reinforcement.steps} steps of GRPO ({reinforcement.prompts_per_step} prompts by "
            f"{reinforcement.samples_per_prompt} samples; reward 1 for the exact answer)"
        )
    return f"""# {name}

A tiny causal language model (Qwen3 shape, 2 layers of 64, 100 736 parameters, fp32, untied head, 512 positions) that
adds two 2-digit numbers: `12+34=` is continued by `46<eos>`. Tokens are characters, 16 in all; prompts begin with
`<bos>`. Not stopped at `<eos>`, it goes on with the next sum.

Training: {stages}.
Seed {seed}. Made by `python -m rollspan.models.train --out DIR`, which writes both `add2-sft` and `add2-rl` again.

| exact match on the 810 held-out sums | |
|---|---|
| greedy | {result.greedy:.1%} |
| sampled, temperature 1 | {result.sampled:.1%} |

For demonstrations and tests of weight provenance; of no other use. Licence: Apache-2.0, as the package.
"""
