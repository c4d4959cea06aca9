"""rollspan's own LLM."""

from __future__ import annotations

import time
from typing import Any

import rollspan


class Engine:
    """See `host.py`."""

    def __init__(self, load: dict[str, Any]) -> None:
        options = {
            "dtype": load["dtype"],
            "num_threads": load["threads"],
            "max_model_len": load["max_model_len"],
            "max_num_seqs": max(256, load["max_batch"]),
            **load["options"],
        }
        self._llm = rollspan.LLM(load["model"], **options)
        self.facts = {"rollspan": rollspan.__version__}

    def generate(self, request: dict[str, Any]) -> list[list[int]]:
        outputs = self._llm.generate(request["prompts"], self._params(request))
        return [list(output.outputs[0].token_ids) for output in outputs]

    def trace(self, request: dict[str, Any]) -> list[list[float]]:
        params = self._params(request, output_kind=rollspan.RequestOutputKind.DELTA)
        times: dict[str, list[float]] = {}
        for prompt in request["prompts"]:
            times[self._llm.add_request(prompt, params)] = []
        while self._llm.has_unfinished_requests():
            outputs = self._llm.step()
            now = time.perf_counter()
            for output in outputs:
                times[output.request_id] += [now] * len(output.outputs[0].token_ids)
        return list(times.values())

    def close(self) -> None:
        self._llm.shutdown()

    @staticmethod
    def _params(request: dict[str, Any], **more: Any) -> rollspan.SamplingParams:
        return rollspan.SamplingParams(
            max_tokens=request["output_tokens"],
            ignore_eos=True,
            temperature=request["temperature"],
            logprobs=request["logprobs"],
            **more,
        )
