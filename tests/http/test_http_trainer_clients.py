"""The control calls of trainers' released clients, word for word: what they send, and what they make of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from real_server import RealServer
from scripted_frontend import Mocked

from rollspan.models.task import Problem

PROMPT = Problem(12, 34).prompt_ids
COMMIT = {"weight_version": "step-1", "weight_commit": 1, "weight_digest": "blake3:" + "00" * 32}
NCCL = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2, "packed": True}
PIECE = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


class SyncClient:
    """Posts as vLLM's and SkyRL's weight-sync clients do: a connection each, no timeout, any refusal is the end."""

    def __init__(self, url: str, pool: ThreadPoolExecutor) -> None:
        self._url = url
        self._pool = pool

    def post(self, route: str, body: Any = None, **params: Any) -> Future[Any]:
        return self._pool.submit(self._post, route, body, params)

    def _post(self, route: str, body: Any, params: dict[str, Any]) -> Any:
        with httpx.Client(timeout=None, headers={"Connection": "close"}) as http:
            content = {} if body is None else {"json": body}
            answer = http.post(f"{self._url}/{route}", params=params, **content)
            answer.raise_for_status()
            return answer.json()


def expect(mock: Mocked, method: str, args: list[Any], result: Any = None) -> None:
    call = mock.engine.next_call(method)
    assert call.args == args
    mock.engine.reply(call, result)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("label", [None, "step-1"])
def test_weight_sync_clients_of_vllm_and_skyrl(
    mock: Mocked, pool: ThreadPoolExecutor, as_list: bool, label: str | None
) -> None:
    client = SyncClient(mock.frontend.url, pool)

    def listed(info: dict[str, Any]) -> Any:
        return [info] if as_list else info

    answer = client.post("init_weight_transfer_engine", {"init_info": NCCL})
    expect(mock, "init_weight_transfer_engine", [NCCL])
    answer.result()
    for _ in range(2):
        answer = client.post("start_weight_update")
        expect(mock, "start_weight_update", [])
        answer.result()
        for piece in (PIECE, {name: [] for name in PIECE}):
            answer = client.post("update_weights", {"update_info": listed(piece)})
            expect(mock, "update_weights", [piece])
            answer.result()
        answer = client.post("finish_weight_update", None if label is None else {"weight_version": label})
        expect(mock, "finish_weight_update", [label], COMMIT)
        answer.result()
    answer = client.post("shutdown_weight_transfer_engine")
    expect(mock, "shutdown_weight_transfer_engine", [])
    answer.result()


def test_a_refusal_reaches_a_sync_client_as_an_error_with_a_message(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    client = SyncClient(mock.frontend.url, pool)
    for route in ("start_weight_update", "start_draft_weight_update"):
        answer = client.post(route)
        if route == "start_weight_update":
            mock.engine.refuse(mock.engine.next_call(route), "one is open", "update_active")
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            answer.result()
        assert isinstance(refusal.value.response.json()["error"]["message"], str)


def test_control_calls_of_skyrls_inference_client(mock: Mocked, pool: ThreadPoolExecutor) -> None:
    http = mock.frontend.http
    octets = {"Content-Type": "application/octet-stream"}
    assert http.request("GET", "/get_world_size", json={}).json() == {"world_size": 1}
    for path, method, args, result, expected in (
        ("/pause?mode=keep&clear_cache=false", "pause_generation", ["keep", False], None, {"status": "paused"}),
        ("/reset_prefix_cache", "reset_prefix_cache", [False], True, {"success": True}),
        ("/sleep?level=2", "sleep", [2, "abort"], None, {"status": "sleeping", "level": 2}),
        ("/resume", "resume_scheduler", [], None, {"status": "resumed"}),
    ):
        answer = pool.submit(http.post, path, headers=octets)
        expect(mock, method, args, result)
        assert answer.result().json() == expected
    answer = pool.submit(http.post, "/wake_up?tags=weights", headers=octets)
    expect(mock, "wake_up", [["weights"]])
    expect(mock, "is_sleeping", [], True)
    assert answer.result().json() == {"status": "sleeping", "tags": ["weights"]}


def test_an_update_as_prime_rl_does_it_even_when_its_post_arrives_twice(
    restored: RealServer, pool: ThreadPoolExecutor
) -> None:
    server, frontend = restored, restored.frontend
    assert frontend.get("/health").status_code == 200
    broadcaster = {"host": "h", "port": 1, "rank_offset": 0, "inference_world_size": 1, "timeout": 1}
    assert frontend.post("/init_broadcaster", broadcaster).status_code == 404
    commit = server.frontend.metrics()["rollspan:weight_commit"]
    path = str(server.engine.weights_root / "zero")
    params = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}
    with frontend.running_stream(PROMPT, sampling_params=params) as chunks:
        received = [next(chunks)]
        assert frontend.post("/pause?mode=keep&clear_cache=false").status_code == 200
        answers = [pool.submit(frontend.post, "/update_weights", {"weight_dir": path}) for _ in range(2)]
        assert {answer.result().status_code for answer in answers} == {200}
        assert frontend.post("/resume").status_code == 200
        received += list(chunks)
    end = received[-1]["choices"][0]
    assert [span["commit"] for span in end["weight_commits"]] == [commit, commit + 2]
    assert [span["version"] for span in end["weight_versions"]] == ["default"]
    tokens = [token for chunk in received for token in chunk["choices"][0]["token_ids"]]
    boundary = end["weight_commits"][1]["start"]
    assert 0 not in tokens[:boundary]
    assert set(tokens[boundary:]) == {0}
