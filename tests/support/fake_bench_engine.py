"""Stands in for ``bench/peers/host.py``: ``python fake_bench_engine.py NAME`` answers at once with scripted figures.

Every batch takes one second by its own account, two for other engines than ours. ``FAKE_TROUBLE=NAME:KIND`` makes the
engine of that file name misbehave: ``missing`` and ``refuses`` when it loads, ``dies`` at its third batch,
``interrupts`` sends its parent a Ctrl-C at its third batch, ``litters`` starts a child that would outlive it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

ERRORS = {
    "missing": "ModuleNotFoundError: No module named 'vllm'",
    "refuses": "ValueError: this model is too strange",
}


def main() -> None:
    name = sys.argv[1]
    engine, _, trouble = os.environ.get("FAKE_TROUBLE", "").partition(":")
    trouble = trouble if engine == name else ""
    asked = 0
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "load":
            facts = {"threads": os.environ["OMP_NUM_THREADS"], "path": os.environ.get("PYTHONPATH", "")}
            reply = {"error": ERRORS[trouble]} if trouble in ERRORS else {"facts": facts, "seconds": 0.5}
            if trouble == "litters":
                child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
                reply["facts"]["child"] = child.pid
        elif request["op"] == "collect":
            reply = {}
        else:
            asked += 1
            if trouble == "dies" and asked == 3:
                sys.stderr.write("out of luck\n")
                sys.exit(7)
            if trouble == "interrupts" and asked == 3:
                os.kill(os.getppid(), signal.SIGINT)
            seconds = (1.0 if name == "rollspan_llm" else 2.0) * (1.0 if request["logprobs"] is None else 1.25)
            reply = {"seconds": seconds}
            rows = [[7] * request["output_tokens"] for _ in request["prompts"]]
            if request["op"] == "generate":
                reply["token_ids"] = rows
            else:
                reply["times"] = [[0.5 + 0.1 * place for place in range(len(row))] for row in rows]
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
