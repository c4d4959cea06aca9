"""Strict reading of MessagePack values: each helper takes a value and its name, and raises DecodeError."""

from __future__ import annotations

from typing import Any, NoReturn

import msgpack

EXT_RAW = 3
MAX_DEPTH = 64
U32 = 2**32 - 1
U64 = 2**64 - 1
I64 = 2**63 - 1

#: Messages of errors may quote file names that are not UTF-8; an answer that cannot be sent would be worse.
LENIENT = "backslashreplace"


class DecodeError(Exception):
    """A message that is not what PROTOCOL.md allows.

    Attributes:
        reason: stable word for metrics (``malformed``, ``trailing_bytes``, ``too_deep``, ``wrong_type``,
            ``out_of_range``, ``too_short``, ``family``, ``bad_array``, ``bad_extension``, ``version``).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def fail(reason: str, message: str) -> NoReturn:
    """Raises DecodeError."""
    raise DecodeError(reason, message)


def unpack(payload: bytes) -> Any:
    """The one value that ``payload`` holds; refuses other extension types than raw arrays, pickle among them."""

    def refuse_pickle(code: int, data: bytes) -> Any:
        if code != EXT_RAW:
            fail("bad_extension", f"extension type {code} is not allowed, only {EXT_RAW}")
        return msgpack.ExtType(code, data)

    try:
        return msgpack.unpackb(payload, raw=False, strict_map_key=False, ext_hook=refuse_pickle, timestamp=0)
    except msgpack.ExtraData as error:
        raise DecodeError("trailing_bytes", f"{len(error.extra)} bytes after the message") from None
    except DecodeError:
        raise
    except (ValueError, msgpack.UnpackException, TypeError, OverflowError) as error:
        raise DecodeError("malformed", f"not a MessagePack message: {error}") from None
    except RecursionError:
        raise DecodeError("too_deep", f"nested deeper than {MAX_DEPTH}") from None


def shallow(value: Any, depth: int = 4) -> Any:
    """Refuses an untyped value that nests beyond MAX_DEPTH (typed positions cannot); ``depth`` counts what is above."""
    if depth > MAX_DEPTH:
        fail("too_deep", f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            shallow(key, depth + 1)
            shallow(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            shallow(item, depth + 1)
    elif isinstance(value, msgpack.Timestamp):  # MessagePack's own extension type -1 never reaches the hook
        fail("bad_extension", f"extension type -1 is not allowed, only {EXT_RAW}")
    return value


def pack(value: Any, unicode_errors: str = "strict") -> bytes:
    """``value`` as MessagePack."""
    packed = msgpack.packb(value, use_bin_type=True, unicode_errors=unicode_errors)
    assert isinstance(packed, bytes)
    return packed


def read_array(value: Any, name: str, required: int) -> list[Any]:
    """An array of at least ``required`` elements."""
    if not isinstance(value, list):
        fail("wrong_type", f"{name} is no array")
    if len(value) < required:
        fail("too_short", f"{name} has {len(value)} elements, at least {required} are required")
    return value


def read_map(value: Any, name: str) -> dict[str, Any]:
    """A map whose keys are strings."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        fail("wrong_type", f"{name} is no map with string keys")
    return value


def read_text(value: Any, name: str) -> str:
    """A string."""
    if not isinstance(value, str):
        fail("wrong_type", f"{name} is no string")
    return value


def read_int(value: Any, name: str, low: int, high: int) -> int:
    """An integer (no boolean) from ``low`` to ``high``."""
    if not isinstance(value, int) or isinstance(value, bool):
        fail("wrong_type", f"{name} is no integer")
    if not low <= value <= high:
        fail("out_of_range", f"{name} is {value}, allowed are {low} to {high}")
    return value


def read_float(value: Any, name: str) -> float:
    """A float or an integer (no boolean), as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail("wrong_type", f"{name} is no number")
    return float(value)


def read_bool(value: Any, name: str) -> bool:
    """A boolean."""
    if not isinstance(value, bool):
        fail("wrong_type", f"{name} is no boolean")
    return value


def read_token_ids(value: Any, name: str) -> list[int]:
    """An array of unsigned 32-bit integers."""
    ids = read_array(value, name, 0)
    for token in ids:
        if type(token) is not int:
            fail("wrong_type", f"{name} holds a value that is no integer")
        if not 0 <= token <= U32:
            fail("out_of_range", f"{name} holds {token}, allowed are 0 to {U32}")
    return ids
