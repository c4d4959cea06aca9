"""What callers may say about a weight update."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollspan.config import WEIGHT_UPDATE_MODES
from rollspan.errors import RollspanError, cut, wrong_value
from rollspan.sampling_rules import is_int

_MAX_COMMIT = 2**53 - 1
_DIGEST = re.compile(r"blake3:[0-9a-f]{64}")


def _mapping(options: Any, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise wrong_value("options", f"an object of {', '.join(allowed)}", options)
    for key in options:
        if key not in allowed:
            text = f"options.{cut(str(key))} is not known here (known: {', '.join(allowed)})"
            raise RollspanError(text, reason="unsupported_field", param="options")
    return options


def start_mode(options: Any, default: str) -> str:
    """The mode that the options of ``start_weight_update`` ask for.

    Raises:
        RollspanError: ``invalid_request`` or ``unsupported_field``.
    """
    mode = _mapping(options, ("mode",)).get("mode")
    if mode is None:
        return default
    if mode not in WEIGHT_UPDATE_MODES:
        raise wrong_value("mode", " or ".join(WEIGHT_UPDATE_MODES), mode)
    return str(mode)


@dataclass(frozen=True)
class FinishOptions:
    """Options of ``prepare_weight_update`` and ``finish_weight_update``.

    Attributes:
        digest: that the weights must have; None for any.
        partial: weights that did not come stay as they are; None: only when a delta has come.
        commit: number of the commit; None for the next one.
    """

    digest: str | None
    partial: bool | None
    commit: int | None

    @classmethod
    def of(cls, options: Any) -> FinishOptions:
        """Reads the options.

        Raises:
            RollspanError: ``invalid_request`` or ``unsupported_field``.
        """
        found = _mapping(options, ("digest", "partial", "commit"))
        digest, partial, commit = (found.get(name) for name in ("digest", "partial", "commit"))
        if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise wrong_value("weight_digest", "blake3: and 64 lower-case hex digits", digest)
        if partial is not None and not isinstance(partial, bool):
            raise wrong_value("partial", "true or false", partial)
        if commit is not None and not is_int(commit, 1, _MAX_COMMIT):
            raise wrong_value("commit", f"an integer from 1 to {_MAX_COMMIT}", commit)
        return cls(digest, partial, commit)

    def check_next(self, present: int) -> None:
        """Refuses a number that does not come after the commit in force, ``present``.

        Raises:
            RollspanError: ``invalid_request``.
        """
        if self.commit is not None and self.commit <= present:
            raise wrong_value("commit", f"an integer above the present commit {present}", self.commit)
