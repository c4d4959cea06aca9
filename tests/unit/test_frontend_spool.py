"""Uploads on disk: what counts as received, what a failure leaves, and what goes away by itself."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from rollspan.errors import RollspanError
from rollspan.frontend import upload_chunk
from rollspan.frontend.spool import Spool
from rollspan.frontend.upload_chunk import UploadChunk

FILE = "model.safetensors"
LIMIT = 1000


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path, LIMIT, idle_seconds=60.0)


async def send(
    spool: Spool, data: bytes, span: tuple[int, int, int] | None = None, *, name: str = FILE, **options: Any
) -> dict[str, Any]:
    """One chunk of upload ``u``, in pieces of three bytes."""
    length = options.pop("length", len(data))
    with UploadChunk(spool, "u", name, span, length, options.pop("checksum", None)) as chunk:
        for start in range(0, len(data), 3):
            await chunk.write(data[start : start + 3])
        await chunk.finish()
    return chunk.file.to_json()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def refused(spool: Spool, reason: str, data: bytes, span: Any = None, **options: Any) -> RollspanError:
    with pytest.raises(RollspanError) as refusal:
        await send(spool, data, span, **options)
    assert refusal.value.reason == reason
    return refusal.value


async def test_pieces_in_any_order_become_the_file(spool: Spool, tmp_path: Path) -> None:
    data = bytes(range(100))
    assert await send(spool, data[60:], (60, 100, 100)) == {"received": [[60, 100]], "total": 100}
    assert not (tmp_path / "u" / FILE).exists()
    with pytest.raises(RollspanError) as refusal, spool.reading("u"):
        pass
    assert refusal.value.reason == "upload_incomplete"
    assert refusal.value.message == f"upload u is incomplete: {FILE} lacks bytes 0 to 59 of 100"
    await send(spool, data[:50], (0, 50, 100), checksum=blake3(data[:50]).hexdigest())
    assert await send(spool, data[40:60], (40, 60, 100)) == {"received": [[0, 100]], "total": 100}
    assert (tmp_path / "u" / FILE).read_bytes() == data
    with spool.reading("u"):
        assert (await refused(spool, "update_active", b"x", (0, 1, 100))).status == 409
        with pytest.raises(RollspanError, match="is being read"):
            await spool.delete("u")


async def test_large_pieces_are_written_as_they_come(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_chunk, "WRITE_BYTES", 16)
    data = bytes(range(200))
    with UploadChunk(spool, "u", FILE, None, 200, blake3(data).hexdigest()) as chunk:
        await chunk.write(data[:100])
        assert (tmp_path / "u" / f"{FILE}.part").read_bytes() == data[:100]
        await chunk.write(data[100:])
        await chunk.finish()
    assert (tmp_path / "u" / FILE).read_bytes() == data


async def test_a_wrong_chunk_records_nothing(spool: Spool, tmp_path: Path) -> None:
    error = await refused(spool, "checksum_mismatch", b"abc", (0, 3, 6), checksum="0" * 64)
    assert error.param == "X-Checksum"
    assert names(tmp_path) == []
    with pytest.raises(RollspanError, match="upload u does not exist"):
        spool.find("u")
    await send(spool, b"def", (3, 6, 6))
    await refused(spool, "checksum_mismatch", b"abc", (0, 3, 6), checksum="0" * 64)
    await refused(spool, "invalid_request", b"ab", (0, 3, 6), length=None)
    await refused(spool, "invalid_request", b"abcd", (0, 3, 6), length=None)
    await refused(spool, "invalid_request", b"abcd", (0, 3, 6))
    await refused(spool, "invalid_request", b"abc", (0, 3, 7))
    assert spool.find("u").files[FILE].to_json() == {"received": [[3, 6]], "total": 6}


async def test_a_chunk_that_breaks_off_over_good_bytes_takes_them_back(spool: Spool, tmp_path: Path) -> None:
    await send(spool, b"abcdef", (0, 6, 6))
    with UploadChunk(spool, "u", FILE, (2, 4, 6), None, None) as chunk:
        await chunk.write(b"X")
    assert spool.find("u").files[FILE].to_json() == {"received": [[0, 2], [4, 6]], "total": 6}
    assert names(tmp_path / "u") == [f"{FILE}.part"]
    assert await send(spool, b"cd", (2, 4, 6)) == {"received": [[0, 6]], "total": 6}
    assert (tmp_path / "u" / FILE).read_bytes() == b"abcdef"


async def test_two_requests_never_write_to_the_same_bytes(spool: Spool) -> None:
    with UploadChunk(spool, "u", FILE, (0, 4, 8), None, None) as first:
        await refused(spool, "upload_incomplete", b"x", (3, 5, 8), length=None)
        await refused(spool, "upload_incomplete", b"x", None)
        await send(spool, b"efgh", (4, 8, 8))
        await first.write(b"abcd")
        await first.finish()
    assert spool.find("u").files[FILE].received.to_list() == [[0, 8]]


async def test_a_whole_file_waits_for_those_who_write_behind_its_end(spool: Spool, tmp_path: Path) -> None:
    with UploadChunk(spool, "u", FILE, (4, 8, 8), None, None) as behind:
        await behind.write(b"ef")
        await refused(spool, "upload_incomplete", b"ab")
        await behind.write(b"gh")
        await behind.finish()
    assert await send(spool, b"ab") == {"received": [[0, 2]], "total": 2}
    assert (tmp_path / "u" / FILE).read_bytes() == b"ab"


async def test_a_whole_file_replaces_the_one_before(spool: Spool, tmp_path: Path) -> None:
    await send(spool, b"first, and longer")
    assert await send(spool, b"second", length=None) == {"received": [[0, 6]], "total": 6}
    assert (tmp_path / "u" / FILE).read_bytes() == b"second"


async def test_all_uploads_together_are_bounded(spool: Spool, tmp_path: Path) -> None:
    await send(spool, b"x", (0, 1, 900))
    error = await refused(spool, "body_too_large", b"x", (0, 1, 101), name="b.safetensors")
    assert error.message == "all weight uploads together must be at most 1000 bytes, 900 are announced"
    await refused(spool, "body_too_large", b"x" * 101, length=None, name="b.safetensors")
    assert names(tmp_path / "u") == [f"{FILE}.part"]
    await send(spool, b"x", (0, 1, 100), name="b.safetensors")


@pytest.mark.parametrize(
    "name", ["../a.safetensors", ".a.safetensors", "a.bin", "a/b.safetensors", "", "ä.safetensors"]
)
async def test_a_file_has_a_plain_name(spool: Spool, tmp_path: Path, name: str) -> None:
    error = await refused(spool, "invalid_request", b"x", name=name)
    assert error.param == "file"
    assert names(tmp_path) == []


async def test_what_an_earlier_server_left_is_not_part_of_an_upload(spool: Spool, tmp_path: Path) -> None:
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "old.safetensors").write_bytes(b"old")
    await send(spool, b"new")
    assert names(tmp_path / "u") == [FILE]


async def test_an_upload_that_is_deleted_while_it_comes_stays_so(spool: Spool, tmp_path: Path) -> None:
    with UploadChunk(spool, "u", FILE, None, 3, None) as chunk:
        await chunk.write(b"abc")
        await spool.delete("u")
        with pytest.raises(RollspanError, match="deleted meanwhile"):
            await chunk.finish()
    assert names(tmp_path) == []
    await spool.delete("u")


async def test_files_that_are_still_being_deleted_are_not_in_the_way_of_the_next(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleting, may_go_on = threading.Event(), threading.Event()
    rmtree = shutil.rmtree

    def slow_rmtree(path: Path, **options: Any) -> None:
        deleting.set()
        assert may_go_on.wait(10)
        rmtree(path, **options)

    await send(spool, b"old")
    monkeypatch.setattr(shutil, "rmtree", slow_rmtree)
    deletion = asyncio.create_task(spool.delete("u"))
    assert await asyncio.to_thread(deleting.wait, 10)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    await send(spool, b"new")
    may_go_on.set()
    await deletion
    assert names(tmp_path) == ["u"]
    assert (tmp_path / "u" / FILE).read_bytes() == b"new"


async def test_idle_uploads_go_away_and_so_does_everything_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, LIMIT, idle_seconds=0.02)
    deleted = asyncio.Event()
    delete = spool.delete

    async def delete_and_tell(name: str) -> None:
        await delete(name)
        deleted.set()

    monkeypatch.setattr(spool, "delete", delete_and_tell)
    spool.start()
    await send(spool, b"x", (0, 1, 2))
    await asyncio.wait_for(deleted.wait(), 10)
    assert names(tmp_path) == []
    with pytest.raises(RollspanError, match="does not exist"):
        spool.find("u")
    await send(spool, b"x")
    await spool.close()
    assert names(tmp_path) == []
