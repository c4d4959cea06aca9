"""The Rust decoder and span builder. Absent where the package was installed without its extension module."""

from collections.abc import Sequence
from typing import final

from rollspan.protocol.messages import EngineCoreOutputs
from rollspan.spans import CommitSpan, VersionSpan

__all__ = ["SpanBuilder", "__version__", "decode_outputs"]

__version__: str

def decode_outputs(frames: Sequence[bytes]) -> EngineCoreOutputs:
    """As :func:`rollspan.protocol.codec.decode_outputs`, except that maps of counters hold only the counters in use.

    Raises:
        rollspan.protocol.codec.DecodeError: the message is not well formed.
    """

@final
class SpanBuilder:
    """As :class:`rollspan.spans.SpanBuilder`."""

    def __new__(cls) -> SpanBuilder: ...
    @property
    def tokens(self) -> int: ...
    def push(self, version: str | None, commit: int | None, tokens: int) -> None: ...
    def finish(self, total: int | None = None) -> tuple[list[VersionSpan] | None, list[CommitSpan] | None]: ...
    def between(self, start: int, end: int) -> tuple[list[VersionSpan] | None, list[CommitSpan] | None]: ...
