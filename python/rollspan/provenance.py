"""Provenance: what a request asks about the weights and the KV behind its output, validated on construction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollspan.errors import wrong_value
from rollspan.sampling_rules import MAX_INT64, is_int, is_number

_COUNT = "an integer of at least 0"
_BOOLEAN: tuple[str, Callable[[Any], bool]] = ("true or false", lambda value: isinstance(value, bool))
#: What each field may be, in the words that both frontends use.
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "min_weight_commit": (_COUNT, lambda value: is_int(value, 0, MAX_INT64)),
    "weight_wait_s": ("a number of at least 0", lambda value: is_number(value) and value >= 0),
    "max_weight_lag": (_COUNT, lambda value: value is None or is_int(value, 0, MAX_INT64)),
    "return_kv_versions": _BOOLEAN,
    "allow_stale_prefix": _BOOLEAN,
}


@dataclass(frozen=True)
class Provenance:
    """Bounds on the weights that may sample an output, and what is told about its KV.

    Attributes:
        min_weight_commit: refuse to run under an older commit.
        weight_wait_s: seconds that the request may wait for an open update to bring that commit.
        max_weight_lag: end the output, with ``abort`` and stop reason ``stale_weights``, once the commit in force is
            more than so many ahead of that of its first token; None for never.
        return_kv_versions: tell which weights computed the keys and values that tokens attended to.
        allow_stale_prefix: the prompt may use KV that earlier commits have cached.

    Raises:
        RollspanError: ``invalid_request`` naming the field and what is allowed.
    """

    min_weight_commit: int = 0
    weight_wait_s: float = 0.0
    max_weight_lag: int | None = None
    return_kv_versions: bool = False
    allow_stale_prefix: bool = False

    def __post_init__(self) -> None:
        for name, (allowed, check) in RULES.items():
            value = getattr(self, name)
            if not check(value):
                raise wrong_value(name, allowed, value)

    def to_wire(self) -> dict[str, Any] | None:
        """The sparse map of EngineCoreRequest: the keys that differ from their default, None where none does."""
        fields = {name: getattr(self, name) for name in RULES}
        return {name: value for name, value in fields.items() if value != getattr(NO_PROVENANCE, name)} or None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Provenance:
        """Reads them from a map that may hold other keys too; absent keys take their default.

        Raises:
            RollspanError: ``invalid_request`` naming the field and what is allowed.
        """
        return cls(**{name: fields[name] for name in RULES if name in fields})


#: What asks for nothing.
NO_PROVENANCE = Provenance()
