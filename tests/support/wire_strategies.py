"""Hypothesis strategies for messages of the engine link."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from rollspan.protocol import messages as m
from rollspan.provenance import NO_PROVENANCE, Provenance
from rollspan.sampling_params import RequestOutputKind, SamplingParams

LABELS = st.none() | st.sampled_from(["A", "B", "", "größe"])
COMMITS = st.none() | st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=4)
INT64 = st.integers(-(2**63), 2**63 - 1)
SHORT = st.text(max_size=4)
_POSITIONS = st.integers(0, 2**32 - 1)
SPANS = st.none() | st.lists(st.tuples(SHORT, st.integers(0, 2**64 - 1), _POSITIONS, _POSITIONS), max_size=3)
PROVENANCE = st.builds(
    Provenance,
    min_weight_commit=st.integers(0, 2**63 - 1),
    weight_wait_s=st.floats(0, 1e300),
    max_weight_lag=st.none() | st.integers(0, 2**63 - 1),
    return_kv_versions=st.booleans(),
    allow_stale_prefix=st.booleans(),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(-1e300, 1e300) | SHORT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def logprobs(draw: st.DrawFn, positions: int) -> m.LogprobsLists:
    """Log-probs of that many positions; infinities and NaN among them."""
    width = draw(st.integers(1, 4))
    values = draw(st.lists(st.floats(width=32), min_size=positions * width, max_size=positions * width))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=positions * width, max_size=positions * width))
    ranks = draw(st.lists(st.integers(0, 2**31 - 1), min_size=positions, max_size=positions))
    return m.LogprobsLists(
        np.array(ids, "<i4").reshape(positions, width),
        np.array(values, "<f4").reshape(positions, width),
        np.array(ranks, "<i4"),
    )


@st.composite
def experts(draw: st.DrawFn) -> Any:
    """Routed experts of up to two tokens."""
    shape = draw(st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(1, 2)))
    dtype = draw(st.sampled_from(("|u1", "<i2", "<i4")))
    count = shape[0] * shape[1] * shape[2]
    return np.array(draw(st.lists(st.integers(0, 127), min_size=count, max_size=count)), dtype).reshape(shape)


@st.composite
def outputs(draw: st.DrawFn) -> m.EngineCoreOutput:
    """One EngineCoreOutput, any combination of its fields."""
    tokens = draw(TOKENS)
    return m.EngineCoreOutput(
        request_id=draw(SHORT),
        new_token_ids=tokens,
        new_logprobs=draw(st.none() | logprobs(len(tokens))) if tokens else None,
        finish_reason=draw(st.none() | st.sampled_from(m.FinishReason)),
        stop_reason=draw(st.none() | INT64 | SHORT),
        prefill_stats=draw(st.none() | st.just({"num_prompt_tokens": 3, "num_cached_tokens": 1})),
        error=draw(
            st.none() | st.builds(m.EngineError, SHORT, SHORT, st.booleans(), st.none() | SHORT, st.none() | SHORT)
        ),
        new_prompt_logprobs=draw(st.none() | st.integers(0, 3).flatmap(logprobs)),
        routed_experts=draw(st.none() | experts()),
        admission=draw(st.none() | st.tuples(SHORT, st.integers(0, 2**64 - 1))),
        kv_spans=draw(SPANS),
        prompt_spans=draw(SPANS),
    )


def batches(**head: Any) -> st.SearchStrategy[m.EngineCoreOutputs]:
    """OUTPUTS messages with at least one output."""
    stats = st.none() | st.just({"num_running_reqs": 2, "num_waiting_reqs": 1, "kv_cache_usage": 0.5})
    return st.builds(
        m.EngineCoreOutputs,
        outputs=st.lists(outputs(), min_size=1, max_size=4),
        scheduler_stats=stats,
        finished_requests=st.none() | st.lists(SHORT, max_size=2),
        **head,
    )


def messages() -> st.SearchStrategy[m.EngineCoreOutputs]:
    """OUTPUTS messages of every family."""
    head = {
        "engine_index": st.integers(0, 3),
        "timestamp": st.floats(1, 1e9),
        "weight_version": LABELS,
        "weight_commit": COMMITS,
    }
    call_id = st.integers(0, 2**64 - 1)
    success = st.builds(m.UtilityOutput, call_id, result=VALUES)
    failure = st.builds(m.UtilityOutput, call_id, failure=SHORT, reason=st.none() | SHORT)
    wave = st.integers(0, 2**40)
    return (
        batches(**head)
        | st.builds(m.EngineCoreOutputs, utility_output=success | failure, **head)
        | st.builds(m.EngineCoreOutputs, wave_complete=wave, **head)
        | st.builds(m.EngineCoreOutputs, start_wave=wave, **head)
    )


@st.composite
def requests(draw: st.DrawFn) -> m.EngineCoreRequest:
    """EngineCoreRequests as frontends send them: resolved, for one output."""
    max_tokens = draw(st.integers(1, 2**31))
    ids = st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple)
    params = SamplingParams(
        temperature=draw(st.floats(0, 2)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(-1, 2**63 - 1)),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(ids),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.none() | st.integers(-1, 20)),
        min_p=draw(st.floats(0, 1)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0.01, 100)),
        prompt_logprobs=draw(st.none() | st.integers(-1, 20)),
        logit_bias=draw(st.none() | st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100), max_size=3)),
        allowed_token_ids=draw(st.none() | ids),
        bad_words=draw(st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple)),
        structured_outputs=draw(st.none() | st.sampled_from(({"regex": "a+"}, {"choice": ["a", "b"]}))),
        skip_reading_prefix_cache=draw(st.none() | st.booleans()),
        routed_experts=draw(st.none() | st.booleans()),
        routed_experts_prompt_start=draw(st.integers(0, 2**63 - 1)),
        bad_words_token_ids=draw(st.lists(ids.filter(bool), max_size=2).map(tuple)),
        output_kind=draw(st.sampled_from(RequestOutputKind)),
        eos_token_id=draw(st.none() | st.integers(0, 2**32 - 1)),
        all_stop_token_ids=draw(ids),
    )
    return m.EngineCoreRequest(
        request_id=draw(SHORT),
        prompt_token_ids=draw(TOKENS),
        sampling_params=params,
        arrival_time=draw(st.floats(0, 2e9)),
        cache_salt=draw(st.none() | SHORT),
        client_index=draw(st.integers(0, 2**32 - 1)),
        priority=draw(INT64),
        external_req_id=draw(st.none() | SHORT),
        session_id=draw(st.none() | SHORT),
        provenance=draw(st.just(NO_PROVENANCE) | PROVENANCE),
    )
