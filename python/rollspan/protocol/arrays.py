"""Arrays on the wire, ``[dtype, shape, data]``: log-probs of outputs and prompts, and routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from rollspan.protocol.messages import LogprobsLists
from rollspan.protocol.packed_logprobs import PackedLogprobs, before_arrays
from rollspan.protocol.strict import EXT_RAW, U32, fail, read_array, read_int, read_text, shallow

_Dtypes = frozenset[np.dtype[Any]]
_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
#: Arrays have numpy's names, tensors torch's.
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in ("|u1", "<i2", "<i4", "<i8", "<f4", "<f8", "uint8", "int16", "int32", "int64", "float32", "float64")
}
_INTEGERS: _Dtypes = frozenset({np.dtype("<i4"), np.dtype("<i8")})
_FLOATS: _Dtypes = frozenset({np.dtype("<f4"), np.dtype("<f8")})
_EXPERTS: _Dtypes = frozenset({np.dtype("|u1"), np.dtype("<i2"), np.dtype("<i4")})
_MOST_DIMENSIONS = 3


def encode_array(array: npt.NDArray[Any], name: str) -> tuple[str, list[int], msgpack.ExtType]:
    """``array``, whose dtype is called ``name``, inline."""
    return (name, list(array.shape), msgpack.ExtType(EXT_RAW, array.tobytes()))


def encode_tensors(lists: LogprobsLists) -> tuple[Any, ...]:
    """Log-probs of a prompt, as vLLM's LogprobsTensors."""
    ids, ranks = lists.token_ids.astype(_INT32, copy=False), lists.sampled_ranks.astype(_INT32, copy=False)
    logprobs = lists.logprobs.astype(_FLOAT32, copy=False)
    return (encode_array(ids, "int32"), encode_array(logprobs, "float32"), encode_array(ranks, "int32"), None, None)


def encode_experts(experts: npt.NDArray[np.integer[Any]]) -> tuple[str, list[int], msgpack.ExtType]:
    """Routed experts; types that the wire does not have become int32."""
    if experts.dtype not in _EXPERTS:
        experts = experts.astype(_INT32)
    return encode_array(experts, experts.dtype.str)


def encode_logprobs(lists: LogprobsLists) -> bytes:
    """Log-probs of new tokens as MessagePack: most of what a step says, so it must be quick.

    The bytes around the data depend on the shape only, and the data is what lies in memory.
    """
    if isinstance(lists, PackedLogprobs):
        return lists.data
    ids, logprobs, ranks = lists.token_ids, lists.logprobs, lists.sampled_ranks
    if ids.dtype is not _INT32:
        ids = ids.astype(_INT32)
    if logprobs.dtype is not _FLOAT32:
        logprobs = logprobs.astype(_FLOAT32)
    if ranks.dtype is not _INT32:
        ranks = ranks.astype(_INT32)
    shape = ids.shape
    if logprobs.shape != shape or ranks.shape != shape[:1]:
        raise ValueError(f"log-probs have shapes {shape}, {logprobs.shape} and {ranks.shape}")
    before, between, behind = before_arrays(shape)
    return b"".join((before, ids.tobytes(), between, logprobs.tobytes(), behind, ranks.tobytes(), b"\xc0"))


def _decode_array(value: Any, name: str, buffers: Sequence[bytes], dtypes: _Dtypes) -> npt.NDArray[Any]:
    row = read_array(value, name, 3)
    shallow(row[3:], 6)
    dtype = _DTYPES.get(read_text(row[0], f"{name} dtype"))
    if dtype is None or dtype not in dtypes:
        allowed = ", ".join(sorted(allowed.str for allowed in dtypes))
        fail("bad_array", f"{name} has dtype {row[0]!r}, allowed are {allowed}")
    shape = read_array(row[1], f"{name} shape", 0)
    if not 1 <= len(shape) <= _MOST_DIMENSIONS:
        fail("bad_array", f"{name} has {len(shape)} dimensions, allowed are 1 to {_MOST_DIMENSIONS}")
    size = dtype.itemsize
    for count in shape:
        size *= read_int(count, f"{name} shape", 0, U32)
    data = row[2]
    if isinstance(data, msgpack.ExtType):
        raw = data.data
    else:
        index = read_int(data, f"{name} buffer index", 1, U32)
        if index > len(buffers):
            fail("bad_array", f"{name} names buffer {index} of {len(buffers)}")
        raw = buffers[index - 1]
    if size != len(raw):
        fail("bad_array", f"{name} of shape {shape} and dtype {row[0]} does not fit {len(raw)} bytes")
    return np.frombuffer(raw, dtype).reshape(shape)


def decode_tensors(value: Any, name: str, buffers: Sequence[bytes]) -> LogprobsLists:
    """As `decode_logprobs`, for those that come once a request: the ids are looked at too."""
    lists = decode_logprobs(value, name, buffers)
    if (lists.token_ids < 0).any():
        fail("out_of_range", f"{name} name a token that is negative")
    return lists


def decode_logprobs(value: Any, name: str, buffers: Sequence[bytes]) -> LogprobsLists:
    """Reads LogprobsLists or LogprobsTensors, which have nothing but cumulative counts behind the same three arrays.

    Raises:
        DecodeError: they are not well formed, or their shapes do not fit together.
    """
    row = read_array(value, name, 3)
    shallow(row[3:], 5)
    ids = _decode_array(row[0], f"{name} token ids", buffers, _INTEGERS)
    logprobs = _decode_array(row[1], name, buffers, _FLOATS)
    ranks = _decode_array(row[2], f"{name} ranks", buffers, _INTEGERS)
    if ids.ndim != 2 or ids.shape != logprobs.shape or ranks.shape != ids.shape[:1] or ids.shape[1] == 0:
        fail("bad_array", f"{name} have shapes {ids.shape}, {logprobs.shape} and {ranks.shape}")
    return LogprobsLists(
        ids if ids.dtype is _INT32 else ids.astype(_INT32),
        logprobs if logprobs.dtype is _FLOAT32 else logprobs.astype(_FLOAT32),
        ranks if ranks.dtype is _INT32 else ranks.astype(_INT32),
    )


def decode_experts(value: Any, buffers: Sequence[bytes]) -> npt.NDArray[np.integer[Any]]:
    """Reads routed experts ``[tokens, layers, top_k]``.

    Raises:
        DecodeError: they are not well formed.
    """
    experts = _decode_array(value, "routed_experts", buffers, _EXPERTS)
    if experts.ndim != 3:
        fail("bad_array", f"routed_experts have shape {list(experts.shape)} instead of [tokens, layers, top_k]")
    return experts
