"""JSON as RFC 8259 has it and as the Rust frontend reads it: no NaN, no overflow, no lone surrogates, bounded depth."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from rollspan.errors import RollspanError

#: Arrays and objects may nest this deep.
MAX_DEPTH = 127

#: Integers of fewer digits fit into 64 bits; longer ones, and minus zero, need a closer look.
_ODD_INTEGER = re.compile(r"[0-9]{19}|-0(?![0-9.eE])")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Any:
    """Parses ``body`` as one JSON value.

    Integers outside 64 bits become floats, as they do for every reader without big integers, and so does minus zero.

    Raises:
        RollspanError: ``invalid_json`` with the parser's words.
    """
    try:
        text = body.decode("utf-8")
        parse_int = _parse_int if _ODD_INTEGER.search(text) else None
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_float, parse_int=parse_int)
        if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
            raise ValueError("recursion limit exceeded")
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise _invalid("recursion limit exceeded") from None
    except UnicodeDecodeError as error:
        raise _invalid(f"not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise _invalid("lone surrogate in a string") from None
    except ValueError as error:
        raise _invalid(str(error)) from None
    return value


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses ``body`` as a JSON object.

    Raises:
        RollspanError: ``invalid_json``, or ``invalid_request`` when the value is no object.
    """
    value = parse_json(body)
    if not isinstance(value, dict):
        raise RollspanError("request body must be a JSON object", reason="invalid_request")
    return value


def _invalid(words: str) -> RollspanError:
    return RollspanError(f"request body is not valid JSON: {words}", reason="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _parse_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


def _parse_int(text: str) -> int | float:
    if len(text) > 20 or text == "-0":
        return _parse_float(text)
    value = int(text)
    return value if -(2**63) <= value < 2**64 else float(value)


def _depth(value: Any) -> int:
    """Nesting depth of arrays and objects, counted level by level (no recursion)."""
    depth = 0
    level = [value]
    while level:
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
            else:
                continue
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            break
        depth += 1
        level = children
    return depth
