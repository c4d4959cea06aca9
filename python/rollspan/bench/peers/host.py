"""Runs one engine for `rollspan bench`: ``python host.py NAME`` loads the engine of the file NAME.py beside this one.

One JSON object a line on stdin, one on stdout for each; what the engine prints goes to stderr. Objects:

- ``{"op": "load", "model": DIRECTORY, "dtype": NAME, "threads": N, "max_model_len": N, "max_batch": N, "kv_bytes": N,
  "options": {...}}`` -> ``{"facts": {...}, "seconds": S}``, once, first.
- ``{"op": "generate", "prompts": [[ID, ...], ...], "output_tokens": N, "logprobs": N or null, "temperature": T}`` ->
  ``{"seconds": S, "token_ids": [[ID, ...], ...]}``
- ``{"op": "trace", ...the same...}`` -> ``{"seconds": S, "times": [[SECONDS, ...], ...]}``: when each token arrived,
  from the start of the batch.

- ``{"op": "collect"}`` -> ``{}``: collects garbage, so that no batch pays for what came before it.

A failure answers ``{"error": TEXT}``. The end of stdin ends the process.

NAME.py has a class ``Engine``: ``Engine(load)`` takes the load object; its ``facts`` is a mapping of strings;
``generate(request)`` returns lists of token ids and ``trace(request)`` lists of times of ``time.perf_counter``, both in
the order of the prompts; every output has exactly ``output_tokens`` tokens. ``close()`` ends it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_PR_SET_PDEATHSIG = 1


def engine_class(name: str) -> Any:
    """The class ``Engine`` of NAME.py."""
    spec = importlib.util.spec_from_file_location(f"rollspan_bench_{name}", HERE / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Engine


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Runs one request on a loaded engine.

    Raises:
        ValueError: the engine returned other numbers of tokens than it was asked for.
    """
    wanted = [request["output_tokens"]] * len(request["prompts"])
    started = time.perf_counter()
    if request["op"] == "generate":
        result = engine.generate(request)
        seconds = time.perf_counter() - started
        reply = {"seconds": seconds, "token_ids": result}
    else:
        result = engine.trace(request)
        seconds = time.perf_counter() - started
        reply = {"seconds": seconds, "times": [[moment - started for moment in times] for times in result]}
    if [len(one) for one in result] != wanted:
        counts = sorted({len(one) for one in result})
        raise ValueError(f"{len(result)} outputs of {counts} tokens, asked for {len(wanted)} of {wanted[0]}")
    return reply


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def main() -> None:
    """Answers stdin's requests until its end."""
    if sys.platform == "linux":  # whoever kills the benchmark does not leave its engines behind
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # This directory must not hide a package that has the name of one of its files.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    engine = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "load":
                started = time.perf_counter()
                engine = engine_class(sys.argv[1])(request)
                facts = {"python": sys.version.split()[0], **engine.facts}
                reply = {"facts": facts, "seconds": time.perf_counter() - started}
            elif request["op"] == "collect":
                gc.collect()
                reply = {}
            else:
                reply = answer(engine, request)
        except Exception as error:  # noqa: BLE001 (an engine may raise anything; the benchmark says what)
            traceback.print_exc()
            reply = {"error": _one_line(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    main()
