"""`rollspan verify` on what a server has answered: checkpoints by digest, KV as recorded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from frontend_process import wait_until
from real_server import RealServer

from rollspan import cli, models
from rollspan.models.task import Problem


def ask(server: RealServer, number: int) -> dict[str, Any]:
    """A recorded line."""
    problem = Problem(10 + number, 50 + number)
    request = {
        "token_ids": problem.prompt_ids,
        "return_kv_versions": True,
        "sampling_params": {"max_tokens": 400, "ignore_eos": True, "logprobs": 0, "seed": number, "temperature": 0.9},
    }
    fields = {name: value for name, value in request.items() if name != "token_ids"}
    answer = server.frontend.generate(problem.prompt_ids, **fields)
    assert answer.status_code == 200, answer.text
    return {"request": request, "response": answer.json()}


def more_tokens(server: RealServer) -> None:
    """Waits for about 20 tokens more of each of 8 requests."""

    def count() -> float:
        return server.frontend.metrics()["rollspan:generation_tokens_total"]

    before = count()
    wait_until(lambda: count() >= before + 160, "more tokens")


def test_rollouts_across_live_updates_are_verified_by_digest_and_recorded_kv(
    restored: RealServer, tmp_path: Path
) -> None:
    server = restored
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, server, number) for number in range(8)]
        wait_until(lambda: server.frontend.metrics()["rollspan:num_requests_running"] == 8, "running requests")
        more_tokens(server)
        server.update("sft", "new")
        more_tokens(server)
        server.frontend.post("/pause?mode=keep&clear_cache=true")
        server.update("rl", "old")
        server.frontend.post("/resume")
        records = [future.result() for future in asked]
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))
    history = tmp_path / "history.json"

    def known() -> bool:
        answer = server.frontend.get("/weight_history")
        history.write_text(answer.text)
        return all(commit["weight_digest"] for commit in answer.json()["engines"][0]["commits"])

    wait_until(known, "digests")
    choices = [record["response"]["choices"][0] for record in records]
    assert all(len(choice["weight_commits"]) == 3 for choice in choices), "the updates missed the rollouts"
    report = tmp_path / "report.json"
    checkpoints = [word for name in ("add2-sft", "add2-rl") for word in ("--checkpoint", str(models.path(name)))]
    words = ["verify", str(rollouts), "--history", str(history), *checkpoints, "--json", str(report)]
    code = cli.main(words)
    found = json.loads(report.read_text())
    assert (code, found["holds"], found["rollouts"], found["tokens"]) == (0, True, 8, 8 * 400), found
    assert all(verdict["kv"] == "recorded" for verdict in found["verdicts"])
    assert found["max_abs_error"] < 1e-3
    assert {span["version"] for verdict in found["verdicts"] for span in verdict["spans"]} >= {"new", "old"}
    # The same records with KV said to be of other weights are lies. Tokens that are certain either way hide one or two.
    for choice in choices:
        kept = next(segment["kv"] for segment in choice["kv_versions"] if len(segment["kv"]) > 1)
        kept[0]["version"], kept[0]["commit"] = kept[-1]["version"], kept[-1]["commit"]
    rollouts.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert cli.main(words) == 1
    assert json.loads(report.read_text())["failed"] >= 4
