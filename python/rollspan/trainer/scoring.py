"""Log-probs of given tokens, as the engine computes them with ``--batch-invariant``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from rollspan.kernels.invariant import InvariantMode
from rollspan.trainer.attention import NAME


@contextlib.contextmanager
def batch_invariant(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """While entered, forward passes give each token the same bits whatever is beside it.

    Matrix products in bfloat16 and float16 run in tiles of 32 rows, and elementwise functions whose rounding depends
    on the size of a tensor run in a form where it does not. float32 needs :func:`rollspan.trainer.environment` too.

    Raises:
        ValueError: the model does not run with this package's attention.
    """
    found = model.config._attn_implementation
    if found != NAME:
        raise ValueError(
            f"the model runs with attention {found!r}: load it with attn_implementation={NAME!r} after "
            "rollspan.trainer.register(), or call model.set_attn_implementation"
        )
    with InvariantMode():
        yield model


def score(
    model: PreTrainedModel, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Log-probs of each token given those before it, one sequence at a time in one forward pass without a cache.

    Differentiable; call it under ``torch.no_grad()`` where gradients are not needed.

    Args:
        model: in evaluation mode, loaded with ``attn_implementation="rollspan"``.
        token_ids: sequences of at least 2 tokens each.
        temperature: that of the sampling whose log-probs are compared.

    Returns:
        For each sequence of n tokens a float32 tensor ``[n - 1]``: entry i is the log-prob of token i + 1.

    Raises:
        ValueError: the model does not run with this package's attention, or a sequence has fewer than 2 tokens.
    """
    results = []
    with batch_invariant(model):
        for ids in token_ids:
            if len(ids) < 2:
                raise ValueError(f"a sequence of {len(ids)} tokens has nothing to score: give at least 2")
            tokens = torch.tensor([list(ids)], device=model.device)
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            if temperature != 1.0:
                logits = logits / torch.tensor(temperature, device=logits.device)
            results.append(torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None])[:, 0])
    return results
