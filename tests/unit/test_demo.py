"""``rollspan demo``: what it shows, what it refuses to believe, and the whole of it through both frontends."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from rollspan import demo
from rollspan.demo_view import Painter, Rollout, count_sums, table
from rollspan.models import task
from support.scripted_http import Pieces, answer, event_stream, scripted_server
from support.servers import FRONTENDS, frontend_command

TEXT = "46<eos><bos>11+22=33<eos><bos>40+50=91<eos>"


def ids_of(text: str) -> list[int]:
    special = {"E": task.EOS, "B": task.BOS}
    short = text.replace("<eos>", "E").replace("<bos>", "B")
    return [special.get(letter) or task.encode(letter)[0] for letter in short]


def spans(*ends: tuple[str, int], key: str = "version") -> list[dict[str, Any]]:
    starts = [0, *(end for _, end in ends[:-1])]
    return [{key: label, "start": start, "end": end} for start, (label, end) in zip(starts, ends, strict=True)]


def finished_rollout() -> Rollout:
    """46;· sampled by x, all after it by y."""
    rollout = Rollout(0, task.Problem(12, 34))
    ids = ids_of(TEXT)
    rollout.token_ids = ids
    rollout.versions = spans(("x", 4), ("y", len(ids)))
    return rollout


def test_tokens_are_coloured_by_version() -> None:
    shown = Painter(colours=True, width=200).tokens(finished_rollout())
    assert shown == "  \x1b[2m12+34=\x1b[0m\x1b[36m46; \x1b[0m\x1b[33m11+22=33; 40+50=91;\x1b[0m"


def test_without_colours_labels_mark_the_changes() -> None:
    assert Painter(colours=False, width=200).tokens(finished_rollout()) == "  12+34=[x]46; [y]11+22=33; 40+50=91;"


def test_long_rollouts_are_wrapped_and_keep_their_colours() -> None:
    lines = Painter(colours=True, width=22).tokens(finished_rollout()).split("\n")
    assert lines == [
        "  \x1b[2m12+34=\x1b[0m\x1b[36m46; \x1b[0m\x1b[33m11+22=33; \x1b[0m",
        "  \x1b[33m40+50=91;\x1b[0m",
    ]


def test_sums_are_counted_for_the_version_that_wrote_them() -> None:
    assert count_sums(finished_rollout()) == {"x": (1, 1), "y": (1, 2)}


def test_a_sum_that_two_versions_wrote_counts_for_neither() -> None:
    rollout = finished_rollout()
    rollout.versions = spans(("x", 8), ("y", len(rollout.token_ids)))
    assert count_sums(rollout) == {"x": (1, 1), "y": (0, 1)}


def test_tables_are_aligned() -> None:
    assert table([["a", "long"], ["wide", "b"]]) == "  a     long\n  wide  b"


def chunk(ids: list[int], versions: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5} for token in ids]
    return {
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": None,
        "weight_versions": versions,
        **rest,
    }


def test_a_rollout_collects_its_chunks_and_their_versions() -> None:
    rollout = Rollout(0, task.Problem(12, 34))
    rollout.take(chunk([7, 9], spans(("x", 2))))
    rollout.take(chunk([2, 1], [{"version": "x", "start": 2, "end": 3}, {"version": "y", "start": 3, "end": 4}]))
    whole = spans(("x", 3), ("y", 5))
    rollout.take(chunk([5], whole, finish_reason="length", weight_commits=spans(("0", 3), ("1", 5), key="commit")))
    assert rollout.token_ids == [7, 9, 2, 1, 5]
    assert rollout.logprobs == [-0.5] * 5
    assert rollout.chunk_versions == ["x", "x", "x", "y", "y"]
    assert rollout.versions == whole


def arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"rollouts": 1, "tokens": 90, "seed": 0, "frontend": "auto", **changes})


def true_rollout(problem: task.Problem) -> Rollout:
    """What an honest server sends: sampled greedily, each third by the next checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    from rollspan import models
    from rollspan.models.network import cache_argument

    rollout = Rollout(0, problem)
    cache = DynamicCache()
    pending = problem.prompt_ids
    ends = []
    for number, (label, name) in enumerate(demo.CHECKPOINTS.items(), start=1):
        network = AutoModelForCausalLM.from_pretrained(models.path(name))
        while len(rollout.token_ids) < 30 * number:
            with torch.no_grad():
                logits = network(input_ids=torch.tensor([pending]), **cache_argument(network, cache)).logits[0, -1]
            scores = torch.log_softmax(logits, dim=-1)
            # The likeliest but one: likely tokens that a sharp model is not certain of.
            token = int(scores.topk(2).indices[1])
            rollout.token_ids.append(token)
            rollout.logprobs.append(float(scores[token]))
            pending = [token]
        ends.append((label, 30 * number))
    rollout.versions = spans(*ends)
    rollout.commits = [
        {"commit": number, "start": span["start"], "end": span["end"]} for number, span in enumerate(rollout.versions)
    ]
    rollout.chunk_versions = [label for label, _ in ends for _ in range(30)]
    return rollout


