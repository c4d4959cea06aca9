"""The weight calls of both APIs: the same methods of the engine, with the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from rollspan.async_weight_control import AsyncWeightControl
from rollspan.errors import RollspanError
from rollspan.weight_control import WeightControl

ANSWERS: dict[str, Any] = {
    "prepare_weight_update": {"weight_digest": "blake3:00"},
    "finish_weight_update": {"weight_version": "v", "weight_commit": 1, "weight_digest": "blake3:00"},
    "abort_weight_update": True,
    "get_weight_version": "v",
    "get_weight_commit": 1,
    "get_weight_digest": "blake3:00",
    "get_weight_history": {"state": "ready"},
    "check_weights": {"match": True, "mismatches": []},
    "is_sleeping": False,
}
#: Name of the call, its arguments, and what the engine is asked.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = [
    ("init_weight_transfer_engine", ({"backend": "shm"},), {}, ("init_weight_transfer_engine", {"backend": "shm"})),
    ("shutdown_weight_transfer_engine", (), {}, ("shutdown_weight_transfer_engine",)),
    ("start_weight_update", (), {}, ("start_weight_update",)),
    ("start_weight_update", ("in_place",), {}, ("start_weight_update", {"mode": "in_place"})),
    ("update_weights", ({"path": "/w"},), {}, ("update_weights", {"path": "/w"})),
    ("update_weights", ([{"path": "/w"}],), {}, ("update_weights", {"path": "/w"})),
    ("prepare_weight_update", (), {}, ("prepare_weight_update",)),
    ("prepare_weight_update", (), {"commit": 3}, ("prepare_weight_update", {"commit": 3})),
    ("finish_weight_update", (), {}, ("finish_weight_update", None)),
    ("finish_weight_update", (7,), {}, ("finish_weight_update", "7")),
    (
        "finish_weight_update",
        ("v",),
        {"digest": "blake3:00", "partial": False, "commit": 2},
        ("finish_weight_update", "v", {"digest": "blake3:00", "partial": False, "commit": 2}),
    ),
    ("abort_weight_update", (), {}, ("abort_weight_update",)),
    ("get_weight_version", (), {}, ("get_weight_version",)),
    ("get_weight_commit", (), {}, ("get_weight_commit",)),
    ("get_weight_digest", (), {}, ("get_weight_digest",)),
    ("get_weight_history", (), {}, ("get_weight_history",)),
    ("check_weights", (), {}, ("check_weights", "checksum")),
    ("check_weights", ("compare", {"w": "blake3:00"}), {}, ("check_weights", "compare", {"w": "blake3:00"})),
    ("update_weight_version", (8,), {}, ("set_weight_version", "8")),
    ("sleep", (), {}, ("sleep", 1, "abort")),
    ("sleep", (2,), {"mode": "keep"}, ("sleep", 2, "keep")),
    ("wake_up", (), {}, ("wake_up", None)),
    ("wake_up", (("weights",),), {}, ("wake_up", ["weights"])),
    ("is_sleeping", (), {}, ("is_sleeping",)),
]
REFUSED: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("init_weight_transfer_engine", ("shm",), "invalid_request", "init_info"),
    ("update_weights", ([{}, {}],), "invalid_request", "update_info"),
    ("start_weight_update", ("lazily",), "invalid_request", "mode"),
    ("finish_weight_update", ("",), "invalid_label", "weight_version"),
    ("update_weight_version", ("a\n",), "invalid_label", "new_version"),
]


class Recorded(WeightControl):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        return ANSWERS.get(method)


class AsyncRecorded(AsyncWeightControl):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def _call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        return ANSWERS.get(method)


def expected_result(name: str) -> Any:
    return {"prepare_weight_update": "blake3:00", "update_weight_version": "8"}.get(name, ANSWERS.get(name))


@pytest.mark.parametrize(("name", "args", "options", "asked"), CALLS)
async def test_a_call_is_the_engines_method(
    name: str, args: tuple[Any, ...], options: dict[str, Any], asked: tuple[Any, ...]
) -> None:
    recorded, asynchronous = Recorded(), AsyncRecorded()
    results = [
        getattr(recorded, name)(*args, **options),
        await getattr(asynchronous, name)(*args, **options),
    ]
    assert results == [expected_result(name)] * 2
    assert recorded.calls == asynchronous.calls == [asked]


@pytest.mark.parametrize(("name", "args", "reason", "param"), REFUSED)
async def test_what_cannot_be_is_refused_before_the_engine_is_asked(
    name: str, args: tuple[Any, ...], reason: str, param: str
) -> None:
    recorded, asynchronous = Recorded(), AsyncRecorded()
    with pytest.raises(RollspanError) as refusal:
        getattr(recorded, name)(*args)
    with pytest.raises(RollspanError) as other:
        await getattr(asynchronous, name)(*args)
    assert (refusal.value.reason, refusal.value.param) == (other.value.reason, other.value.param) == (reason, param)
    assert recorded.calls == asynchronous.calls == []


def test_both_apis_have_the_same_calls() -> None:
    def calls(owner: type) -> dict[str, Callable[..., Any]]:
        return {name: value for name, value in vars(owner).items() if inspect.isfunction(value)}

    mine, other = calls(WeightControl), calls(AsyncWeightControl)
    assert mine.keys() == other.keys()
    for name, function in mine.items():
        assert inspect.signature(function) == inspect.signature(other[name]), name
    assert {name for name, *_ in CALLS} == set(mine) - {"_call"}
