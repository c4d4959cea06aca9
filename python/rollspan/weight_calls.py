"""What the arguments of weight calls become on the link; the synchronous and the asyncio API say them alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollspan.errors import check_label, wrong_value

MODES = ("staged", "in_place")


def info_args(name: str, info: Any) -> list[dict[str, Any]]:
    """``init_info`` or ``update_info``: an object, or a list with one such object, one for each engine.

    Raises:
        RollspanError: ``invalid_request`` naming it.
    """
    found = info[0] if isinstance(info, (list, tuple)) and len(info) == 1 else info
    if not isinstance(found, Mapping):
        raise wrong_value(name, "an object or a list of one object", info)
    return [dict(found)]


def start_args(mode: str | None) -> list[Any]:
    """Of ``start_weight_update``.

    Raises:
        RollspanError: ``invalid_request`` naming ``mode``.
    """
    if mode is not None and mode not in MODES:
        raise wrong_value("mode", " or ".join(MODES), mode)
    return _options(mode=mode)


def prepare_args(digest: str | None, partial: bool | None, commit: int | None) -> list[Any]:
    """Of ``prepare_weight_update``; the engine checks them."""
    return _options(digest=digest, partial=partial, commit=commit)


def finish_args(label: str | int | None, digest: str | None, partial: bool | None, commit: int | None) -> list[Any]:
    """Of ``finish_weight_update``; the engine checks the options.

    Raises:
        RollspanError: ``invalid_label``.
    """
    return [None if label is None else check_label(label), *prepare_args(digest, partial, commit)]


def _options(**options: Any) -> list[dict[str, Any]]:
    """Those that were given, as a last argument; none when there are none."""
    given = {name: value for name, value in options.items() if value is not None}
    return [given] if given else []
