"""Recorded rollouts: JSON lines of generate requests and their collected responses, checked and cut into segments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: (label, commit number); either may be unknown.
Stamp = tuple[str | None, int | None]


class RecordingError(ValueError):
    """A line holds no rollout that can be verified; the message says which field is at fault."""


@dataclass(frozen=True)
class StampedSegment:
    """Output tokens ``start`` to ``end - 1`` with one stamp, and who computed the KV that they attended to.

    ``kv`` holds (stamp, start, end) over positions of prompt and output, from 0 on; None where it was not recorded.
    """

    stamp: Stamp
    start: int
    end: int
    kv: tuple[tuple[Stamp, int, int], ...] | None


@dataclass(frozen=True)
class Rollout:
    """One output sequence of a recorded response.

    Attributes:
        place: file, line and choice, for messages.
        engine_index: which engine's commit numbers these are.
        prompt_ids, output_ids: token ids.
        logprobs: as reported, one for each output token.
        sampling_params: of the request, as the client sent them.
        segments: cover the output.
    """

    place: str
    engine_index: int
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    sampling_params: Mapping[str, Any]
    segments: list[StampedSegment]


def read_recordings(path: Path) -> Iterator[tuple[str, Rollout | RecordingError]]:
    """Yields each rollout of a file, or why a line or a choice of it is none, with its place.

    A line is ``{"request": BODY, "response": BODY}`` of POST /inference/v1/generate without ``stream``; the response
    must hold log-probs (``"logprobs": 0`` or more in the request).

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                request, response = _bodies(line)
                choices = _field(response, "response", "choices", list)
            except RecordingError as error:
                yield place, error
                continue
            for index, choice in enumerate(choices):
                there = f"{place} choice {index}"
                try:
                    yield there, _rollout(there, request, response, choice, f"response.choices[{index}]")
                except RecordingError as error:
                    yield there, error


def _bodies(line: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"no JSON: {error}") from None
    if not isinstance(record, dict):
        raise RecordingError('a line must be an object {"request": ..., "response": ...}')
    return _field(record, "", "request", dict), _field(record, "", "response", dict)


def _field(holder: Mapping[str, Any], where: str, name: str, kind: type) -> Any:
    value = holder.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        path = f"{where}.{name}" if where else name
        raise RecordingError(f"{path} must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def _rollout(place: str, request: dict[str, Any], response: dict[str, Any], choice: Any, where: str) -> Rollout:
    if not isinstance(choice, dict):
        raise RecordingError(f"{where} must be an object")
    output_ids = _token_ids(choice, where)
    prompt_ids = _token_ids(request, "request")
    if not prompt_ids:
        raise RecordingError("request.token_ids is empty")
    segments = _segments(choice, where, len(prompt_ids), len(output_ids))
    return Rollout(
        place,
        int(response.get("engine_index") or 0),
        prompt_ids,
        output_ids,
        _logprobs(choice, where, output_ids),
        _field(request, "request", "sampling_params", dict),
        segments,
    )


def _token_ids(holder: dict[str, Any], where: str) -> list[int]:
    ids: list[int] = _field(holder, where, "token_ids", list)
    if not all(type(token) is int and token >= 0 for token in ids):
        raise RecordingError(f"{where}.token_ids must hold token ids only")
    return ids


def _logprobs(choice: dict[str, Any], where: str, output_ids: list[int]) -> list[float]:
    if not output_ids:
        return []
    logprobs = choice.get("logprobs")
    if logprobs is None:
        raise RecordingError(f'{where}.logprobs is null: ask for them with "logprobs": 0')
    if not isinstance(logprobs, dict):
        raise RecordingError(f"{where}.logprobs must be an object")
    content = _field(logprobs, f"{where}.logprobs", "content", list)
    values: list[Any] = [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        raise RecordingError(f"{where}.logprobs.content must hold a finite logprob for each token")
    if len(values) != len(output_ids):
        raise RecordingError(f"{where} has {len(output_ids)} tokens and {len(values)} log-probs")
    return values


def _segments(choice: dict[str, Any], where: str, num_prompt: int, count: int) -> list[StampedSegment]:
    versions = _stamps(choice, where, "weight_versions", "version", str, count)
    commits = _stamps(choice, where, "weight_commits", "commit", int, count)
    if versions is None and commits is None:
        raise RecordingError(f"{where} has neither weight_versions nor weight_commits")
    stamps: list[Stamp] = [
        (None if versions is None else versions[token], None if commits is None else commits[token])
        for token in range(count)
    ]
    if choice.get("kv_versions") is None:
        starts = [token for token in range(count) if token == 0 or stamps[token] != stamps[token - 1]]
        ends = [*starts[1:], count]
        return [StampedSegment(stamps[a], a, b, None) for a, b in zip(starts, ends, strict=True)] if count else []
    return _with_kv(_field(choice, where, "kv_versions", list), f"{where}.kv_versions", stamps, num_prompt)


def _stamps(choice: dict[str, Any], where: str, name: str, key: str, kind: type, count: int) -> list[Any] | None:
    """The value for each token; None where the response has no such list."""
    if choice.get(name) is None:
        return None
    path = f"{where}.{name}"
    values: list[Any] = []
    for span in _field(choice, where, name, list):
        value = _span(span, path, len(values))
        if span.get(key) is not None and type(span[key]) is not kind:
            raise RecordingError(f"{path} must have a {key} of type {kind.__name__}")
        values += [span.get(key)] * (value - len(values))
        if len(values) > count:
            break
    if len(values) != count:
        raise RecordingError(f"{path} covers {len(values)} of {count} tokens")
    return values


def _span(span: Any, path: str, expected: int) -> int:
    """The end of a span that must start where the one before has ended."""
    start, end = (span.get("start"), span.get("end")) if isinstance(span, dict) else (None, None)
    if type(start) is not int or type(end) is not int or start != expected or not start < end < 2**40:
        raise RecordingError(f"{path} must be spans one after the other, the next from {expected} on")
    return end


def _with_kv(spans: list[Any], path: str, stamps: list[Stamp], num_prompt: int) -> list[StampedSegment]:
    segments: list[StampedSegment] = []
    for span in spans:
        start = segments[-1].end if segments else 0
        end = _span(span, path, start)
        if end > len(stamps) or len(set(stamps[start:end])) != 1:
            raise RecordingError(f"{path} {start} to {end} does not lie within one span of weights")
        inputs = num_prompt - 1 + start  # position of the first token's input
        runs: list[tuple[Stamp, int, int]] = []
        for run in _field(span, path, "kv", list):
            first = runs[-1][2] if runs else 0
            last = _span(run, f"{path}.kv", first)
            runs.append(((run.get("version"), run.get("commit")), first, last))
        if not runs or runs[-1][2] != num_prompt - 1 + end:
            raise RecordingError(f"{path}.kv must cover positions 0 to {num_prompt - 2 + end} for tokens to {end - 1}")
        if runs[-1][0] != stamps[start] or runs[-1][1] > inputs:
            raise RecordingError(
                f"{path}.kv: the KV of tokens {start} to {end - 1} is not of the weights of their span"
            )
        held = tuple((stamp, a, min(b, inputs)) for stamp, a, b in runs if a < inputs)
        segments.append(StampedSegment(stamps[start], start, end, held))
    if (segments[-1].end if segments else 0) != len(stamps):
        raise RecordingError(f"{path} covers {segments[-1].end if segments else 0} of {len(stamps)} tokens")
    return segments
