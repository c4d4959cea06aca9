"""``--batch-invariant``: the bits of a request depend on nothing else, and an engine that cannot promise it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollspan import models, numerics
from rollspan.config import EngineConfig
from rollspan.launcher import engine_environment

TESTS = Path(__file__).parent

needs_strict_mode = pytest.mark.skipif(not numerics.environment(), reason="the CPU has neither AVX-512 nor AVX2")


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=TESTS.parents[2], capture_output=True, text=True, timeout=550
    )


@needs_strict_mode
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_numbers_in_the_strict_mode() -> None:
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=500", str(TESTS / "strict_numbers.py")]
    result = run(command, **numerics.environment())
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def start(before: str, **variables: str) -> str:
    """What an engine in this very process says when it is asked for batch invariance after ``before``."""
    code = f"""
import torch
{before}
from rollspan.config import EngineConfig
from rollspan.engine.core import EngineCore
from rollspan.errors import RollspanError
try:
    EngineCore(EngineConfig(model={str(models.path())!r}, batch_invariant=True, kv_cache_memory=1 << 22))
    print("it runs")
except RollspanError as error:
    print(error.reason, error.param, error.message)
"""
    result = run(["-c", code], **variables)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@needs_strict_mode
@pytest.mark.timeout(300)
def test_an_engine_in_a_process_that_computed_before_is_refused_and_told_what_to_set() -> None:
    told = start("torch.ones(8, 8) @ torch.ones(8, 8)", MKL_CBWR="COMPATIBLE")
    assert told.startswith("invalid_request batch_invariant batch_invariant cannot be kept: the sums of MKL's float32")
    assert f"set MKL_CBWR={numerics.environment()[numerics.VARIABLE]} in the environment" in told


@needs_strict_mode
@pytest.mark.timeout(300)
def test_an_engine_in_a_fresh_process_chooses_the_strict_mode_by_itself() -> None:
    assert start("", MKL_CBWR="") == "it runs\n"


@needs_strict_mode
def test_the_launcher_gives_the_engine_process_the_strict_mode_only_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    model = str(models.path())
    assert engine_environment(EngineConfig(model=model, batch_invariant=True)).items() >= numerics.environment().items()
    assert "MKL_CBWR" not in engine_environment(EngineConfig(model=model))
