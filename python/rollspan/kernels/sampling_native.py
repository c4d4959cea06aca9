"""The extension's sampler: one call for all rows of a batch, without Python's lock, on the CPU."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollspan.kernels import native
from rollspan.kernels.sampling_torch import ROW, Rows, SampleResult

#: Element types as the extension numbers them.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.cache
def _available() -> bool:
    return native.available() and hasattr(native.module(), "sample_rows")


def takes(logits: Tensor) -> bool:
    """True when the extension is there and can read these logits where they are."""
    return (
        _available()
        and logits.device.type == "cpu"
        and logits.dtype in _KINDS
        and (logits.stride(1) == 1 or logits.shape[1] == 1)
    )


def sample_rows(
    logits: Tensor,
    rows: Rows,
    edited: tuple[npt.NDArray[np.intp], Tensor] | None,
    result: SampleResult,
    *,
    raw_logprobs: bool,
) -> None:
    """Fills ``result``; arguments are those of :func:`rollspan.kernels.sampling.sample`."""
    _point(rows, "scores", logits)
    if edited is not None:
        index, replaced = edited
        mine = rows[index]
        _point(mine, "scores", replaced)
        rows["scores"][index], rows["scores_kind"][index] = mine["scores"], mine["scores_kind"]
    if raw_logprobs:
        _point(rows, "reported", logits)
    native.module().sample_rows(_describe(rows, logits.shape[1], result), raw_logprobs)


def score_rows(logits: Tensor, num_top: int, result: SampleResult) -> None:
    """Fills in log-probs, ranks and best tokens of the ids in ``result``."""
    rows = np.zeros(len(logits), ROW)
    rows["num_top"] = num_top
    _point(rows, "reported", logits)
    native.module().score_rows(_describe(rows, logits.shape[1], result))


def _describe(rows: Rows, vocabulary: int, result: SampleResult) -> tuple[int, ...]:
    """Arrays and sizes, in the order of ``rust/python/src/kernels_sampling.rs``."""
    arrays = (rows, result.outcomes, result.ids, result.logprobs)
    return (*map(_address, arrays), len(rows), vocabulary, result.ids.shape[1])


def _point(rows: Rows, name: str, values: Tensor) -> None:
    stride = values.stride(0) * values.element_size()
    rows[name] = np.arange(len(rows), dtype=np.uint64) * np.uint64(stride) + np.uint64(values.data_ptr())
    rows[name + "_kind"] = _KINDS[values.dtype]


def _address(array: npt.NDArray[np.generic]) -> int:
    return array.ctypes.data  # __array_interface__ would describe every field first
