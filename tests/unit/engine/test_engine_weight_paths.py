"""Where weights may be read from: regular files under the weights root, whatever the path tries."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from engine.harness import Engine
from engine.models import TinyModel

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def root(tmp_path: Path, llama: TinyModel) -> Path:
    """A weights root that holds ``good``; the same weights lie outside in ``outside``."""
    shutil.copytree(llama.path, tmp_path / "root" / "good")
    shutil.copytree(llama.path, tmp_path / "outside")
    (tmp_path / "root" / "bad").mkdir()
    return tmp_path / "root"


@pytest.fixture
def engine(llama: TinyModel, root: Path) -> Engine:
    return Engine(llama, weights_root=str(root))


def refusal(engine: Engine, info: object, reason: str = "weights_invalid") -> str:
    engine.result_of("start_weight_update")
    found, message = engine.failure_of("update_weights", info)
    assert found == reason, message
    assert engine.failure_of("finish_weight_update")[0] == "no_update_active"
    assert engine.result_of("get_weight_commit") == 0
    return message


@pytest.mark.parametrize("form", ["good", "./good", "good/", "good/../good", "{root}/good", "link", "link/../good"])
def test_a_directory_under_the_root_is_read_however_it_is_written(engine: Engine, root: Path, form: str) -> None:
    (root / "link").symlink_to("good", target_is_directory=True)
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": form.format(root=root)})
    assert engine.result_of("finish_weight_update")["weight_commit"] == 1


def test_a_root_that_is_a_link_itself_is_followed(llama: TinyModel, root: Path) -> None:
    link = root.parent / "link-to-root"
    link.symlink_to(root)
    engine = Engine(llama, weights_root=str(link))
    for path in ("good", f"{link}/good", f"{root}/good"):
        engine.result_of("start_weight_update")
        engine.result_of("update_weights", {"path": path})
        engine.result_of("finish_weight_update")
    assert engine.result_of("get_weight_commit") == 3


def test_files_that_are_links_inside_the_root_are_read(engine: Engine, root: Path) -> None:
    (root / "bad" / WEIGHTS).symlink_to("../good/" + WEIGHTS)
    engine.result_of("start_weight_update")
    engine.result_of("update_weights", {"path": "bad"})
    assert engine.result_of("finish_weight_update")["weight_commit"] == 1


@pytest.mark.parametrize(
    "form", ["..", "../outside", "{root}/../outside", "{outside}", "/", "good/../../outside", "out"]
)
def test_a_directory_outside_the_root_is_refused(engine: Engine, root: Path, form: str) -> None:
    outside = root.parent / "outside"
    (root / "out").symlink_to(outside, target_is_directory=True)
    message = refusal(engine, {"path": form.format(root=root, outside=outside)})
    assert message.endswith(" is outside --weights-root")


def test_nothing_is_told_of_what_lies_outside_the_root(engine: Engine, root: Path) -> None:
    for path in ("/etc/passwd", "/no/such/file", "../outside/model.safetensors", "../nowhere"):
        assert refusal(engine, {"path": path}) == f'update_info.path "{path}" is outside --weights-root'


@pytest.mark.parametrize("target", ["../../outside/" + WEIGHTS, "/etc/passwd", "/dev/zero"])
@pytest.mark.parametrize("name", [WEIGHTS, "part.safetensors", INDEX])
def test_a_file_that_is_a_link_out_of_the_root_is_refused(engine: Engine, root: Path, name: str, target: str) -> None:
    (root / "bad" / name).symlink_to(target)
    message = refusal(engine, {"path": "bad"})
    if name == INDEX and target == "/dev/zero":
        assert "holds no safetensors files" in message  # an index is a regular file, or there is none
    else:
        assert "leads outside --weights-root" in message


@pytest.mark.parametrize("name", [WEIGHTS, "part.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "device", "broken link", "loop"])
def test_what_is_no_regular_file_is_refused_at_once(
    engine: Engine, root: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = root / "bad" / name
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as unix:
            monkeypatch.chdir(file.parent)  # the whole path is too long for a socket
            unix.bind(name)
    elif kind == "device":
        try:
            os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # the character device zero
        except PermissionError:
            pytest.skip("only root makes devices")
    elif kind == "broken link":
        file.symlink_to("nowhere")
    else:
        file.symlink_to(name)
    message = refusal(engine, {"path": "bad"})
    assert "is no regular file" in message or "holds no" in message


def test_an_index_that_is_a_fifo_is_not_waited_for(engine: Engine, root: Path) -> None:
    os.mkfifo(root / "bad" / INDEX)
    assert "holds no safetensors files" in refusal(engine, {"path": "bad"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", 'update_info.path "nowhere" cannot be found: FileNotFoundError'),
        ("good/model.safetensors", 'update_info.path "good/model.safetensors" is no directory'),
        ("bad", "holds no safetensors files"),
        ("", 'update_info.path must be the path of a directory of safetensors, got ""'),
        (7, "update_info.path must be the path of a directory of safetensors, got 7"),
        (["good"], 'update_info.path must be the path of a directory of safetensors, got ["good"]'),
        ("a\0b", "update_info.path must be the path of a directory of safetensors"),
        (None, "update_info.path is required"),
        ("x" * 5000, "cannot be found: OSError"),
    ],
    ids=range(9),
)
def test_a_path_that_is_none_is_refused_by_name(engine: Engine, path: object, message: str) -> None:
    assert message in refusal(engine, {"path": path})


@pytest.mark.parametrize("info", [None, 7, "good", [], [{}, {}], ["good"], [[{"path": "good"}]]])
def test_update_info_that_is_no_object_is_refused(engine: Engine, info: object) -> None:
    message = 'update_info must be an object such as {"path": DIR}, or a list with one such object'
    assert refusal(engine, info) == message


def test_an_object_without_a_path_is_refused(engine: Engine) -> None:
    assert refusal(engine, {}) == "update_info.path is required"


def test_fields_of_other_transports_are_refused_by_name_unless_null(engine: Engine) -> None:
    message = refusal(engine, {"path": "good", "names": ["a"]}, "unsupported_field")
    assert message == 'update_info.names is not known here (known: path): leave it out, got ["a"]'
    engine.result_of("start_weight_update")
    assert engine.result_of("update_weights", {"path": "good", "names": None}) is None


def test_no_path_is_read_without_a_root(llama: TinyModel) -> None:
    message = refusal(Engine(llama), {"path": str(llama.path)})
    assert message == "weight updates from disk are off: start the server with --weights-root DIR"


def test_a_root_that_has_vanished_is_reported(engine: Engine, root: Path) -> None:
    shutil.rmtree(root)
    assert "cannot be found: FileNotFoundError" in refusal(engine, {"path": "good"})


def test_a_broken_file_whose_name_is_not_utf_8_is_reported_all_the_same(engine: Engine, root: Path) -> None:
    file = os.fsencode(root / "bad") + b"/part\xff.safetensors"
    with open(file, "wb") as stream:  # noqa: PTH123 (pathlib takes no bytes)
        stream.write(b"junk")
    assert "cannot be read as safetensors" in refusal(engine, {"path": "bad"})
