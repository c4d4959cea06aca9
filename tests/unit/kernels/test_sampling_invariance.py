"""The native sampler gives the same bits in any batch, on any number of threads, with any instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kernels.test_sampling import NATIVE, random_logits, random_rows
from rollspan.kernels import native
from rollspan.kernels.sampling import SampleResult, make_rows, sample, score, uniforms

pytestmark = pytest.mark.skipif(not NATIVE, reason="the extension module is not installed")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Leaves instruction set and threads as they were."""
    module = native.module()
    isa, threads = module.kernel_isa(), module.kernel_threads()
    yield
    module.set_kernel_isa(isa)
    module.set_kernel_threads(threads)


def same_bits(a: SampleResult, b: SampleResult, num_top: np.ndarray) -> None:
    assert a.outcomes.tobytes() == b.outcomes.tobytes()
    for row, count in enumerate(num_top.tolist()):
        assert a.ids[row, : 1 + count].tobytes() == b.ids[row, : 1 + count].tobytes()
        assert a.logprobs[row, : 1 + count].tobytes() == b.logprobs[row, : 1 + count].tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_every_instruction_set_gives_the_same_bits(isa: str, dtype: torch.dtype) -> None:
    logits = random_logits(80, 3001, 1, ties=True).to(dtype)
    rows = random_rows(80, 3001, 2)
    results = [sample(logits, rows, backend="native"), score(logits, range(80), 4, backend="native")]
    try:
        native.module().set_kernel_isa(isa)
    except ValueError:
        pytest.skip("not on this CPU")
    again = [sample(logits, rows, backend="native"), score(logits, range(80), 4, backend="native")]
    same_bits(again[0], results[0], rows["num_top"])
    same_bits(again[1], results[1], np.full(80, 4))


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    logits = random_logits(64, 40_000, 3)
    rows = random_rows(64, 40_000, 4)
    native.module().set_kernel_threads(1)
    alone = sample(logits, rows, backend="native")
    native.module().set_kernel_threads(threads)
    same_bits(sample(logits, rows, backend="native"), alone, rows["num_top"])


def test_a_row_gives_the_same_bits_alone_and_in_any_batch() -> None:
    logits = random_logits(50, 2500, 5)
    rows = random_rows(50, 2500, 6)
    together = sample(logits, rows, backend="native")
    backward = sample(logits.flip(0), rows[::-1].copy(), backend="native")
    for row in range(50):
        alone = sample(logits[row : row + 1], rows[row : row + 1].copy(), backend="native")
        columns = 1 + max(0, int(rows["num_top"][row]))
        for other, place in ((together, row), (backward, 49 - row)):
            assert other.outcomes[place] == alone.outcomes[0]
            if rows["num_top"][row] >= 0:
                assert other.logprobs[place, :columns].tobytes() == alone.logprobs[0, :columns].tobytes()
                assert other.ids[place, :columns].tobytes() == alone.ids[0, :columns].tobytes()


def test_rows_may_lie_anywhere_in_memory() -> None:
    wide = random_logits(20, 1111, 7)
    rows = random_rows(20, 1000, 8)
    parts = wide[:, 57:1057]
    assert not parts.is_contiguous()
    same_bits(
        sample(parts, rows, backend="native"), sample(parts.contiguous(), rows, backend="native"), rows["num_top"]
    )


def test_the_draws_are_those_of_uniforms() -> None:
    # Equal logits, a power of two of them: the token is the draw's leading bits.
    seeds, positions = np.arange(500, dtype=np.uint64) * 2**55 + 3, np.arange(500) * 7919
    result = sample(torch.zeros(500, 1024), make_rows(500, seed=seeds, position=positions), backend="native")
    assert result.token_ids.tolist() == (uniforms(seeds, positions) * 1024).astype(int).tolist()
