"""What ``check_weights`` does: digests of the weights as they lie in memory, compared or not; and spoiling them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch

from rollspan.digest import PREFIX, tensor_digest
from rollspan.errors import wrong_value
from rollspan.weights.holder import WeightHolder

ACTIONS = ("checksum", "compare", "reset")


def check_weights(weights: WeightHolder, action: Any, baseline: Any = None, *, quiet: bool) -> Future[dict[str, Any]]:
    """Runs an action when all that was asked of the weights before has ended.

    Args:
        action: ``checksum`` gives the digest of each weight by the first of its names, ``compare`` says which differ
            from ``baseline``, ``reset`` overwrites all with zeros, so that a transfer proves that it brings everything:
            nothing is generated until a complete update.
        baseline: what ``checksum`` has given.
        quiet: a pause is in force under which nothing runs.

    Raises:
        RollspanError: ``invalid_request``, ``pause_required``, ``update_active``, ``engine_sleeping``.
    """
    if action not in ACTIONS:
        raise wrong_value("action", "checksum, compare or reset", action)
    if action == "reset":
        return weights.reset(quiet=quiet)
    if action == "compare" and not isinstance(baseline, Mapping):
        raise wrong_value("baseline", "an object of tensor names and digests", baseline)

    def work(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        found = {name: PREFIX + tensor_digest(name, tensor).hex() for name, tensor in tensors.items()}
        if action == "checksum":
            return {"checksums": found}
        wrong = sorted(name for name in {*found, *baseline} if found.get(name) != baseline.get(name))
        return {"match": not wrong, "mismatches": wrong}

    return weights.examine(work)
