"""The shared vectors of request validation and of spans, run by Python; Rust runs the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollspan.errors import ERRORS, RollspanError, check_label
from rollspan.frontend.schemas import GenerateRequest, parse_generate
from rollspan.protocol.messages import EngineHello, Limits, ModelFacts
from rollspan.spans import SpanBuilder
from support.wire_views import sampling_view

CONFORMANCE = Path(__file__).parents[1] / "conformance"
VALIDATION = json.loads((CONFORMANCE / "generate_validation.json").read_text(encoding="utf-8"))
LABELS = json.loads((CONFORMANCE / "labels.json").read_text(encoding="utf-8"))
TABLE = json.loads((CONFORMANCE / "errors.json").read_text(encoding="utf-8"))
SPANS = json.loads((CONFORMANCE / "spans.json").read_text(encoding="utf-8"))
DEFAULTS: dict[str, Any] = {
    "request_id": None,
    "stream": False,
    "include_usage": False,
    "continuous_usage_stats": False,
    "include_weight_versions": False,
    "return_token_ids": False,
    "priority": 0,
    "cache_salt": None,
    "ignored_fields": [],
    "provenance": None,
}


def hello(served: dict[str, Any]) -> EngineHello:
    return EngineHello(
        limits=Limits(**served["limits"]),
        model=ModelFacts(served["model"], "Toy", "float32", "cpu", 1, served["eos_token_ids"]),
        weight_version="default",
        weight_commit=0,
        rollspan_version="0",
        pid=1,
    )


def view(request: GenerateRequest, engine: EngineHello) -> dict[str, Any]:
    sampling = request.sampling_params.resolve(
        prompt_length=len(request.token_ids),
        max_model_len=engine.limits.max_model_len,
        eos_token_ids=engine.model.eos_token_ids,
    )
    fields = {name: getattr(request, name) for name in DEFAULTS}
    fields["ignored_fields"] = list(request.ignored_fields)
    fields["provenance"] = request.provenance.to_wire()
    shown = {name: value for name, value in fields.items() if value != DEFAULTS[name]}
    return {"token_ids": request.token_ids, "sampling": sampling_view(sampling), **shown}


@pytest.mark.parametrize("case", [pytest.param(case, id=case["title"]) for case in VALIDATION["cases"]])
def test_a_body_becomes_the_request_or_the_error_of_its_vector(case: dict[str, Any]) -> None:
    engine = hello(VALIDATION["served"][case.get("served", "plain")])
    body = case["body"].encode() if "body" in case else bytes.fromhex(case["body_hex"])
    if "request" in case:
        request = parse_generate(body, case.get("header"), engine, case.get("strict", False))
        assert view(request, engine) == case["request"]
        return
    with pytest.raises(RollspanError) as refusal:
        parse_generate(body, case.get("header"), engine, case.get("strict", False))
    expected = case["error"]
    assert (refusal.value.reason, refusal.value.param) == (expected["reason"], expected["param"])
    if expected["message"] is None:
        assert refusal.value.message.startswith("request body is not valid JSON: ")
    else:
        assert refusal.value.message == expected["message"]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["title"]) for case in SPANS["cases"]])
def test_stamps_make_the_spans_of_their_vector(case: dict[str, Any]) -> None:
    builder = SpanBuilder()
    for version, commit, tokens in case["pushes"]:
        builder.push(version, commit, tokens)
    spans = builder.between(case.get("start", 0), case.get("total", builder.tokens))
    assert spans == (case["versions"], case["commits"])


@pytest.mark.parametrize("case", LABELS["cases"])
def test_a_value_becomes_the_label_or_the_refusal_of_its_vector(case: dict[str, Any]) -> None:
    if "label" in case:
        assert check_label(case["value"], "new_version") == case["label"]
        return
    with pytest.raises(RollspanError) as refusal:
        check_label(case["value"], "new_version")
    refused = refusal.value
    assert (refused.reason, refused.param, refused.message) == ("invalid_label", "new_version", case["message"])


def test_the_table_of_errors_is_that_of_the_vectors() -> None:
    assert [{"reason": reason, "status": status, "type": kind} for reason, (status, kind) in ERRORS.items()] == TABLE[
        "errors"
    ]
