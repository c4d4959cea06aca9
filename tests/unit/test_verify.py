"""`rollspan verify` on rollouts of the embedded model whose weights change in mid-generation."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollspan import cli, models
from rollspan.llm import LLM
from rollspan.models import task
from rollspan.outputs import RequestOutput
from rollspan.sampling_params import RequestOutputKind, SamplingParams

SFT, RL = models.path("add2-sft"), models.path("add2-rl")
PROMPT = task.Problem(12, 34).prompt_ids
PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "truncated": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "edited": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {"5": 2.0, "6": -1.0}},
    "few": {"allowed_token_ids": [3, 4, 5, 6, 7, 8], "min_tokens": 40},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SFT, weights_root=str(SFT.parent), kv_cache_memory=1 << 22, num_threads=1, weight_version="sft") as engine:
        yield engine


def update(llm: LLM, directory: Path, label: str) -> None:
    llm.start_weight_update()
    llm.update_weights({"path": directory.name})
    llm.finish_weight_update(label)


def rollout(llm: LLM, sampling: dict[str, Any], *, recompute: bool = False) -> dict[str, Any]:
    """A recorded line: 60 tokens, of which "sft" samples about a third, then "rl", then "sft" again."""
    update(llm, SFT, "sft")
    params = {"max_tokens": 60, "ignore_eos": True, "logprobs": 0, "seed": 7, **sampling}
    kinds = {
        key: {int(k): v for k, v in value.items()} if key == "logit_bias" else value for key, value in params.items()
    }
    llm.add_request(PROMPT, SamplingParams(output_kind=RequestOutputKind.DELTA, **kinds), "mine")
    merged = llm.step()[0]
    for directory, label in ((None, None), (RL, "rl"), (SFT, "sft")):
        if directory is not None and label is not None:
            if recompute:
                llm.pause_generation("keep", clear_cache=True)
            update(llm, directory, label)
            llm.resume_generation()
        for _ in range(19):
            for output in llm.step():
                merged.add(output, aggregate=True)
    while llm.has_unfinished_requests():
        for output in llm.step():
            merged.add(output, aggregate=True)
    return {"request": {"token_ids": PROMPT, "sampling_params": params}, "response": body(merged)}


def body(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    content = [{"token_id": token, "logprob": entry[token].logprob} for token, entry in pairs]
    choice = {
        "index": 0,
        "token_ids": list(completion.token_ids),
        "logprobs": {"content": content},
        "weight_versions": completion.weight_versions,
        "weight_commits": completion.weight_commits,
    }
    return {"request_id": "mine", "engine_index": 0, "choices": [choice]}


def verify(tmp_path: Path, records: list[Any], *words: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    report = tmp_path / "report.json"
    named = () if any(word.startswith("--checkpoint") for word in words) else checkpoints()
    code = cli.main(["verify", str(path), *named, "--json", str(report), *words])
    return code, json.loads(report.read_text())


def checkpoints() -> tuple[str, ...]:
    return "--checkpoint", f"sft={SFT}", "--checkpoint", f"rl={RL}"


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_true_rollouts_hold_under_any_sampling_parameters(llm: LLM, tmp_path: Path, name: str, recompute: bool) -> None:
    record = rollout(llm, PARAMETERS[name], recompute=recompute)
    code, report = verify(tmp_path, [record])
    assert code == 0, report
    verdict = report["verdicts"][0]
    assert [span["version"] for span in verdict["spans"]] == ["sft", "rl", "sft"]
    assert verdict["kv"] == ("recomputed" if recompute else "kept")
    assert report["max_abs_error"] < 1e-3
    assert len(verdict["boundaries"]) == 2
    assert all(entry["earliest"] <= entry["position"] <= entry["latest"] for entry in verdict["boundaries"])


def test_a_wrong_label_a_shifted_boundary_and_a_forged_log_prob_are_found(llm: LLM, tmp_path: Path) -> None:
    record = rollout(llm, {})
    swapped, shifted, forged = (copy.deepcopy(record) for _ in range(3))
    choice = swapped["response"]["choices"][0]
    for span in choice["weight_versions"]:
        span["version"] = {"sft": "rl", "rl": "sft"}[span["version"]]
    choice = shifted["response"]["choices"][0]
    for name in ("weight_versions", "weight_commits"):
        choice[name][0]["end"] -= 8
        choice[name][1]["start"] -= 8
    forged["response"]["choices"][0]["logprobs"]["content"][30]["logprob"] -= 0.01
    code, report = verify(tmp_path, [record, swapped, shifted, forged])
    assert code == 1
    assert [verdict["holds"] for verdict in report["verdicts"]] == [True, False, False, False]
    assert report["failed"] == 3
    assert "are not of 'rl'" in report["verdicts"][1]["problem"] or "of 'sft'" in report["verdicts"][1]["problem"]


def test_recorded_kv_is_replayed_and_a_false_record_of_it_is_found(llm: LLM, tmp_path: Path) -> None:
    record = rollout(llm, {}, recompute=True)
    choice = record["response"]["choices"][0]
    spans = zip(choice["weight_versions"], choice["weight_commits"], strict=True)
    stamps = [(version["version"], commit["commit"], version["start"], version["end"]) for version, commit in spans]
    length = len(PROMPT)
    choice["kv_versions"] = [
        {
            "start": start,
            "end": end,
            "kv": [{"version": version, "commit": commit, "start": 0, "end": length - 1 + end}],
        }
        for version, commit, start, end in stamps
    ]
    lie = copy.deepcopy(record)
    version, commit, _, end = stamps[0]
    lie["response"]["choices"][0]["kv_versions"][1]["kv"] = [
        {"version": version, "commit": commit, "start": 0, "end": length - 1 + end},
        {"version": stamps[1][0], "commit": stamps[1][1], "start": length - 1 + end, "end": length - 1 + stamps[1][3]},
    ]
    code, report = verify(tmp_path, [record, lie])
    assert code == 1
    assert [(verdict["holds"], verdict["kv"]) for verdict in report["verdicts"]] == [
        (True, "recorded"),
        (False, "recorded"),
    ]


def test_checkpoints_are_found_by_the_digests_of_a_weight_history(llm: LLM, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from rollspan.digest import weight_digest

    record = rollout(llm, {})
    commits = record["response"]["choices"][0]["weight_commits"]
    digests = [weight_digest(AutoModelForCausalLM.from_pretrained(path)) for path in (SFT, RL, SFT)]
    entries = [
        {"weight_commit": span["commit"], "weight_digest": digest}
        for span, digest in zip(commits, digests, strict=True)
    ]
    history = tmp_path / "history.json"
    gone = {"engine_index": 1, "state": "dead", "weight_digest": None}
    history.write_text(json.dumps({"engines": [{"engine_index": 0, "commits": entries}, gone]}))
    unnamed = ("--checkpoint", str(RL), "--checkpoint", str(SFT))
    assert verify(tmp_path, [record], "--history", str(history), *unnamed)[0] == 0
    code, report = verify(tmp_path, [record], "--history", str(history), "--checkpoint", str(SFT))
    assert code == 1
    assert "no checkpoint has the digest" in report["verdicts"][0]["problem"]
    mislabelled = ("--checkpoint", f"sft={RL}", "--checkpoint", f"rl={SFT}")
    code, report = verify(tmp_path, [record], "--history", str(history), *mislabelled)
    assert code == 1
    assert "has digest" in report["verdicts"][0]["problem"]


def test_what_cannot_be_verified_is_said_and_fails(llm: LLM, tmp_path: Path) -> None:
    record = rollout(llm, {})
    silent, unknown, uncovered, words = (copy.deepcopy(record) for _ in range(4))
    silent["response"]["choices"][0]["logprobs"] = None
    unknown["response"]["choices"][0]["weight_versions"][1]["version"] = "gone"
    uncovered["response"]["choices"][0]["weight_versions"].pop()
    words["request"]["sampling_params"]["bad_words"] = ["x"]
    code, report = verify(tmp_path, [silent, unknown, uncovered, words, ["no object"], record])
    problems = [verdict["problem"] for verdict in report["verdicts"]]
    assert code == 1
    assert 'ask for them with "logprobs": 0' in problems[0]
    assert "no checkpoint is given for version 'gone'" in problems[1]
    assert "weight_versions covers" in problems[2]
    assert "bad_words" in problems[3]
    assert "must be an object" in problems[4]
    assert problems[5] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--checkpoint", "a=/nowhere"), "no directory with a config.json"),
        (("--checkpoint", str(SFT)), "needs --history"),
        (("--checkpoint", f"a={SFT}", "--checkpoint", f"a={RL}"), "two checkpoints are called"),
        (("--checkpoint", f"a={SFT}", "--tolerance", "-1"), "--tolerance must be"),
        (("--checkpoint", f"a={SFT}", "--history", "/nowhere"), "--history /nowhere"),
    ],
)
def test_wrong_usage_ends_with_code_2_and_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("{}\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", str(path), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]
