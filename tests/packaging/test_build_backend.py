"""The build backend's own decisions; what it builds is in test_packaging."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from unittest.mock import Mock

import pytest

from support.installation import PROJECT


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    spec = importlib.util.spec_from_file_location("backend", PROJECT / "python" / "_build" / "backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("hook", "settings", "environment", "profile"),
    [
        ("build_wheel", None, None, "release"),
        ("build_editable", None, None, "dev"),
        ("build_wheel", None, "dev", "dev"),
        ("build_editable", {}, "release", "release"),
        ("build_wheel", {"profile": "debug"}, "release", "dev"),
        ("build_editable", {"profile": "release"}, "dev", "release"),
    ],
)
def test_the_profile_is_the_most_specific_one_that_was_given(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    settings: dict[str, str] | None,
    environment: str | None,
    profile: str,
) -> None:
    stage = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(backend, "_stage_binary", stage)
    monkeypatch.delenv("ROLLSPAN_BUILD_PROFILE", raising=False)
    if environment is not None:
        monkeypatch.setenv("ROLLSPAN_BUILD_PROFILE", environment)
    with pytest.raises(InterruptedError):
        getattr(backend, hook)("dist", settings)
    stage.assert_called_once_with(profile)


def test_a_machine_without_rust_is_told_so(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match="cargo is not on PATH: install a Rust toolchain"):
        backend.build_wheel("dist")


def test_nothing_is_downloaded_in_place_of_a_missing_toolchain(backend: ModuleType) -> None:
    assert backend.get_requires_for_build_wheel() == backend.get_requires_for_build_sdist() == []
