"""Cost of the Python codec, and of the extension module's decoder where it is built: a step's outputs, a request.

`python benchmarks/codec.py` prints a table, `--json` the same figures as JSON. `benchmarks/codec.rs` measures the same
messages in Rust.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rollspan.protocol import codec
from rollspan.protocol import messages as m
from rollspan.protocol.packed_logprobs import pack_each
from rollspan.sampling_params import SamplingParams
from rollspan.spans import SpanBuilder

try:
    from rollspan import _native
except ImportError:
    _native = None

ROUNDS = 200
ROUND_SECONDS = 0.002

Figure = dict[str, Any]


def measure(name: str, size: int, call: Callable[[], Any]) -> Figure:
    """Mean microseconds of a call in the fastest of many short rounds: what else the machine does counts little."""
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < ROUND_SECONDS:
        call()
        calls += 1
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) * 1e6 / calls)
    return {"name": name, "microseconds": min(rounds), "bytes": size}


def logprobs(outputs: int, top: int) -> Sequence[m.LogprobsLists]:
    """Log-probs of a step, as the sampler makes them: one position for each output."""
    ids = np.tile(np.arange(top + 1, dtype="<i4"), (outputs, 1))
    return pack_each(m.LogprobsLists(ids, np.full(ids.shape, -0.5, "<f4"), np.ones(outputs, "<i4")))


def step(outputs: int, top: int | None) -> m.EngineCoreOutputs:
    """A step of that many requests with one new token each."""
    lists = [None] * outputs if top is None else logprobs(outputs, top)
    return m.EngineCoreOutputs(
        timestamp=1.5,
        weight_version="step-42",
        weight_commit=42,
        outputs=[m.EngineCoreOutput(f"{index:032x}-0a1b2c3d", [1234], lists[index]) for index in range(outputs)],
    )


def codec_figures() -> list[Figure]:
    """Decode and encode of steps of several sizes."""
    figures = []
    for top in (None, 0, 5):
        for outputs in (1, 32, 256):
            message = step(outputs, top)
            payload = codec.encode_outputs(message)
            kind = f"{outputs} outputs, " + ("tokens" if top is None else f"log-probs {top}")
            size = len(payload)
            figures.append(measure(f"decode {kind}", size, partial(codec.decode_outputs, [payload])))
            if _native is not None:
                figures.append(measure(f"decode {kind} (native)", size, partial(_native.decode_outputs, [payload])))
            figures.append(measure(f"encode {kind}", size, partial(codec.encode_outputs, message)))
    return figures


def request_figures() -> list[Figure]:
    """Encode and decode of one request."""
    figures = []
    for prompt in (128, 8192):
        ids = [index * 7 % 100_000 for index in range(prompt)]
        request = m.EngineCoreRequest("request-00000007", ids, SamplingParams(max_tokens=64, seed=7))
        payload = codec.encode_request(request)
        name = f"a request of {prompt} prompt tokens"
        figures.append(measure(f"encode {name}", len(payload), partial(codec.encode_request, request)))
        figures.append(measure(f"decode {name}", len(payload), partial(codec.decode_request, payload)))
    return figures


def span_figures() -> list[Figure]:
    """1024 tokens one by one, with an update every 100."""

    def build(builder: Any) -> Any:
        for index in range(1024):
            builder.push("step-42", index // 100, 1)
        return builder.finish()

    figures = [measure("spans of 1024 tokens", 0, lambda: build(SpanBuilder()))]
    if _native is not None:
        figures.append(measure("spans of 1024 tokens (native)", 0, lambda: build(_native.SpanBuilder())))
    return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    figures = codec_figures() + request_figures() + span_figures()
    if arguments.json:
        json.dump({"language": "python", "native": _native is not None, "figures": figures}, sys.stdout)
        sys.stdout.write("\n")
        return
    sys.stdout.write(f"{'python':<48} {'µs':>12} {'bytes':>10}\n")
    for figure in figures:
        sys.stdout.write(f"{figure['name']:<48} {figure['microseconds']:>12.2f} {figure['bytes']:>10}\n")


if __name__ == "__main__":
    main()
