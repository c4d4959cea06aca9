"""``rollspan bench serve``: what it asks, what it counts, and what it says when things go wrong."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollspan.bench import report, serve
from rollspan.bench.load import Extent, Load, UpdatePlan, Workload
from rollspan.bench.results import LoadResult, RequestRecord, Spread, UpdateRecord, percentile
from support.scripted_http import Pieces, ScriptedServer, answer, event_stream, scripted_server

TOKENS = 3


def workload(**changes: Any) -> Workload:
    settings = {"prompt_tokens": 5, "output_tokens": TOKENS, "stream": True, "logprobs": None}
    return Workload(**{**settings, "temperature": 1.0, "vocabulary_size": 16, "seed": 0, **changes})


def generate(method: str, path: str, body: Any) -> Pieces:
    """A server of this API: one token a chunk, spans of two versions at the end."""
    if path != "/inference/v1/generate":
        return answer({})
    versions = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": TOKENS}]
    if not body["stream"]:
        return answer({"choices": [{"token_ids": [1] * TOKENS, "weight_versions": versions}]})
    chunks: list[Any] = [{"choices": [{"index": 0, "token_ids": [1], "finish_reason": None}]} for _ in range(TOKENS)]
    last = {"index": 0, "token_ids": [], "finish_reason": "length", "weight_versions": versions}
    return event_stream(*chunks, {"choices": [last]})


async def watch_nothing(result: LoadResult) -> None:
    del result


async def run_load(server: ScriptedServer, extent: Extent, concurrency: int = 2, **changes: Any) -> LoadResult:
    load = Load(server.url, workload(**changes), extent, concurrency)
    await load.run(asyncio.Event(), None, watch_nothing)
    return load.result


async def test_a_streamed_run_counts_tokens_chunks_and_versions() -> None:
    async with scripted_server(generate) as server:
        result = await run_load(server, Extent(5, None))
        assert server.connections == 2
    figures = result.as_json()
    assert (figures["requests"], figures["succeeded"], figures["errors"]) == (5, 5, {})
    assert figures["output_tokens"] == 5 * TOKENS
    assert figures["tokens_per_chunk"] == 1
    assert figures["requests_spanning_update"] == 5
    assert all(len(record.chunk_times) == TOKENS for record in result.records)
    assert figures["time_to_first_token_ms"]["p50"] <= figures["request_latency_ms"]["largest"]


async def test_a_collected_run_has_no_times_between_tokens() -> None:
    async with scripted_server(generate) as server:
        figures = (await run_load(server, Extent(2, None), stream=False)).as_json()
    assert figures["output_tokens"] == 2 * TOKENS
    assert figures["inter_token_latency_ms"] == {"p50": None, "p99": None, "largest": None}
    assert figures["request_latency_ms"]["p50"] > 0


async def test_requests_are_what_the_flags_say_and_the_same_in_every_run() -> None:
    async with scripted_server(generate) as server:
        await run_load(server, Extent(2, None), concurrency=1, logprobs=0)
        await run_load(server, Extent(2, None), concurrency=1, logprobs=0)
        bodies = [body for _, _, body in server.requests]
    assert bodies[:2] == bodies[2:]
    assert bodies[0] != bodies[1]
    assert len(bodies[0]["token_ids"]) == 5
    assert max(bodies[0]["token_ids"]) < 16
    sampling = bodies[0]["sampling_params"]
    assert sampling.pop("seed") >= 0
    assert sampling == {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}


async def test_failed_requests_are_counted_by_reason_and_the_run_goes_on() -> None:
    refusal = answer({"error": {"message": "full", "code": 429, "reason": "queue_full"}}, 429)
    answers = iter([refusal, None, None])
    respond = lambda *asked: next(answers) or generate(*asked)  # noqa: E731
    async with scripted_server(respond) as server:
        result = await run_load(server, Extent(3, None), concurrency=1)
    assert result.errors == {"queue_full": 1}
    assert result.succeeded == 2


async def test_a_run_by_time_starts_no_request_after_it() -> None:
    async with scripted_server(generate) as server:
        result = await run_load(server, Extent(None, 0.2))
    assert result.succeeded == len(result.records) > 0
    assert max(record.started for record in result.records) - result.started <= 0.2


async def test_a_stopped_run_keeps_what_it_has() -> None:
    stop = asyncio.Event()
    never = asyncio.Event()

    def respond(*asked: Any) -> Pieces:
        if len(server.requests) <= 2:
            return generate(*asked)
        stop.set()
        return [*event_stream({"choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": None}]})[:2], never]

    async with scripted_server(respond) as server:
        load = Load(server.url, workload(), Extent(9, None), 1)
        await load.run(stop, None, watch_nothing)
        never.set()
    assert load.result.succeeded == 2
    assert load.result.errors == {}
    assert load.result.ended > load.result.started


async def test_weights_are_updated_in_turn_while_the_load_runs() -> None:
    gate = asyncio.Event()

    def respond(method: str, path: str, body: Any) -> Pieces:
        if path == "/finish_weight_update" and body["weight_version"] == "bench-3":
            gate.set()
        pieces = generate(method, path, body)
        return pieces if path != "/inference/v1/generate" else [*pieces[:2], gate, *pieces[2:]]

    async with scripted_server(respond) as server:
        load = Load(server.url, workload(), Extent(1, None), 1)
        await load.run(asyncio.Event(), UpdatePlan(["x", "y"], 0.001), watch_nothing)
        control = [(path, body) for _, path, body in server.requests if path != "/inference/v1/generate"]
    assert control[:3] == [
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": "x"}}),
        ("/finish_weight_update", {"weight_version": "bench-1"}),
    ]
    assert control[4] == ("/update_weights", {"update_info": {"path": "y"}})
    assert control[7] == ("/update_weights", {"update_info": {"path": "x"}})
    assert [update.error for update in load.result.updates[:2]] == [None, None]


async def test_a_refused_update_is_reported() -> None:
    gate = asyncio.Event()

    def respond(method: str, path: str, body: Any) -> Pieces:
        if path == "/inference/v1/generate":
            return [gate, *generate(method, path, body)]
        gate.set()
        return answer({"error": {"message": "no such path", "code": 400, "reason": "weights_invalid"}}, 400)

    async with scripted_server(respond) as server:
        load = Load(server.url, workload(), Extent(1, None), 1)
        await load.run(asyncio.Event(), UpdatePlan(["x"], 0.001), watch_nothing)
    assert load.result.errors["update: weights_invalid: no such path"] >= 1


def test_a_stall_is_the_largest_gap_across_the_update_less_the_usual_gap() -> None:
    steady = RequestRecord(started=0.0, chunk_times=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5], tokens=6, ended=1.5)
    held_up = RequestRecord(started=0.0, chunk_times=[1.0, 1.1, 1.2, 1.7, 1.8, 1.9], tokens=6, ended=1.9)
    too_late = RequestRecord(started=0.0, chunk_times=[1.3, 5.0], tokens=2, ended=5.0)
    result = LoadResult(3, 0.0, 6.0, [steady, held_up, too_late])
    stall = result.stall(UpdateRecord("x", "1", started=1.22, ended=1.28))
    assert stall.largest == pytest.approx(0.4)
    assert stall.p50 == pytest.approx(0.2)


def test_an_update_without_running_streams_has_no_stall() -> None:
    assert LoadResult(1, 0.0).stall(UpdateRecord("x", "1", 1.0, 2.0)) == Spread(None, None, None)


def test_percentiles_are_interpolated() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([0.0, 100.0], 99) == pytest.approx(99.0)


def test_the_table_has_a_row_for_each_run_and_names_the_failures() -> None:
    record = RequestRecord(started=0.0, chunk_times=[1.0, 1.1], tokens=2, ended=1.1)
    failed = RequestRecord(started=0.0, error="queue_full")
    update = UpdateRecord("x", "bench-1", 1.02, 1.05)
    out = io.StringIO()
    report.print_report([LoadResult(8, 0.0, 2.0, [record, failed], [update])], out)
    lines = out.getvalue().splitlines()
    first_token, gap, latency = ["1000.0"] * 2, ["100.0"] * 3, ["1100.0"] * 2
    assert lines[1].split() == ["8", "1", "1", "1", "0.50", *first_token, *gap, *latency]
    assert any(line.split()[:2] == ["8", "bench-1"] for line in lines)
    assert lines[-1] == "concurrency 8: 1 x queue_full"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    "words",
    [
        ["--concurrency", "0"],
        ["--concurrency", "1,x"],
        ["--duration", "-1"],
        ["--num-requests", "5", "--duration", "1"],
    ],
)
def test_wrong_flags_are_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments(*words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line_and_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert serve.run(arguments("--url", f"http://127.0.0.1:{taken.getsockname()[1]}")) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("rollspan bench serve: error: http://127.0.0.1:")
    assert errors.count("\n") == 1


def command(url: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "rollspan.cli", "bench", "serve", "--url", url, *words]


async def test_the_command_prints_json_for_every_concurrency() -> None:
    async with scripted_server(generate) as server:
        words = ["--concurrency", "1,2", "--num-requests", "3", "--json", "-"]
        process = await asyncio.create_subprocess_exec(*command(server.url, *words), stdout=subprocess.PIPE)
        output, _ = await process.communicate()
    figures = json.loads(output)
    assert process.returncode == 0
    assert [(run["concurrency"], run["succeeded"]) for run in figures["runs"]] == [(1, 3), (2, 3)]
    assert figures["settings"]["prompt_tokens"] == 32


async def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    second = asyncio.Event()
    never = asyncio.Event()

    def respond(*asked: Any) -> Pieces:
        if len(server.requests) == 3:  # the warm-up, one whole request, and this one
            second.set()
            return [never]
        return generate(*asked)

    async with scripted_server(respond) as server:
        file = tmp_path / "figures.json"
        words = ["--concurrency", "1", "--duration", "60", "--json", str(file)]
        process = await asyncio.create_subprocess_exec(*command(server.url, *words), stdout=subprocess.PIPE)
        await second.wait()
        os.kill(process.pid, signal.SIGINT)
        output, _ = await process.communicate()
        never.set()
    assert process.returncode == 130
    assert output.decode().splitlines()[1].split()[:2] == ["1", "1"]
    assert json.loads(file.read_text())["runs"][0]["succeeded"] == 1
