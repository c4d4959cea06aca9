"""An update to the same weights is the identity: of the digest, of every bit that is generated, and of the memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from engine.harness import Engine
from engine.models import TinyModel, make_model

UPDATES = 50
PROMPTS = [(1, 2, 3), (7,) * 20, (5, 4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Large enough that a copy which is kept shows in the memory of the process: 10 MB in bfloat16."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return make_model(tmp_path_factory.mktemp("no-op") / "llama", config, seed=3)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def generated(engine: Engine) -> list[tuple[list[int], list[Any]]]:
    """Tokens and the bits of their log-probs."""
    results = engine.generate(PROMPTS, max_tokens=8, logprobs=0)
    found = []
    for result in results:
        logprobs = [output.new_logprobs for output in result.outputs if output.new_token_ids]
        bits = [np.asarray(one.logprobs, np.float32).view(np.int32).tolist() for one in logprobs if one is not None]
        found.append((result.token_ids, bits))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_updates_to_the_same_weights_change_nothing(model: TinyModel, tmp_path: Path, dtype: str) -> None:
    shutil.copytree(model.path, tmp_path / "same")
    engine = Engine(str(model.path), dtype=dtype, kv_cache_memory=1 << 22, weights_root=str(tmp_path))
    digest, expected = engine.result_of("get_weight_digest"), generated(engine)
    assert len(expected[0][0]) == len(expected[0][1]) == 8
    settled = 0
    for number in range(1, UPDATES + 1):
        engine.result_of("start_weight_update", {"mode": "staged"})
        engine.result_of("update_weights", {"path": "same"})
        answer = engine.result_of("finish_weight_update", f"step-{number}", {"digest": digest})
        assert answer == {"weight_version": f"step-{number}", "weight_commit": number, "weight_digest": digest}
        if number % 10 == 0:
            assert generated(engine) == expected
            settled = settled or resident_bytes()
    sums = engine.result_of("check_weights", "checksum")["checksums"]  # behind all that had to be freed
    assert len(sums) == len(engine.core._runner._model.state_dict())
    copy = engine.result_of("server_info")["weight_staging_bytes"]
    assert copy > 9_000_000
    assert resident_bytes() - settled < 4 * copy  # of the 40 since
