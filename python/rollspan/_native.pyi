"""The Rust decoder, span builder and compute kernels. Absent where the package has no extension module."""

from collections.abc import Sequence
from typing import final

from rollspan.protocol.messages import EngineCoreOutputs
from rollspan.spans import CommitSpan, VersionSpan

__all__ = [
    "SpanBuilder",
    "__version__",
    "decode_outputs",
    "gated",
    "kernel_isa",
    "kernel_threads",
    "linear",
    "linear_rows",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sample_rows",
    "score_rows",
    "set_kernel_isa",
    "set_kernel_threads",
]

__version__: str

def decode_outputs(frames: Sequence[bytes]) -> EngineCoreOutputs:
    """As :func:`rollspan.protocol.codec.decode_outputs`, except that maps of counters hold only the counters in use.

    Raises:
        rollspan.protocol.codec.DecodeError: the message is not well formed.
    """

def paged_attention(
    rows: tuple[int, ...],
    cache: tuple[int, ...],
    batch: tuple[int, ...],
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: int,
) -> None:
    """Called by :mod:`rollspan.kernels.attention_native`, which takes the addresses from tensors that it has checked.

    Raises:
        ValueError: the batch names slots, blocks or rows that there are not.
    """

def sample_rows(description: tuple[int, ...], raw_logprobs: bool) -> None:
    """Called by :mod:`rollspan.kernels.sampling_native`: addresses and sizes of arrays that it has made."""

def score_rows(description: tuple[int, ...]) -> None:
    """As :func:`sample_rows`, for tokens that are given."""

def rms_norm(
    element_type: int,
    rows: int,
    columns: int,
    input: int,
    input_stride: int,
    addend: int,
    addend_stride: int,
    sum: int,
    weight: int,
    scaling_type: int,
    epsilon: float,
    output: int,
    /,
) -> None:
    """Called by :mod:`rollspan.kernels.fused`, as :func:`rotary` and :func:`gated`: addresses, strides and sizes."""

def rotary(
    element_type: int,
    rows: int,
    head_dim: int,
    cos: int,
    cos_stride: int,
    sin: int,
    sin_stride: int,
    scaling_type: int,
    epsilon: float,
    query: tuple[int, int, int, int, int, int],
    key: tuple[int, int, int, int, int, int],
    /,
) -> None:
    """Of queries and keys: heads, input and its row stride, output and its row stride, the norm's weight (0: none)."""

def gated(
    element_type: int,
    activation: int,
    rows: int,
    columns: int,
    gate: int,
    gate_stride: int,
    up: int,
    up_stride: int,
    output: int,
    /,
) -> None:
    """An activated gate times another tensor."""

def linear(
    rows: int, depth: int, input: int, input_stride: int, weights: Sequence[tuple[int, int, int]], output: int, /
) -> None:
    """Called by :mod:`rollspan.kernels.linear`: bfloat16; of each weight the address, the outputs, the bias (0: none).

    Raises:
        ValueError: more than :func:`linear_rows` rows.
    """

def linear_rows() -> int:
    """Most rows that :func:`linear` takes; 0 where the CPU lacks what it needs."""

def kernel_isa() -> str:
    """The instruction set that kernels run with: ``avx512``, ``avx2`` or ``portable``."""

def set_kernel_isa(name: str) -> None:
    """Uses another one; results have the same bits.

    Raises:
        ValueError: there is no such instruction set, or the CPU lacks it.
    """

def kernel_threads() -> int:
    """Threads that a kernel call may use, the calling one included."""

def set_kernel_threads(threads: int) -> None:
    """Changes it (0 counts as 1); waits for a running kernel."""

@final
class SpanBuilder:
    """As :class:`rollspan.spans.SpanBuilder`."""

    def __new__(cls) -> SpanBuilder: ...
    @property
    def tokens(self) -> int: ...
    def push(self, version: str | None, commit: int | None, tokens: int) -> None: ...
    def finish(self, total: int | None = None) -> tuple[list[VersionSpan] | None, list[CommitSpan] | None]: ...
    def between(self, start: int, end: int) -> tuple[list[VersionSpan] | None, list[CommitSpan] | None]: ...
