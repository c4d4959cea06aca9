"""Sampling with log-probs: logits to token ids, one draw per row that depends on seed and position alone.

Two implementations of the same definition: :mod:`rollspan.kernels.sampling_torch` and, on CPUs, the extension's.
They agree in every token whose draw does not lie within 1e-6 of the boundary between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollspan.kernels import sampling_native, sampling_torch
from rollspan.kernels.sampling_torch import ROW, Rows, SampleResult

__all__ = ["Edited", "Rows", "SampleResult", "make_rows", "sample", "score", "uniforms"]

#: Rows (ascending) and what is sampled from there instead of the model's logits (float32 ``[E, vocabulary]``).
Edited = tuple[npt.NDArray[np.intp], Tensor]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Sequence[int] | npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position): SplitMix64 (Steele, Lea, Flood 2014) over both, 53 bits.

    Independent of the batch, so that a seeded request samples the same whatever runs beside it.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
        state = _mix(state + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    result: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def make_rows(
    count: int,
    *,
    seed: npt.ArrayLike = 0,
    position: npt.ArrayLike = 0,
    temperature: npt.ArrayLike = 1.0,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    min_p: npt.ArrayLike = 0.0,
    num_top: npt.ArrayLike = -1,
) -> Rows:
    """:data:`ROW` ``[count]``; each argument is one value for all rows or ``count`` values."""
    rows = np.zeros(count, ROW)
    rows["seed"], rows["position"], rows["temperature"] = seed, position, temperature
    rows["top_k"], rows["top_p"], rows["min_p"], rows["num_top"] = top_k, top_p, min_p, num_top
    return rows


def sample(
    logits: Tensor,
    rows: Rows,
    *,
    edited: Edited | None = None,
    raw_logprobs: bool = False,
    exact_logprobs: bool = False,
    backend: str = "auto",
) -> SampleResult:
    """Samples one token per row.

    Args:
        logits: the model's, ``[S, vocabulary]``, float32, bfloat16 or float16. Left as they are.
        rows: :data:`ROW` ``[S]``: seeds, positions and parameters. The address columns are overwritten.
        edited: rows with masks, biases, penalties applied. Raw log-probs stay those of ``logits``.
        raw_logprobs: report the model's own distribution, instead of the one sampled from: after edits, temperature
            and truncation, renormalised over what is left.
        exact_logprobs: log-probs are those of ``torch.log_softmax`` over float32 (logits divided by the temperature),
            so that whoever computes them so gets the same bits; costs a second pass over the logits.
        backend: "native", "torch", or "auto" for the first of them that can.

    Raises:
        ValueError: "native" is asked for and cannot take these logits.
    """
    if not _takes(logits, backend):
        model, scores = _both(logits, edited)
        draws = uniforms(rows["seed"], rows["position"])
        return sampling_torch.sample_rows(model, scores, rows, draws, raw_logprobs=raw_logprobs)
    result = SampleResult.room(np.minimum(rows["num_top"], logits.shape[1]))
    sampling_native.sample_rows(logits, rows, edited, result, raw_logprobs=raw_logprobs)
    if exact_logprobs:
        _report_exactly(logits, rows, edited, result, raw_logprobs=raw_logprobs)
    return result


def score(logits: Tensor, targets: npt.ArrayLike, num_top: int, *, backend: str = "auto") -> SampleResult:
    """Log-probs of given tokens under the model's own distribution (no temperature): for the tokens of a prompt.

    Args:
        logits: ``[R, vocabulary]``, float32, bfloat16 or float16.
        targets: R token ids, one for each row.
        num_top: best tokens to report besides.
        backend: as for :func:`sample`.

    Returns:
        The targets as if they had been sampled; valid is False, and the log-probs are NaN, where logits are not finite.
    """
    tokens = np.asarray(targets, np.int64)
    result = SampleResult.room(np.full(len(tokens), min(num_top, logits.shape[1]), np.int32))
    result.token_ids[:] = tokens
    if _takes(logits, backend):
        sampling_native.score_rows(logits, num_top, result)
    else:
        model = logits.float()
        valid = torch.isfinite(model.amax(dim=-1))
        result.valid[:] = valid.cpu().numpy()
        model = model if bool(valid.all()) else model.masked_fill(~valid[:, None], 0.0)
        every = np.full(len(tokens), num_top, np.int32)
        sampling_torch.report(result, model, model, torch.from_numpy(tokens).to(model.device), every)
    result.logprobs[~result.valid] = np.nan
    return result


def _takes(logits: Tensor, backend: str) -> bool:
    if backend == "torch":
        return False
    able = sampling_native.takes(logits)
    if backend == "native" and not able:
        raise ValueError("these logits, or this installation, are not for the native sampler")
    return able


def _both(logits: Tensor, edited: Edited | None) -> tuple[Tensor, Tensor]:
    """What the model gave and what is sampled from, float32."""
    model = logits.float()
    if edited is None:
        return model, model
    index, replaced = edited
    whole = len(index) == len(logits)
    return model, replaced if whole else model.index_copy(0, torch.from_numpy(index).to(model.device), replaced)


def _report_exactly(
    logits: Tensor, rows: Rows, edited: Edited | None, result: SampleResult, *, raw_logprobs: bool
) -> None:
    """Replaces the log-probs by those of torch, for the tokens that the extension found."""
    index = np.flatnonzero((rows["num_top"] >= 0) & result.valid)
    if not index.size:
        return
    base = logits if raw_logprobs or edited is None else _both(logits, edited)[1]
    values = (base if len(index) == len(rows) else base.index_select(0, torch.from_numpy(index))).float()
    mine = rows[index]
    filled = np.arange(result.ids.shape[1]) <= mine["num_top"][:, None]
    ids = torch.from_numpy(np.where(filled, result.ids[index], 0).astype(np.int64))
    if not raw_logprobs:
        temperature = np.where(mine["temperature"] == 0, np.float32(1), mine["temperature"])
        if (temperature != 1).any():
            values = values / torch.from_numpy(temperature)[:, None]
        kept = sampling_torch.truncate(values, mine)
        # Where the two disagree about the last token that stays, the one that was chosen did stay.
        chosen = ids[:, :1]
        values = kept if kept is values else kept.scatter(1, chosen, values.gather(1, chosen))
    result.logprobs[index] = torch.log_softmax(values, dim=-1).gather(1, ids).numpy()
