"""Models and engines that the tests of this room share; each model is made once a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.harness import Engine
from engine.models import CONFIGS, TinyModel, decisive_prompts, make_model
from support.gate import Gate

References = dict[tuple[int, ...], list[int]]
TOKENS = 12


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """A tiny random model by kind (a key of CONFIGS)."""
    made: dict[str, TinyModel] = {}

    def get(kind: str) -> TinyModel:
        if kind not in made:
            made[kind] = make_model(tmp_path_factory.mktemp("models") / kind, CONFIGS[kind]())
        return made[kind]

    return get


@pytest.fixture(scope="session")
def references(tiny: Callable[[str], TinyModel]) -> Callable[[str], References]:
    """Prompts and what transformers generates from them (12 tokens, greedy), by kind of model."""
    made: dict[str, References] = {}

    def get(kind: str) -> References:
        if kind not in made:
            made[kind] = decisive_prompts(tiny(kind), count=8, tokens=TOKENS)
        return made[kind]

    return get


@pytest.fixture
def llama(tiny: Callable[[str], TinyModel]) -> TinyModel:
    """The model for tests that need just some model."""
    return tiny("llama")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Other weights of the tiny Llama's shapes."""
    return make_model(tmp_path_factory.mktemp("other") / "llama", CONFIGS["llama"](), seed=99)


@pytest.fixture
def root(tmp_path: Path, llama: TinyModel, other: TinyModel) -> Path:
    """A weights root that holds the weights ``first`` and ``second``."""
    root = tmp_path / "root"
    shutil.copytree(llama.path, root / "first")
    shutil.copytree(other.path, root / "second")
    return root


@pytest.fixture
def before(references: Callable[[str], References]) -> References:
    """Prompts and their outputs under the first weights."""
    return references("llama")


@pytest.fixture(scope="session")
def after(other: TinyModel) -> References:
    """Prompts and their outputs under the second weights."""
    return decisive_prompts(other, count=4, tokens=TOKENS)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A sender in this process, known to engines as the transport ``gate``."""
    gate = Gate()
    gate.install(monkeypatch)
    return gate


@pytest.fixture
def engine(llama: TinyModel) -> Iterator[Engine]:
    """A fresh engine on the tiny Llama."""
    engine = Engine(llama)
    yield engine
    engine.core.abort_requests(list(engine.results))
    engine.run()  # going idle verifies the scheduler's invariants
