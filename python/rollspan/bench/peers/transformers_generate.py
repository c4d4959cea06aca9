"""``model.generate`` of transformers on a batch of prompts of one length."""

from __future__ import annotations

import importlib
import time
from typing import Any


class Engine:
    """See `host.py`. Log-probs are those of the sampled tokens, from the logits that ``generate`` returns."""

    def __init__(self, load: dict[str, Any]) -> None:
        self._torch = importlib.import_module("torch")
        self._transformers = importlib.import_module("transformers")
        self._torch.set_num_threads(load["threads"])
        self._model = self._transformers.AutoModelForCausalLM.from_pretrained(
            load["model"], dtype=getattr(self._torch, load["dtype"]), **load["options"]
        ).eval()
        self._model.generation_config.eos_token_id = None
        self.facts = {"transformers": self._transformers.__version__, "torch": self._torch.__version__}

    def generate(self, request: dict[str, Any]) -> list[list[int]]:
        return self._generate(request, None)

    def trace(self, request: dict[str, Any]) -> list[list[float]]:
        moments: list[float] = []
        rows = len(request["prompts"])

        def note(token_ids: Any, _scores: Any, **_more: Any) -> Any:
            moments.append(time.perf_counter())
            return self._torch.zeros(token_ids.shape[0], dtype=self._torch.bool)

        self._generate(request, self._transformers.StoppingCriteriaList([note]))
        return [list(moments) for _ in range(rows)]

    def close(self) -> None:
        del self._model

    def _generate(self, request: dict[str, Any], stopping_criteria: Any) -> list[list[int]]:
        torch = self._torch
        wanted = request["logprobs"] is not None
        prompts = torch.tensor(request["prompts"])
        with torch.inference_mode():
            output = self._model.generate(
                prompts,
                generation_config=configuration(self._transformers, request, output_logits=wanted),
                attention_mask=torch.ones_like(prompts),
                stopping_criteria=stopping_criteria,
            )
            generated = output.sequences[:, prompts.shape[1] :]
            if wanted:
                _logprobs(torch, output.logits, generated, request["logprobs"])
        result: list[list[int]] = generated.tolist()
        return result


def configuration(transformers: Any, request: dict[str, Any], **more: Any) -> Any:
    """Greedy, or pure sampling at the temperature, without an end-of-sequence token."""
    sampled = request["temperature"] > 0
    sampling = {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0} if sampled else {}
    return transformers.GenerationConfig(
        max_new_tokens=request["output_tokens"],
        do_sample=sampled,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        **sampling,
        **more,
    )


def _logprobs(torch: Any, logits: Any, generated: Any, count: int) -> list[tuple[list[float], Any]]:
    """Log-probs of the generated tokens ``[rows, steps]`` and of the ``count`` best, step by step."""
    found = []
    for step, rows in enumerate(logits):
        logprobs = torch.log_softmax(rows.float(), dim=-1)
        best = torch.topk(logprobs, count, dim=-1) if count else None
        found.append((logprobs.gather(1, generated[:, step : step + 1])[:, 0].tolist(), best))
    return found
