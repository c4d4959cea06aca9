"""How much memory an engine takes for its cache where nobody says."""

from __future__ import annotations

import pytest
import torch

from rollspan.config import EngineConfig
from rollspan.runner import placement


@pytest.mark.parametrize(("num_engines", "blocks"), [(1, 249), (2, 124), (5, 49)])
def test_engines_of_a_set_share_the_memory_of_the_host(
    monkeypatch: pytest.MonkeyPatch, num_engines: int, blocks: int
) -> None:
    monkeypatch.setattr(placement, "_free_memory", lambda device: 1000 * 4096)
    config = EngineConfig(model="m", num_engines=num_engines, max_num_seqs=100)
    found = placement._num_blocks(4096, config, max_model_len=64, device=torch.device("cpu"))
    assert found == blocks, "a quarter of the memory, one block for padding"
