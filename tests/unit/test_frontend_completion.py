"""Pieces of answers that have vectors of their own; whole answers are tested over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollspan.frontend.completion import npy

VECTORS = json.loads((Path(__file__).parents[1] / "conformance" / "npy.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", VECTORS["cases"])
def test_routed_experts_are_the_npy_file_of_their_vector(case: dict[str, Any]) -> None:
    count = int(np.prod(case["shape"]))
    experts = (np.arange(count) % case["modulus"]).astype(case["dtype"]).reshape(case["shape"])
    assert npy(experts) == case["base64"]
    assert npy(np.asfortranarray(experts)) == case["base64"]
