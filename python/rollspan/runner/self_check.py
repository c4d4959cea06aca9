"""The self-check at load: a runner's logits against those of the model's own attention, before anything is served."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from rollspan.engine.request import Request, RequestStatus
from rollspan.engine.scheduler import ScheduledRequest
from rollspan.errors import RollspanError
from rollspan.protocol.messages import EngineCoreRequest
from rollspan.runner import attention, loader
from rollspan.runner.input_batch import StepLogits
from rollspan.sampling_params import SamplingParams

#: What is checked: a runner's way to run a step.
Run = Callable[[Sequence[ScheduledRequest]], StepLogits]

#: Largest deviation that passes, relative to the largest logit, by dtype.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}
_LENGTHS = (24, 9, 11)
_GENERATED = 4
#: Sliding windows up to this many tokens are checked with a sequence that outgrows them.
_LONGEST_WINDOW = 160


@dataclass(frozen=True)
class Outcome:
    """What a comparison found.

    Attributes:
        difference: largest deviation from the expected logits, relative to the largest of them; inf where there is
            nothing to compare.
        fault: what is wrong, as the end of a sentence about the model; None when the logits are the same.
    """

    difference: float
    fault: str | None = None

    @property
    def ok(self) -> bool:
        """True when the runner may be used."""
        return self.fault is None


class SelfCheck:
    """Short sequences, and the logits that the model's own attention gives for their last tokens.

    The sequences run batched and in pieces of several sizes, side by side. Where the model has a sliding window of at
    most 160 tokens, one of them is longer than it. Soft caps and attention sinks show in any sequence.

    Args:
        lengths: tokens of the other sequences.
        reference: the attention that gives the expected logits.
        tolerance: largest relative deviation that passes, of any row; by default what the dtype lets expect.

    Attributes:
        num_blocks: KV blocks that the sequences use, from block 1 on.
        longest: tokens of the longest of them.

    Raises:
        RollspanError: ``weights_invalid``: the model cannot compute a plain sequence of tokens, or what it computes
            is not finite. No runner can serve it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        block_size: int,
        device: torch.device,
        lengths: Sequence[int] = _LENGTHS,
        reference: str = "eager",
        tolerance: float | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._tolerance = tolerance
        text = model.config.get_text_config()
        window = getattr(text, "sliding_window", None)
        if isinstance(window, int) and max(lengths) < window + 17 and window <= _LONGEST_WINDOW:
            lengths = [*lengths, window + 17]
        limit = getattr(text, "max_position_embeddings", None) or max(lengths)
        self._sequences = [
            [(7 * i + 3 * j + 1) % vocab_size for j in range(min(length, limit))] for i, length in enumerate(lengths)
        ]
        self.longest = max(map(len, self._sequences))
        self.num_blocks = len(lengths) * -(-self.longest // block_size)
        self._blocks_each = self.num_blocks // len(lengths)
        paged = model.config._attn_implementation == attention.NAME
        try:
            if paged:
                model.set_attn_implementation(reference)
            self._expected = [self.plain_logits(sequence) for sequence in self._sequences]
        except Exception as error:  # the model's code may raise anything
            raise self._refused(f"cannot compute a sequence of tokens: {loader.one_line(error)}") from error
        finally:
            if paged:
                model.set_attn_implementation(attention.NAME)
        if not all(bool(torch.isfinite(rows).all()) for rows in self._expected):
            raise self._refused("computes logits that are not finite: its weights may be damaged")

    def _refused(self, what: str) -> RollspanError:
        return RollspanError(f"{type(self._model).__name__} {what}", reason="weights_invalid", param="model")

    def plain_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """``[tokens, vocabulary]`` of one sequence without any cache, in the dtype of the model."""
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self._device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return logits

    def looks_ahead(self) -> bool:
        """True when later tokens change the logits of earlier ones: such a model is no generator."""
        longest = self._sequences[0]
        cut = len(longest) // 2
        return not self._judge([_differences(self.plain_logits(longest[:cut]), self.plain_logits(longest)[:cut])]).ok

    def compare(self, run: Run) -> Outcome:
        """Runs the sequences through ``run`` and compares every row; whatever that raises is an outcome, too."""
        requests = self._requests()
        expected = dict(zip(requests, self._expected, strict=True))
        pieces: list[torch.Tensor] = []  # relative differences of the rows of each piece of several tokens
        singles: list[torch.Tensor] = []
        try:
            for step in self._steps():
                scheduled = [
                    ScheduledRequest(r, n, n == r.num_pending_tokens) for r, n in zip(requests, step, strict=True) if n
                ]
                found = _rows(run(scheduled))
                for entry in scheduled:
                    request, start = entry.request, entry.request.num_computed_tokens
                    request.num_computed_tokens += entry.num_tokens
                    wanted = expected[request][start : request.num_computed_tokens]
                    (singles if entry.num_tokens == 1 else pieces).append(_differences(found[request], wanted))
        except Exception as error:  # noqa: BLE001 (the model's code may raise anything; this runner is out)
            return Outcome(float("inf"), f"cannot run: {loader.one_line(error)}")
        finally:
            for request in requests:
                request.status = RequestStatus.FINISHED
        return self._judge([*pieces, torch.cat(singles)])

    def compare_generation(self, run: Run) -> Outcome:
        """Compares four steps of greedy decoding with those of transformers' own ``generate``."""
        request = self._requests()[1]
        try:
            with torch.inference_mode():
                model: Any = self._model
                expected = model.generate(
                    torch.tensor([request.token_ids], device=self._device),
                    attention_mask=torch.ones(1, request.num_tokens, dtype=torch.int64, device=self._device),
                    generation_config=GenerationConfig(max_new_tokens=_GENERATED, do_sample=False, pad_token_id=0),
                    return_dict_in_generate=True,
                    output_logits=True,
                )
            differences = []
            for token, row in zip(expected.sequences[0, request.num_tokens :].tolist(), expected.logits, strict=True):
                entry = ScheduledRequest(request, request.num_pending_tokens, True)
                differences.append(_differences(run([entry]).logits[:1], row))
                request.num_computed_tokens = request.num_tokens
                request.token_ids.append(token)
        except Exception as error:  # noqa: BLE001 (as above)
            return Outcome(float("inf"), f"cannot generate: {loader.one_line(error)}")
        finally:
            request.status = RequestStatus.FINISHED
        return self._judge([torch.cat(differences)])

    def _requests(self) -> list[Request]:
        requests = []
        for i, sequence in enumerate(self._sequences):
            message = EngineCoreRequest(f"self-check-{i}", list(sequence), SamplingParams(prompt_logprobs=0))
            request = Request(message, admission=("", 0), arrival=i, seed=0)
            request.block_ids = list(range(1 + i * self._blocks_each, 1 + (i + 1) * self._blocks_each))
            requests.append(request)
        return requests

    def _steps(self) -> list[tuple[int, ...]]:
        """Tokens of each sequence in each step: single ones beside pieces of several, and steps of single ones only."""
        pieces = []
        for i, sequence in enumerate(self._sequences):
            left = len(sequence)
            sizes: list[int] = []
            for size in (1, left - 9, 7, 1) if i % 2 else (left - 10, 8, 1, 1):
                if min(size, left) > 0:
                    sizes.append(min(size, left))
                    left -= sizes[-1]
            pieces.append(sizes)
        return list(itertools.zip_longest(*pieces, fillvalue=0))

    def _judge(self, groups: list[torch.Tensor]) -> Outcome:
        """Half precision may send a token to other experts than it went to before: there a few rows may deviate."""
        every = self._model.dtype == torch.float32 or self._tolerance is not None
        difference = max(float(group.max() if every else group.median()) for group in groups)
        limit = TOLERANCE.get(self._model.dtype, 1e-3) if self._tolerance is None else self._tolerance
        if difference <= limit:
            return Outcome(difference)
        return Outcome(
            difference, f"computes other logits than with its own attention (relative difference {difference:.2g})"
        )


def _rows(result: StepLogits) -> dict[Request, torch.Tensor]:
    """All rows of each request in a step in which every prompt is scored, in order of position."""
    row = len(result.sampled)
    rows = {}
    for request, first, last in result.scored:
        rows[request] = result.logits[row : row + last - first]
        row += last - first
    for request, last_row in zip(result.sampled, result.logits[: len(result.sampled)], strict=True):
        rows[request] = torch.cat((rows[request], last_row[None])) if request in rows else last_row[None]
    return rows


def _differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """float32 ``[rows]``: largest deviation in each row, relative to the largest of all expected logits."""
    if found.shape != expected.shape:
        raise ValueError(f"{len(found)} rows of logits instead of {len(expected)}")
    return (found.float() - expected.float()).abs().amax(-1) / expected.float().abs().max().clamp(min=1e-6)
