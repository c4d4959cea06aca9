"""The decoder of OUTPUTS messages that the client side uses: the extension module's where there is one.

It reads the same as :func:`rollspan.protocol.codec.decode_outputs`, which is its definition, in a quarter of the time
(`benchmarks/codec.py`). ``ROLLSPAN_PURE_PYTHON=1`` goes without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rollspan.protocol import codec
from rollspan.protocol.messages import EngineCoreOutputs
from rollspan.version import __version__

Decoder = Callable[[Sequence[bytes]], EngineCoreOutputs]


def choose_decoder() -> Decoder:
    """The extension module's decoder, unless it is absent, was built for another version or is not wanted."""
    if os.environ.get("ROLLSPAN_PURE_PYTHON") == "1":
        return codec.decode_outputs
    try:
        from rollspan import _native
    except ImportError:
        return codec.decode_outputs
    return _native.decode_outputs if _native.__version__ == __version__ else codec.decode_outputs


decode_outputs: Decoder = choose_decoder()
