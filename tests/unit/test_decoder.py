"""Which decoder the client side takes."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import rollspan
from rollspan.protocol import codec
from rollspan.protocol.decoder import choose_decoder


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands in for the extension module."""
    module = ModuleType("rollspan._native")
    module.__version__ = rollspan.__version__  # type: ignore[attr-defined]
    module.decode_outputs = object()  # type: ignore[attr-defined]
    monkeypatch.delenv("ROLLSPAN_PURE_PYTHON", raising=False)
    monkeypatch.setitem(sys.modules, "rollspan._native", module)
    monkeypatch.setattr(rollspan, "_native", module, raising=False)
    return module


def test_the_extension_module_decodes_where_it_is_there(native: ModuleType) -> None:
    assert choose_decoder() is native.decode_outputs


def test_an_extension_module_of_another_version_does_not_decode(native: ModuleType) -> None:
    native.__version__ = "0.0.0"  # type: ignore[attr-defined]
    assert choose_decoder() is codec.decode_outputs


def test_python_decodes_where_the_extension_module_is_not_wanted(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSPAN_PURE_PYTHON", "1")
    assert choose_decoder() is codec.decode_outputs


def test_python_decodes_where_there_is_no_extension_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLSPAN_PURE_PYTHON", raising=False)
    monkeypatch.delattr(rollspan, "_native", raising=False)
    monkeypatch.setitem(sys.modules, "rollspan._native", None)
    assert choose_decoder() is codec.decode_outputs
