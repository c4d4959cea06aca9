"""What the environment must say for results that do not depend on the batch. Imports no torch.

On the CPU every matrix product of float32 goes through Intel's MKL. By default it picks a kernel, and with it an order
of summation, by the number of rows and of threads; its strict mode (``MKL_CBWR=...,STRICT``) has one order for all. MKL
reads the variable once, at its first use in a process.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "MKL_CBWR"


def environment() -> dict[str, str]:
    """Variables that a process needs before its first matrix product, for results that are equal to the bit.

    What is set already stays where it is a strict mode. Machines of one fleet agree to the bit when they have the same
    setting: where some lack AVX-512, set ``MKL_CBWR=AVX2,STRICT`` on all.

    Returns:
        ``{"MKL_CBWR": "AVX512,STRICT"}`` or ``"AVX2,STRICT"``; empty where the CPU has neither.
    """
    present = os.environ.get(VARIABLE, "")
    if present.upper().endswith(",STRICT"):
        return {VARIABLE: present}
    flags = _cpu_flags()
    if "avx512f" in flags:
        return {VARIABLE: "AVX512,STRICT"}
    return {VARIABLE: "AVX2,STRICT"} if "avx2" in flags else {}


def activate() -> dict[str, str]:
    """Sets :func:`environment` for this process, which helps as long as it has computed nothing yet.

    Returns:
        What is set.
    """
    variables = environment()
    os.environ.update(variables)
    return variables


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