@pytest.fixture(scope="module")
def replayer() -> Any:
    return demo._load_replayer()


@pytest.fixture
def played(replayer: Any) -> demo.Demo:
    """A demo whose rollouts an honest server has answered."""
    act = demo.Demo(arguments())
    act._rollouts = [true_rollout(act._rollouts[0].problem)]
    return act


def test_true_rollouts_pass(played: demo.Demo, replayer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert played._check(replayer)
    assert "90 log-probs agree with the version that the spans name" in capsys.readouterr().out


def shift(rollout: Rollout, by: int) -> None:
    rollout.versions = spans(("sft-0", 30 + by), ("rl-1", 60), ("sft-2", 90))
    rollout.commits = spans((0, 30 + by), (1, 60), (2, 90), key="commit")  # type: ignore[arg-type]
    rollout.chunk_versions = ["sft-0"] * (30 + by) + ["rl-1"] * (30 - by) + ["sft-2"] * 30


def lie_about_boundary(rollout: Rollout) -> None:
    shift(rollout, 5)


def lose_an_update(rollout: Rollout) -> None:
    rollout.versions = spans(("sft-0", 30), ("rl-1", 90))


def lose_a_logprob(rollout: Rollout) -> None:
    rollout.logprobs.pop()


def contradict_commits(rollout: Rollout) -> None:
    rollout.commits[0]["end"] += 1


def contradict_chunks(rollout: Rollout) -> None:
    rollout.chunk_versions[29] = "rl-1"


@pytest.mark.parametrize(
    ("lie", "complaint"),
    [
        (lie_about_boundary, "log-probs differ from those of sft-0"),
        (lose_an_update, "versions .* instead of .*: an update missed the rollout"),
        (lose_a_logprob, "90 tokens and 89 log-probs"),
        (contradict_commits, "lie otherwise than weight_versions"),
        (contradict_chunks, "the chunks' weight_versions differ"),
    ],
)
def test_a_lie_is_found_out(
    played: demo.Demo, replayer: Any, lie: Any, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lie(played._rollouts[0])
    assert not played._check(replayer)
    assert re.search(f"wrong: rollout 0.*{complaint}", capsys.readouterr().out)


async def test_rollouts_that_outran_the_updates_are_made_again_and_longer() -> None:
    published = []

    def respond(method: str, path: str, body: Any) -> Pieces:
        if path == "/finish_weight_update":
            published.append(body["weight_version"])
            return answer({"weight_commit": len(published)})
        if path != "/inference/v1/generate":
            return answer({})
        count = body["sampling_params"]["max_tokens"]
        ends = [("sft-0", count)] if count == 90 else [("sft-0", 50), ("rl-1", 100), ("sft-2", count)]
        return event_stream({"choices": [chunk([5] * count, spans(*ends), finish_reason="length")]})

    act = demo.Demo(arguments(rollouts=3))
    async with scripted_server(respond) as server:
        await act._generate(server.url)
        asked = [body["sampling_params"]["max_tokens"] for _, path, body in server.requests if "generate" in path]
    assert asked == [90] * 3 + [180] * 3
    assert published == ["rl-1", "sft-2", "sft-0", "rl-1", "sft-2"]


@pytest.mark.parametrize("words", [["--rollouts", "0"], ["--tokens", "5"], ["--frontend", "perl"]])
def test_wrong_flags_are_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo.main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_demo_proves_every_boundary_and_leaves_nothing_behind(frontend: str) -> None:
    environment = {**os.environ}
    if frontend == "rust":
        environment["ROLLSPAN_HTTP_BINARY"] = frontend_command("rust")[0]
    command = [sys.executable, "-m", "rollspan.cli", "demo", "--frontend", frontend]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("PASS")
    assert "24 boundaries are where the spans say" in result.stdout
    assert "log-probs agree with the version that the spans name" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.slow
def test_a_server_that_does_not_start_is_one_error_with_its_reason() -> None:
    environment = {**os.environ, "ROLLSPAN_HTTP_BINARY": "/nowhere/rollspan-http"}
    command = [sys.executable, "-m", "rollspan.cli", "demo", "--frontend", "rust"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert result.returncode == 1
    assert result.stderr.startswith("rollspan demo: error: the server did not start:")
    assert "not found in /nowhere" in result.stderr
