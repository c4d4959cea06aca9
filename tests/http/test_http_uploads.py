"""Uploads of weights: pieces in any order, over broken connections, within bounds, until the engine has read them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from blake3 import blake3
from frontend_process import error_of, wait_until
from real_server import WEIGHTS_FILE, RealServer
from scripted_frontend import Mocked, MockFactory

from rollspan.models.task import Problem

FILE = "/weight_uploads/u1/model.safetensors"
PIECE = 1 << 20


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    path = tmp_path / "spool"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def spooled(mocks: MockFactory, spool: Path) -> Mocked:
    """A scripted engine behind a frontend that takes uploads."""
    return mocks.start("--weights-spool", str(spool))


def put(
    mock: Mocked,
    content: bytes,
    start: int | None = None,
    total: int | None = None,
    path: str = FILE,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    """Puts a whole file, or with ``start`` and ``total`` a range."""
    ranged = {} if start is None else {"Content-Range": f"bytes {start}-{start + len(content) - 1}/{total}"}
    return mock.frontend.http.put(path, content=content, headers={**ranged, **(headers or {})})


def checksum(content: bytes) -> dict[str, str]:
    return {"X-Checksum": f"blake3:{blake3(content).hexdigest()}"}


def received(mock: Mocked, upload: str = "u1", name: str = "model.safetensors") -> list[list[int]]:
    """What is there of a file; none when the upload does not exist."""
    answer = mock.frontend.get(f"/weight_uploads/{upload}")
    if answer.status_code == 404:
        return []
    ranges: list[list[int]] = answer.json()["files"][name]["received"]
    return ranges


def begun(mock: Mocked, headers: str, content: bytes, path: str = FILE) -> socket.socket:
    """A connection on which the head of a PUT and some of its body were sent."""
    connection = mock.frontend.connect()
    connection.sendall(f"PUT {path} HTTP/1.1\r\nHost: test\r\n{headers}\r\n\r\n".encode() + content)
    return connection


def test_pieces_come_in_any_order_and_the_last_one_makes_the_file(spooled: Mocked, spool: Path) -> None:
    answer = put(spooled, b"world", 6, 11)
    assert answer.status_code == 200
    assert answer.json() == {"upload": "u1", "file": "model.safetensors", "received": [[6, 11]], "total": 11}
    assert put(spooled, b"hello", 0, 11).json()["received"] == [[0, 5], [6, 11]]
    assert [path.name for path in (spool / "u1").iterdir()] == ["model.safetensors.part"]
    assert put(spooled, b" ", 5, 11, headers=checksum(b" ")).json()["received"] == [[0, 11]]
    (file,) = (spool / "u1").iterdir()
    assert (file.name, file.read_bytes()) == ("model.safetensors", b"hello world")
    assert ((spool / "u1").stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    put(spooled, b"ab", path="/weight_uploads/u1/a.safetensors")
    assert spooled.frontend.get("/weight_uploads/u1").json() == {
        "upload": "u1",
        "files": {
            "a.safetensors": {"received": [[0, 2]], "total": 2},
            "model.safetensors": {"received": [[0, 11]], "total": 11},
        },
    }


def test_what_comes_again_is_written_over(spooled: Mocked, spool: Path) -> None:
    put(spooled, b"hello world")
    assert put(spooled, b"W", 6, 11).json()["received"] == [[0, 11]]
    assert (spool / "u1" / "model.safetensors").read_bytes() == b"hello World"
    answer = put(spooled, b"other").json()
    assert (answer["received"], answer["total"]) == ([[0, 5]], 5)
    assert (spool / "u1" / "model.safetensors").read_bytes() == b"other"


def test_a_wrong_checksum_records_nothing(spooled: Mocked, spool: Path) -> None:
    answer = put(spooled, b"hello", 0, 11, headers=checksum(b"hellO"))
    message = error_of(answer, 400, "checksum_mismatch", "X-Checksum")
    found, expected = blake3(b"hello").hexdigest(), blake3(b"hellO").hexdigest()
    assert message == f"model.safetensors: the body's digest is blake3:{found}, X-Checksum says blake3:{expected}"
    assert received(spooled) == []
    assert list(spool.iterdir()) == []
    put(spooled, b" world", 5, 11)
    error_of(put(spooled, b"hello", 0, 11, headers=checksum(b"hellO")), 400, "checksum_mismatch", "X-Checksum")
    assert received(spooled) == [[5, 11]]
    assert put(spooled, b"hello", 0, 11, headers=checksum(b"hello")).json()["received"] == [[0, 11]]


def test_a_broken_connection_leaves_its_bytes_missing_and_all_others_there(spooled: Mocked, spool: Path) -> None:
    first, second = b"a" * PIECE, b"b" * PIECE
    total = 2 * PIECE
    put(spooled, first + first)
    headers = f"Content-Length: {PIECE}\r\nContent-Range: bytes {PIECE}-{total - 1}/{total}"
    with begun(spooled, headers, second[: PIECE // 2]):
        wait_until(lambda: received(spooled) == [[0, PIECE]], "the second half is being received again")
        refused = put(spooled, b"b", PIECE, total)
        message = error_of(refused, 409, "upload_incomplete", "Content-Range")
        assert message == "model.safetensors: another request is writing to the same bytes"
    wait_until(lambda: put(spooled, second, PIECE, total).status_code == 200, "the bytes are free again")
    assert received(spooled) == [[0, total]]
    assert (spool / "u1" / "model.safetensors").read_bytes() == first + second


def test_a_whole_file_waits_for_those_who_write_behind_its_end(spooled: Mocked, spool: Path) -> None:
    put(spooled, b"abcdefgh")
    with begun(spooled, "Content-Length: 4\r\nContent-Range: bytes 4-7/8", b"EF") as connection:
        wait_until(lambda: received(spooled) == [[0, 4]], "the second half is being received again")
        error_of(put(spooled, b"ab"), 409, "upload_incomplete", "Content-Range")
        connection.sendall(b"GH")
        assert b" 200 " in connection.recv(PIECE)
    assert (spool / "u1" / "model.safetensors").read_bytes() == b"abcdEFGH"
    assert put(spooled, b"ab").status_code == 200
    assert (spool / "u1" / "model.safetensors").read_bytes() == b"ab"


def test_bytes_go_to_the_disk_while_others_still_come(spooled: Mocked, spool: Path) -> None:
    headers = f"Content-Length: {64 * PIECE}\r\nContent-Range: bytes 0-{64 * PIECE - 1}/{64 * PIECE}"
    part = spool / "u1" / "model.safetensors.part"
    with begun(spooled, headers, b"x" * (8 * PIECE)):
        wait_until(lambda: part.exists() and part.stat().st_size >= 4 * PIECE, "4 of 8 MiB are on the disk")
        assert received(spooled) == []
    wait_until(lambda: list(spool.iterdir()) == [], "nothing is left of it")


def test_a_file_of_unknown_size_comes_in_chunks(spooled: Mocked, spool: Path) -> None:
    content = bytes(range(256)) * 12_000
    pieces = (content[start : start + 100_000] for start in range(0, len(content), 100_000))
    answer = spooled.frontend.http.put(FILE, content=pieces, headers=checksum(content))
    assert answer.json()["total"] == len(content)
    assert (spool / "u1" / "model.safetensors").read_bytes() == content


def test_all_uploads_together_have_a_bound(mocks: MockFactory, spool: Path) -> None:
    mock = mocks.start("--weights-spool", str(spool), "--max-weight-upload-bytes", "12")
    assert put(mock, b"hello", 0, 10).status_code == 200
    other = "/weight_uploads/u2/a.safetensors"
    message = error_of(put(mock, b"abc", path=other), 413, "body_too_large")
    assert message == "all weight uploads together must be at most 12 bytes, 10 are announced"
    error_of(mock.frontend.http.put(other, content=iter([b"ab", b"c"])), 413, "body_too_large")
    assert put(mock, b"ab", path=other).status_code == 200
    assert put(mock, b"0123456789").status_code == 200
    assert mock.frontend.http.delete("/weight_uploads/u2").json() == {"status": "deleted"}
    assert put(mock, b"ab", path="/weight_uploads/u3/a.safetensors").status_code == 200


def test_uploads_may_take_two_models_by_default(mocks: MockFactory, spool: Path) -> None:
    mock = mocks.start("--weights-spool", str(spool), model={"num_parameters": 1000})
    most = 2 * 4 * 1000 + 64 * 1024 * 1024
    assert put(mock, b"x", 0, most).status_code == 200
    message = error_of(put(mock, b"x", 0, 1, path="/weight_uploads/u2/a.safetensors"), 413, "body_too_large")
    assert str(most) in message


@pytest.mark.parametrize(
    ("path", "headers", "param"),
    [
        ("/weight_uploads/.u/a.safetensors", {}, "upload"),
        ("/weight_uploads/%2e%2e/a.safetensors", {}, "upload"),
        (f"/weight_uploads/{'u' * 129}/a.safetensors", {}, "upload"),
        ("/weight_uploads/a%20b/a.safetensors", {}, "upload"),
        ("/weight_uploads/a%2Fb/a.safetensors", {}, "upload"),
        ("/weight_uploads/u/..%2f..%2fa.safetensors", {}, "file"),
        ("/weight_uploads/u/model.bin", {}, "file"),
        ("/weight_uploads/u/.safetensors", {}, "file"),
        ("/weight_uploads/u/model.safetensors.part", {}, "file"),
        (FILE, {"Content-Range": "bytes 0-4/4"}, "Content-Range"),
        (FILE, {"Content-Range": "bytes 0-3/4"}, "Content-Range"),
        (FILE, {"Content-Range": "bytes 4-0/9"}, "Content-Range"),
        (FILE, {"Content-Range": "bytes */9"}, "Content-Range"),
        (FILE, {"X-Checksum": "sha256:00"}, "X-Checksum"),
        (FILE, {"X-Checksum": b"blake3:\xc3\xa9\xff"}, "X-Checksum"),
        (FILE, {"X-Checksum": "blake3:" + "AA" * 32}, "X-Checksum"),
    ],
)
def test_names_ranges_and_checksums_out_of_bounds_are_refused(
    spooled: Mocked, spool: Path, answers_of_both: dict[str, Any], path: str, headers: dict[str, str], param: str
) -> None:
    message = error_of(put(spooled, b"hello", path=path, headers=headers), 400, "invalid_request", param)
    assert list(spool.iterdir()) == []
    assert answers_of_both.setdefault(f"{path} {headers}", message) == message


@pytest.fixture(scope="session")
def answers_of_both() -> dict[str, Any]:
    """What the frontend that was tested first answered."""
    return {}


def test_an_encoded_slash_is_part_of_a_name(spooled: Mocked, spool: Path) -> None:
    path = "/weight_uploads/u1%2Fmodel.safetensors"
    error_of(put(spooled, b"hello", path=path), 405, "method_not_allowed")
    error_of(spooled.frontend.get(path), 400, "invalid_request", "upload")
    error_of(spooled.frontend.http.delete(path), 400, "invalid_request", "upload")
    assert list(spool.iterdir()) == []


def test_a_file_keeps_the_size_that_was_said_first(spooled: Mocked) -> None:
    put(spooled, b"hello", 0, 11)
    message = error_of(put(spooled, b"world", 5, 10), 400, "invalid_request", "Content-Range")
    assert message == "Content-Range must say the same total as before (11), got 10"
    assert received(spooled) == [[0, 5]]


def test_the_engine_reads_an_upload_once_it_is_complete_and_then_it_is_gone(
    spooled: Mocked, spool: Path, pool: ThreadPoolExecutor
) -> None:
    body = {"update_info": {"backend": "http", "upload": "u1"}}
    param = "update_info.upload"
    error_of(spooled.frontend.post("/update_weights", body), 409, "upload_incomplete", param)
    put(spooled, b"hello", 0, 11)
    message = error_of(spooled.frontend.post("/update_weights", body), 409, "upload_incomplete", param)
    assert message == "upload u1 is incomplete: model.safetensors lacks bytes 5 to 10 of 11"
    put(spooled, b" world", 5, 11)
    answer = pool.submit(spooled.frontend.post, "/update_weights", body)
    call = spooled.engine.next_call("update_weights")
    assert call.args == [body["update_info"]]
    error_of(put(spooled, b"W", 6, 11), 409, "update_active")
    error_of(spooled.frontend.http.delete("/weight_uploads/u1"), 409, "update_active")
    assert (spool / "u1" / "model.safetensors").read_bytes() == b"hello world"
    spooled.engine.reply(call)
    assert answer.result().json() == {"message": "Weights updated"}
    assert list(spool.iterdir()) == []
    error_of(spooled.frontend.get("/weight_uploads/u1"), 404, "not_found", "upload")


def test_an_update_that_is_sent_again_while_it_reads_succeeds_twice(
    spooled: Mocked, spool: Path, pool: ThreadPoolExecutor
) -> None:
    put(spooled, b"hello")
    answers, calls = [], []
    for _ in range(2):
        answers.append(pool.submit(spooled.frontend.post, "/update_weights", {"update_info": {"upload": "u1"}}))
        calls.append(spooled.engine.next_call("update_weights"))
    for answer, call in zip(answers, calls, strict=True):
        assert list(spool.iterdir()) != []
        spooled.engine.reply(call)
        assert answer.result().json() == {"message": "Weights updated"}
    assert list(spool.iterdir()) == []


def test_a_failed_update_leaves_its_upload(spooled: Mocked, spool: Path, pool: ThreadPoolExecutor) -> None:
    put(spooled, b"hello")
    for lost in (False, True):
        answer = pool.submit(spooled.frontend.post, "/update_weights", {"update_info": {"upload": "u1"}})
        call = spooled.engine.next_call("update_weights")
        if lost:  # as by an engine that has used the file up before it failed
            (spool / "u1" / "model.safetensors").unlink()
        spooled.engine.refuse(call, "no", "weights_invalid")
        error_of(answer.result(), 400, "weights_invalid")
        assert received(spooled) == ([] if lost else [[0, 5]])
    refused = spooled.frontend.post("/update_weights", {"update_info": {"upload": "u1"}})
    error_of(refused, 409, "upload_incomplete", "update_info.upload")
    assert put(spooled, b"he", 0, 5).json()["received"] == [[0, 2]]


def test_an_upload_that_nobody_touches_is_deleted(mocks: MockFactory, spool: Path) -> None:
    mock = mocks.start("--weights-spool", str(spool), "--weight-update-timeout", "0.2")
    assert put(mock, b"hello", 0, 11).status_code == 200
    wait_until(lambda: list(spool.iterdir()) == [], "it is deleted")
    error_of(mock.frontend.get("/weight_uploads/u1"), 404, "not_found", "upload")


@pytest.mark.parametrize("orphaned", [False, True])
def test_a_frontend_that_stops_leaves_nothing_behind(spooled: Mocked, spool: Path, orphaned: bool) -> None:
    put(spooled, b"hello", 0, 11)
    if orphaned:  # whoever has started it was killed
        assert spooled.frontend.process.stdin is not None
        spooled.frontend.process.stdin.close()
        assert spooled.frontend.wait() == 0
    else:
        assert spooled.frontend.terminate() == 0
    assert list(spool.iterdir()) == []


def test_uploaded_weights_are_those_that_generate(restored: RealServer) -> None:
    server = restored
    http = server.frontend.http
    content = (server.engine.weights_root / "zero" / WEIGHTS_FILE).read_bytes()
    size = len(content) // 3
    for start in range(0, len(content), size):
        piece = content[start : start + size]
        headers = {"Content-Range": f"bytes {start}-{start + len(piece) - 1}/{len(content)}", **checksum(piece)}
        assert http.put(FILE, content=piece, headers=headers).status_code == 200
    assert server.frontend.post("/start_weight_update").status_code == 200
    answer = server.frontend.post("/update_weights", {"update_info": {"backend": "http", "upload": "u1"}})
    assert answer.json() == {"message": "Weights updated"}
    answer = server.frontend.post("/finish_weight_update", {"weight_version": "uploaded"})
    assert answer.json()["weight_version"] == "uploaded"
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
    choice = server.frontend.generate(Problem(12, 34).prompt_ids, sampling_params=params).json()["choices"][0]
    assert choice["token_ids"] == [0] * 6
    assert choice["weight_versions"] == [{"version": "uploaded", "start": 0, "end": 6}]
    assert not (server.engine.spool / "u1").exists()
