"""``--batch-invariant``: results that are equal to the bit whatever else runs, promised only after a test."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from rollspan import numerics, trainer
from rollspan.config import EngineConfig
from rollspan.errors import RollspanError
from rollspan.kernels import native
from rollspan.kernels.invariant import InvariantMode, cancelling
from rollspan.runner.model_runner import ModelRunner
from rollspan.runner.self_check import SelfCheck

logger = logging.getLogger("rollspan.engine")

#: Tokens of the sequences that the test runs: past the 64 keys that attention takes at a time.
_LENGTHS = (80, 70, 9)


@dataclass(frozen=True)
class Numerics:
    """What is known of the engine's numbers, for the log, ``server_info`` and whoever wants to repeat them.

    Attributes:
        batch_invariant: True when a self-test has found every log-prob equal to that of a plain forward pass with
            ``rollspan.trainer``'s attention, to the bit.
        reason: what was tested, or why there is no promise.
        isa: instruction sets of torch and of this package's kernels.
        mkl_cbwr: MKL's mode, as the environment has it.
        dtype: of the weights.
        attention: backends in use.
        threads: compute threads.
    """

    batch_invariant: bool
    reason: str
    isa: str
    mkl_cbwr: str
    dtype: str
    attention: str
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """Fields by name."""
        return dataclasses.asdict(self)


def prepare(config: EngineConfig) -> None:
    """Puts MKL into its strict mode where the engine is to be batch-invariant; before the first matrix product."""
    if config.batch_invariant:
        numerics.activate()


def examine(model: PreTrainedModel, runner: ModelRunner | None, config: EngineConfig, vocab_size: int) -> Numerics:
    """Tests the runner where the engine is to be batch-invariant; its KV cache is replaced.

    Args:
        runner: None where the model runs one sequence at a time through its own cache.

    Raises:
        RollspanError: ``invalid_request``: the promise cannot be kept, and why.
    """
    fault: str | None = "not asked for (--batch-invariant)"
    if config.batch_invariant:
        fault = _fault(model, runner, config, vocab_size)
        if fault is not None:
            raise RollspanError(
                f"batch_invariant cannot be kept: {fault}", reason="invalid_request", param="batch_invariant"
            )
    found = Numerics(
        batch_invariant=fault is None,
        reason=fault or "a self-test found the same bits alone, beside others, in pieces and in a plain forward pass",
        isa=f"torch {torch.backends.cpu.get_cpu_capability()}, kernels {native.isa()}",
        mkl_cbwr=os.environ.get(numerics.VARIABLE, ""),
        dtype=str(model.dtype).removeprefix("torch."),
        attention=str(runner.facts()["attention"]) if runner is not None else "the model's own",
        threads=torch.get_num_threads(),
    )
    if found.batch_invariant:
        logger.info("batch-invariant: yes (%s; %s, %s)", found.reason, found.dtype, found.mkl_cbwr or "no MKL mode")
    return found


def _fault(model: PreTrainedModel, runner: ModelRunner | None, config: EngineConfig, vocab_size: int) -> str | None:
    """Why results depend on more than the request, None if they do not."""
    if runner is None:
        return "this model runs one sequence at a time through its own cache"
    if model.device.type != "cpu":
        return f"it is supported on the CPU only, not on {model.device}"
    if not _strict_products():
        return (
            "the sums of MKL's float32 matrix products depend on the number of rows. In its strict mode they do not: "
            + "".join(f"set {name}={value} " for name, value in numerics.environment().items())
            + "in the environment before this process computes anything (rollspan serve does so)"
        )
    trainer.register()
    try:
        with InvariantMode():
            check = SelfCheck(
                model,
                vocab_size=vocab_size,
                block_size=config.block_size,
                device=model.device,
                lengths=_LENGTHS,
                reference=trainer.NAME,
                tolerance=0.0,
            )
    except RollspanError as error:
        return f"with the attention of rollspan.trainer {error.message}"
    runner.allocate(check.num_blocks)
    threads = torch.get_num_threads()
    for count in sorted({1, threads}):
        _set_threads(count)
        try:
            outcome = check.compare(runner.run)
        finally:
            _set_threads(threads)
        if not outcome.ok:
            return (
                f"{type(model).__name__} with {count} of {threads} threads {outcome.fault}: "
                "batched and in pieces against a plain forward pass"
            )
    return None


def _strict_products() -> bool:
    """Whether the float32 matrix product of a row has the same bits beside other rows."""
    rows, weight = cancelling(64, 64, 512, torch.float32)
    together = functional.linear(rows, weight)
    return all(torch.equal(functional.linear(rows[:n], weight), together[:n]) for n in (1, 2, 8, 16, 33))


def _set_threads(count: int) -> None:
    torch.set_num_threads(count)
    native.set_num_threads(count)
