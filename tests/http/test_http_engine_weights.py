"""Weight updates on the real engine: what is committed, what every failure leaves, and which weights sampled what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontend_process import error_of, wait_until
from real_server import HEAD, NORM, WEIGHTS_FILE, RealEngine, RealServer
from safetensors.numpy import load_file

from rollspan.models.task import Problem

PROMPT = Problem(12, 34).prompt_ids
LONG = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def commit_of(server: RealServer) -> int:
    return int(server.frontend.metrics()["rollspan:weight_commit"])


def greedy(server: RealServer, **params: Any) -> dict[str, Any]:
    response = server.frontend.generate(PROMPT, sampling_params={"temperature": 0, **params})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_an_update_changes_weights_label_and_commit_together(restored: RealServer) -> None:
    server = restored
    before = greedy(server)
    commit = commit_of(server)
    assert server.update(server.engine.weights_root / "zero", "zeros") == commit + 1
    assert server.label() == "zeros"
    during = greedy(server, ignore_eos=True, max_tokens=9)
    assert during["choices"][0]["token_ids"] == [0] * 9
    assert (during["weight_version"], during["weight_commit"]) == ("zeros", commit + 1)
    assert during["choices"][0]["weight_versions"] == [{"version": "zeros", "start": 0, "end": 9}]
    assert during["choices"][0]["weight_commits"] == [{"commit": commit + 1, "start": 0, "end": 9}]
    assert server.update("rl") == commit + 2
    assert server.label() == "zeros"
    after = greedy(server)
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    assert after["weight_commit"] == commit + 2


def test_the_source_may_go_as_soon_as_the_update_is_answered(restored: RealServer) -> None:
    server = restored
    gone = server.engine.save("gone", server.engine.tensors(**{HEAD: None}))
    assert server.frontend.post("/start_weight_update").status_code == 200
    assert server.frontend.post("/update_weights", {"update_info": {"path": str(gone)}}).status_code == 200
    (gone / WEIGHTS_FILE).unlink()
    gone.rmdir()
    answer = server.frontend.post("/finish_weight_update", {"weight_version": 12}).json()
    assert answer["weight_version"] == "12"
    assert greedy(server, max_tokens=2, ignore_eos=True)["choices"][0]["token_ids"] == [0, 0]


@pytest.mark.parametrize("paused", [False, True])
def test_a_stream_across_an_update_is_split_exactly_where_the_tokens_change(
    restored: RealServer, pool: ThreadPoolExecutor, paused: bool
) -> None:
    server = restored
    commit = commit_of(server)
    collected = pool.submit(server.frontend.generate, PROMPT, sampling_params={**LONG, "max_tokens": 500})
    options = {"include_weight_versions": True}
    params = {**LONG, "max_tokens": 500}
    with server.frontend.running_stream(PROMPT, sampling_params=params, stream_options=options) as chunks:
        received = [next(chunks) for _ in range(3)]
        if paused:
            assert server.frontend.post("/pause?mode=keep&clear_cache=true").status_code == 200
        server.update("zero", "zeros")
        if paused:
            late = pool.submit(server.frontend.generate, PROMPT, sampling_params={**LONG, "max_tokens": 3})
            assert server.frontend.post("/resume").status_code == 200
            assert late.result().json()["choices"][0]["token_ids"] == [0, 0, 0]
        received += list(chunks)
    streamed = {
        "token_ids": [token for chunk in received for token in chunk["choices"][0]["token_ids"]],
        "weight_versions": received[-1]["choices"][0]["weight_versions"],
        "weight_commits": received[-1]["choices"][0]["weight_commits"],
    }
    pieces = [span for chunk in received[:-1] for span in chunk["choices"][0]["weight_versions"]]
    assert [span["version"] for span in pieces] == sorted(span["version"] for span in pieces)
    for choice in (streamed, collected.result().json()["choices"][0]):
        tokens, spans = choice["token_ids"], choice["weight_versions"]
        assert [span["version"] for span in spans] == ["default", "zeros"]
        boundary = spans[1]["start"]
        assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, boundary, len(tokens))
        assert 0 not in tokens[:boundary]
        assert set(tokens[boundary:]) == {0}
        assert [span["commit"] for span in choice["weight_commits"]] == [commit, commit + 1]
        assert choice["weight_commits"][1]["start"] == boundary
    assert server.frontend.metrics()["rollspan:requests_spanning_update_total"] >= 2


def test_relabelling_is_not_updating(restored: RealServer) -> None:
    server = restored
    commit = commit_of(server)
    answer = server.frontend.post("/update_weight_version", {"new_version": "named"})
    assert answer.json() == {"success": True, "new_version": "named"}
    assert server.label() == "named"
    result = greedy(server)
    assert (result["weight_version"], result["weight_commit"]) == ("named", commit)
    version = [name for name in server.frontend.metrics() if name.startswith("rollspan:weight_version_info")]
    assert version == ['rollspan:weight_version_info{version="named"}']


BAD_PATHS = {
    "missing": "nowhere",
    "outside": "/usr",
    "dotdot": "rl/../../..",
    "file": f"rl/{WEIGHTS_FILE}",
    "empty": "",
    "number": 5,
    "nul": "rl\0",
    "root-itself": ".",
}


def failed_update(server: RealServer, info: Any) -> str:
    """Starts an update that must fail, and checks that everything is as it was and the next one may start."""
    label, commit, before = server.label(), commit_of(server), greedy(server)
    failures = 'rollspan:weight_updates_total{result="failure"}'
    counted = server.frontend.metrics().get(failures, 0)
    assert server.frontend.post("/start_weight_update").status_code == 200
    answer = server.frontend.post("/update_weights", {"update_info": info})
    if answer.status_code == 200:
        answer = server.frontend.post("/finish_weight_update", {"weight_version": "never"})
    message = error_of(answer, 400, "weights_invalid")
    assert server.frontend.metrics()[failures] == counted + 1
    assert (server.label(), commit_of(server)) == (label, commit)
    after = greedy(server)
    assert after["choices"][0] == before["choices"][0]
    error_of(server.frontend.post("/finish_weight_update"), 409, "no_update_active")
    return message


@pytest.mark.parametrize("case", BAD_PATHS)
def test_a_path_that_is_no_directory_under_the_root_is_refused(server: RealServer, case: str) -> None:
    message = failed_update(server, {"path": BAD_PATHS[case]})
    if case in ("outside", "dotdot"):
        assert "outside --weights-root" in message


def test_a_link_out_of_the_root_is_refused(server: RealServer, tmp_path: Path) -> None:
    link = server.engine.new_path("link")
    link.symlink_to(tmp_path)
    message = failed_update(server, {"path": str(link)})
    link.unlink()
    assert "outside --weights-root" in message


def test_a_link_to_a_file_out_of_the_root_is_refused(server: RealServer, tmp_path: Path) -> None:
    outside = tmp_path / WEIGHTS_FILE
    outside.write_bytes((server.engine.weights_root / "rl" / WEIGHTS_FILE).read_bytes())
    directory = server.engine.new_directory("linked-file")
    (directory / WEIGHTS_FILE).symlink_to(outside)
    failed_update(server, {"path": str(directory)})


def bad_weights(engine: RealEngine, case: str) -> Path:
    """A directory of weights that cannot be used."""
    good = load_file(engine.weights_root / "rl" / WEIGHTS_FILE)
    name = f"bad-{case}"
    if case == "cut":
        directory = engine.save(name, good)
        content = (directory / WEIGHTS_FILE).read_bytes()
        (directory / WEIGHTS_FILE).write_bytes(content[: len(content) // 2])
        return directory
    if case == "garbage":
        directory = engine.save(name, good)
        (directory / WEIGHTS_FILE).write_bytes(b"\xff" * 1000)
        return directory
    if case == "no-files":
        return engine.new_directory(name)
    if case == "shape":
        return engine.save(name, {**good, HEAD: good[HEAD][:-1]})
    if case == "dtype":
        return engine.save(name, {**good, NORM: good[NORM].astype(np.int32)})
    if case == "unknown-name":
        return engine.save(name, {**good, "no.such.weight": good[HEAD]})
    if case == "missing-tensor":
        return engine.save(name, {key: value for key, value in good.items() if key != NORM})
    assert case == "broken-index"
    directory = engine.save(name, good)
    index = {"weight_map": {NORM: "../rl/model.safetensors"}}
    (directory / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("cut", ""),
        ("garbage", ""),
        ("no-files", ""),
        ("shape", HEAD),
        ("dtype", NORM),
        ("unknown-name", "no.such.weight"),
        ("missing-tensor", NORM),
        ("broken-index", ""),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(server: RealServer, case: str, words: str) -> None:
    assert words in failed_update(server, {"path": str(bad_weights(server.engine, case))})


def test_updates_out_of_order_are_conflicts(restored: RealServer) -> None:
    frontend = restored.frontend
    error_of(frontend.post("/update_weights", {"update_info": {"path": "rl"}}), 409, "no_update_active")
    error_of(frontend.post("/finish_weight_update", {"weight_version": "x"}), 409, "no_update_active")
    assert frontend.post("/start_weight_update").status_code == 200
    error_of(frontend.post("/start_weight_update"), 409, "update_active")
    assert restored.label() == "default"
    assert frontend.post("/update_weights", {"update_info": [{"path": "rl"}]}).status_code == 200
    assert restored.label() == "default"
    assert frontend.post("/finish_weight_update", {"weight_version": None}).json()["weight_version"] == "default"


def test_an_update_may_come_in_pieces(restored: RealServer) -> None:
    server = restored
    tensors = load_file(server.engine.weights_root / "zero" / WEIGHTS_FILE)
    names = sorted(tensors)
    parts = [names[::2], names[1::2]]
    assert server.frontend.post("/start_weight_update").status_code == 200
    for number, part in enumerate(parts):
        directory = server.engine.save(f"part-{number}", {name: tensors[name] for name in part})
        assert server.frontend.post("/update_weights", {"update_info": {"path": directory.name}}).status_code == 200
    assert server.frontend.post("/finish_weight_update").status_code == 200
    assert greedy(server, max_tokens=3, ignore_eos=True)["choices"][0]["token_ids"] == [0, 0, 0]


def test_updates_are_counted(restored: RealServer) -> None:
    success = 'rollspan:weight_updates_total{result="success"}'
    before = restored.frontend.metrics().get(success, 0)
    restored.update("sft")
    restored.update("rl")
    assert restored.frontend.metrics()[success] == before + 2


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_abort_and_wait_refuse_new_requests_until_resume(server: RealServer, mode: str) -> None:
    frontend = server.frontend
    with frontend.running_stream(PROMPT, sampling_params={**LONG, "max_tokens": 500}) as chunks:
        for _ in range(2):
            assert frontend.post(f"/pause?mode={mode}&clear_cache=false").json() == {"status": "paused"}
            assert frontend.get("/is_paused").json() == {"is_paused": True}
        received = list(chunks)
    end = received[-1]["choices"][0]
    assert end["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in received) == end["weight_versions"][-1]["end"]
    for stream in (False, True):
        error_of(frontend.generate(PROMPT, stream=stream), 503, "engine_paused")
    assert frontend.metrics()["rollspan:paused"] == 1
    for _ in range(2):
        assert frontend.post("/resume").json() == {"status": "resumed"}
    assert frontend.get("/is_paused").json() == {"is_paused": False}
    assert greedy(server)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("clear_cache", ["true", "false"])
def test_keep_freezes_running_requests_and_queues_new_ones(
    server: RealServer, pool: ThreadPoolExecutor, clear_cache: str
) -> None:
    frontend = server.frontend
    expected = greedy(server, ignore_eos=True, max_tokens=500)["choices"][0]["token_ids"]
    with frontend.running_stream(PROMPT, sampling_params={**LONG, "max_tokens": 500}) as chunks:
        received = [next(chunks)]
        assert frontend.post(f"/pause?mode=keep&clear_cache={clear_cache}").status_code == 200
        queued = pool.submit(frontend.generate, PROMPT, sampling_params={"temperature": 0})
        rest = pool.submit(list, chunks)
        with pytest.raises(TimeoutError):
            rest.result(timeout=0.3)
        assert not queued.done()
        frontend.post("/resume")
        received += rest.result()
    assert [token for chunk in received for token in chunk["choices"][0]["token_ids"]] == expected
    assert queued.result().json()["choices"][0]["finish_reason"] == "stop"


def test_a_later_pause_or_resume_supersedes_a_waiting_one(server: RealServer, pool: ThreadPoolExecutor) -> None:
    frontend = server.frontend
    with frontend.running_stream(PROMPT, sampling_params={**LONG, "max_tokens": 500}) as chunks:
        waiting = pool.submit(frontend.post, "/pause?mode=wait")
        wait_until(lambda: bool(frontend.get("/is_paused").json()["is_paused"]), "paused")
        assert frontend.post("/resume").status_code == 200
        error_of(waiting.result(), 409, "pause_superseded")
        assert frontend.post("/abort_requests").json() == {"status": "aborted", "aborted": 1}
        assert list(chunks)[-1]["choices"][0]["finish_reason"] == "abort"


def test_an_update_info_nested_too_deep_is_refused_and_the_engine_stays(restored: RealServer) -> None:
    nested = "[" * 100 + "]" * 100
    content = f'{{"update_info": {{"path": {nested}}}}}'
    error_of(restored.frontend.post("/update_weights", content=content), 400, "invalid_request")
    assert restored.frontend.get("/health").status_code == 200
    assert restored.label() == "default"


def test_a_finish_that_is_sent_again_is_answered_as_before(restored: RealServer) -> None:
    first = restored.update("zero", "step-1")
    again = restored.frontend.post("/finish_weight_update", {"weight_version": "step-1"})
    assert again.json()["weight_version"] == "step-1"
    assert again.json()["weight_commit"] == first
    error_of(restored.frontend.post("/finish_weight_update", {"weight_version": "x"}), 409, "no_update_active")
