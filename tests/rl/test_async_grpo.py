"""The example of asynchronous GRPO: a few steps of it, and its proof."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_grpo"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_trains_across_updates_and_proves_its_last_one(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "3", "--groups", "2", "--figure", str(tmp_path / "curves.png")]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "step    3/3" in ended.stdout
    assert "8 of 8 rollouts go on as a fresh server of the final weights does" in ended.stdout
    found = re.search(r"differ by (\S+) at most", ended.stdout)
    assert found is not None
    assert float(found[1]) < 1e-4
