"""The continuous batching of transformers, with its manager kept alive from batch to batch."""

from __future__ import annotations

import importlib
from typing import Any

_PAGE_TOKENS = 256
_STEP_TOKENS = 1024


class Engine:
    """See `host.py`. A manager is sized for one workload; with and without log-probs are two managers on one model."""

    def __init__(self, load: dict[str, Any]) -> None:
        self._torch = importlib.import_module("torch")
        self._transformers = importlib.import_module("transformers")
        self._torch.set_num_threads(load["threads"])
        self._model = self._transformers.AutoModelForCausalLM.from_pretrained(
            load["model"], dtype=getattr(self._torch, load["dtype"]), **load["options"]
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._workload: tuple[Any, ...] = ()
        self._managers: dict[bool, Any] = {}
        self.facts = {"transformers": self._transformers.__version__, "torch": self._torch.__version__}

    def generate(self, request: dict[str, Any]) -> list[list[int]]:
        return [list(output.generated_tokens) for output in self._run(request, record_timestamps=False)]

    def trace(self, request: dict[str, Any]) -> list[list[float]]:
        return [list(output.timestamps) for output in self._run(request, record_timestamps=True)]

    def _run(self, request: dict[str, Any], *, record_timestamps: bool) -> list[Any]:
        manager = self._manager(request)
        names = manager.add_requests(
            inputs=request["prompts"], max_new_tokens=request["output_tokens"], record_timestamps=record_timestamps
        )
        finished: dict[str, Any] = {}
        while len(finished) < len(names):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                if output.error is not None:
                    raise RuntimeError(output.error)
                finished[output.request_id] = output
            elif output is None and not manager.is_running():
                raise RuntimeError("the manager's thread has ended")
        return [finished[name] for name in names]

    def _manager(self, request: dict[str, Any]) -> Any:
        rows, length = len(request["prompts"]), len(request["prompts"][0]) + request["output_tokens"]
        blocks = rows * -(-length // _PAGE_TOKENS)
        workload = (rows, blocks, request["temperature"])
        if workload != self._workload:
            self.close()
            self._workload = workload
        logprobs = request["logprobs"] is not None
        if logprobs not in self._managers:
            sampled = request["temperature"] > 0
            sampling = {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0} if sampled else {}
            manager = self._model.init_continuous_batching(
                generation_config=self._transformers.GenerationConfig(do_sample=sampled, eos_token_id=-1, **sampling),
                continuous_batching_config=self._transformers.ContinuousBatchingConfig(
                    page_size=_PAGE_TOKENS,
                    num_blocks=blocks + 2,
                    max_batch_tokens=max(_STEP_TOKENS, rows),
                    max_requests_per_batch=rows,
                    allow_block_sharing=False,
                    return_logprobs=logprobs,
                ),
            )
            with self._torch.inference_mode():  # its thread takes the mode over
                manager.warmup()
                manager.start()
            self._managers[logprobs] = manager
        return self._managers[logprobs]

    def close(self) -> None:
        """Ends the managers' threads."""
        for manager in self._managers.values():
            manager.stop(block=True, timeout=5)
            manager.destroy()
        self._managers.clear()
