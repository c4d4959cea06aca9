"""vLLM's offline LLM: the model runs in processes that vLLM starts, as it does for ``vllm bench throughput``."""

from __future__ import annotations

import ctypes.util
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any


class Engine:
    """See `host.py`. ``facts["preloaded"]`` names the libraries that vLLM asks for on CPUs and that were found."""

    def __init__(self, load: dict[str, Any]) -> None:
        preloaded = _preload()
        _bind(load["threads"])
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._vllm = importlib.import_module("vllm")
        options = {
            "dtype": load["dtype"],
            "max_model_len": load["max_model_len"],
            "max_num_seqs": max(256, load["max_batch"]),
            "skip_tokenizer_init": True,
            **load["options"],
        }
        if importlib.import_module("vllm.platforms").current_platform.is_cpu():
            options.setdefault("kv_cache_memory_bytes", load["kv_bytes"])
        self._llm = self._vllm.LLM(model=load["model"], **options)
        self._requests = 0
        torch = importlib.import_module("torch")
        self.facts = {"vllm": self._vllm.__version__, "torch": torch.__version__, "preloaded": preloaded}

    def generate(self, request: dict[str, Any]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        outputs = self._llm.generate(prompts, self._params(request), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def trace(self, request: dict[str, Any]) -> list[list[float]]:
        kinds = importlib.import_module("vllm.sampling_params").RequestOutputKind
        params = self._params(request, output_kind=kinds.DELTA)
        engine = self._llm.llm_engine
        times: dict[str, list[float]] = {}
        for prompt in request["prompts"]:
            name = f"trace-{self._requests}"
            self._requests += 1
            times[name] = []
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                times[output.request_id] += [now] * len(output.outputs[0].token_ids)
        return list(times.values())

    def close(self) -> None:
        del self._llm

    def _params(self, request: dict[str, Any], **more: Any) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=request["output_tokens"],
            ignore_eos=True,
            temperature=request["temperature"],
            logprobs=request["logprobs"],
            detokenize=False,
            **more,
        )


def _bind(threads: int) -> None:
    """Gives vLLM's CPU worker so many cores, where its own choice, all but one, is another and the user made none."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if 0 < threads <= len(cores) and threads != len(cores) - 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores[-threads:])))


def _preload() -> str:
    """Has vLLM's worker start with Intel's OpenMP and tcmalloc, as vLLM's documentation asks, where they are found."""
    if os.environ.get("LD_PRELOAD"):
        return os.environ["LD_PRELOAD"]
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    found = [str(openmp)] if openmp.exists() else []
    malloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    found += [malloc] if malloc else []
    if found:
        os.environ["LD_PRELOAD"] = ":".join(found)
    return ":".join(found)
