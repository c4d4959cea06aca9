"""Launched: a step between its launch and the moment when its tokens are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollspan.engine.request import Request
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.protocol import messages as m
from rollspan.protocol.messages import Stamp
from rollspan.runner.input_batch import PendingTokens, StepLogits
from rollspan.sampler.sampler import Samples


@dataclass(frozen=True)
class Launched:
    """A step whose tokens are being sampled, or have been.

    Attributes:
        scheduled: what runs in it.
        logits: of the rows that are sampled and scored.
        samples: one for each request of ``logits.sampled``.
        places: where their tokens go, in the ``token_ids`` of each.
        stamp: label and commit of the weights that it was launched with; no later change of them renames it.
        kv_spans: for each request that is to be told, which weights computed what its token attends to.
    """

    scheduled: list[ScheduledRequest]
    logits: StepLogits
    samples: Samples
    places: list[int]
    stamp: Stamp
    kv_spans: dict[Request, list[m.StampSpan]]

    @property
    def tokens(self) -> PendingTokens:
        """What the next step may need of this one before it is collected."""
        ids = torch.tensor(self.samples.token_ids, dtype=torch.int64, device=self.logits.logits.device)
        return PendingTokens(self.logits.sampled, ids)

    def fault(self, row: int) -> m.EngineError:
        """Why nothing could be sampled from a row."""
        if bool(torch.isfinite(self.logits.logits[row].float().amax())):
            text = "no token is left that the request's parameters allow"
            return m.EngineError("validation_error", text, reason="invalid_request")
        return m.EngineError("nan_logits", f"the model's logits are not finite (weights {self.stamp[0]!r})")
