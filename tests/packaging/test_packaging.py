"""What an install consists of, and that it works away from the checkout."""

from __future__ import annotations

import re
import signal
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest

from support.installation import PROJECT, Installed
from support.serve import END_SECONDS, Serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def version() -> str:
    found = re.search(r'^version = "(.+)"', (PROJECT / "Cargo.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_the_source_archive_holds_sources_only(sdist: Path) -> None:
    assert sdist.name == f"rollspan-{version()}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"PKG-INFO", "Cargo.lock", "LICENSE", "python/_build/backend.py", "rust/server/src/main.rs"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or "target/" in name]


def test_the_wheel_holds_the_package_the_module_and_the_binary(wheel: Path) -> None:
    assert re.fullmatch(rf"rollspan-{re.escape(version())}-cp310-abi3-\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert f"rollspan-{version()}.data/scripts/rollspan-http" in names
    assert {"rollspan/_native.abi3.so", "rollspan/py.typed"} <= names
    for model in ("add2-sft", "add2-rl"):
        assert {f"rollspan/models/{model}/{file}" for file in ("model.safetensors", "tokenizer.json")} <= names
    roots = {name.partition("/")[0] for name in names}
    assert roots == {"rollspan", f"rollspan-{version()}.dist-info", f"rollspan-{version()}.data"}


def test_all_parts_have_the_version_of_the_cargo_workspace(installed: Installed) -> None:
    program = "import rollspan, rollspan._native as n; print(rollspan.__version__, n.__version__, rollspan.__file__)"
    package, native, file = installed.run(installed.python, "-c", program).split()
    assert Path(file).is_relative_to(installed.directory)
    assert (package, native) == (version(), version())
    assert installed.run(installed.scripts / "rollspan", "--version") == f"rollspan {version()}\n"
    assert installed.run(installed.scripts / "rollspan-http", "--version") == f"rollspan-http {version()}\n"


def answer(installed: Installed, temporary: Path, *arguments: str, **environment: str) -> tuple[str, str]:
    """Serves the embedded model, asks for one rollout, and stops; returns the frontend's kind and the log."""
    command = [str(installed.scripts / "rollspan")]
    server = Serve(temporary, command, {**installed.environment, **environment}, ["--port", "0", *arguments])
    try:
        server.wait_until_ready()
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
        response = httpx.post(server.url + "/inference/v1/generate", json=body, timeout=END_SECONDS)
        (choice,) = response.raise_for_status().json()["choices"]
        assert len(choice["token_ids"]) == 4
        assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
        facts = httpx.get(server.url + "/version", timeout=END_SECONDS).json()
        assert facts["version"] == version()
        server.process.send_signal(signal.SIGTERM)
        code, _ = server.end()
        assert code == 0
        return facts["frontend"], server.errors.read_text()
    finally:
        server.close()


def test_an_install_serves_through_its_binary(installed: Installed, temporary: Path) -> None:
    kind, log = answer(installed, temporary)
    assert kind == "rust"
    assert f"rollspan: frontend: rust ({installed.scripts / 'rollspan-http'})" in log


def test_an_install_serves_in_pure_python_when_told_to(installed: Installed, temporary: Path) -> None:
    kind, log = answer(installed, temporary, ROLLSPAN_PURE_PYTHON="1")
    assert kind == "python"
    assert "rollspan: frontend: python (ROLLSPAN_PURE_PYTHON=1)" in log


def test_an_install_without_anything_compiled_serves(installed_without_rust: Installed, temporary: Path) -> None:
    kind, log = answer(installed_without_rust, temporary)
    assert kind == "python"
    assert f"rollspan: frontend: python (rollspan-http not found in {installed_without_rust.scripts}, " in log


def test_an_install_without_anything_compiled_gives_the_api(installed_without_rust: Installed) -> None:
    program = "import rollspan; [getattr(rollspan, name) for name in rollspan.__all__]; print('ok')"
    assert installed_without_rust.run(installed_without_rust.python, "-W", "error", "-c", program) == "ok\n"


def test_a_missing_binary_that_was_asked_for_is_an_error(installed_without_rust: Installed, temporary: Path) -> None:
    command = [str(installed_without_rust.scripts / "rollspan")]
    server = Serve(temporary, command, installed_without_rust.environment, ["--frontend", "rust"])
    try:
        code, lines = server.end()
    finally:
        server.close()
    assert code == 1
    assert lines[-1].startswith("rollspan: error: no Rust frontend: rollspan-http not found in ")


def test_both_frontends_take_the_same_flags(installed: Installed) -> None:
    rust = installed.run(installed.scripts / "rollspan-http", "--help")
    python = installed.run(installed.python, "-m", "rollspan.frontend", "--help")
    flags = [set(re.findall(r"--[a-z][a-z-]+", text)) - {"--version", "--help"} for text in (rust, python)]
    assert flags[0] == flags[1]
