"""InputBatch: the tensors of one step, built from what the scheduler picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollspan.engine.scheduler import ScheduledRequest


@dataclass(frozen=True)
class Prefill:
    """Several query rows of one sequence.

    Attributes:
        start, stop: its rows in the step, ``stop - start`` of them.
        positions: int64 ``[stop - start]``, of the query rows; the keys are positions 0 to the last of them.
        slots: int64 ``[num_keys]``, cache slots of all its keys in order of position.
    """

    start: int
    stop: int
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class InputBatch:
    """One step as a single flattened row of T tokens: first D decodes (one token each), then the prefills.

    Attributes:
        input_ids: int64 ``[1, T]``.
        positions: int64 ``[1, T]``, counted from the start of each sequence.
        slot_mapping: int64 ``[T]``, the cache slot (block * block_size + offset) that each token's KV goes to.
        sample_rows: int64 ``[S]``, rows whose logits are needed.
        sampled: the S requests they belong to, in the same order.
        num_decodes: D.
        decode_slots: int64 ``[D, L]``, slots of the keys of each decode, padded with slot 0.
        decode_lengths: int64 ``[D]``, number of keys of each decode, its own included.
        prefills: the sequences with more than one row.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sample_rows: torch.Tensor
    sampled: list[ScheduledRequest]
    num_decodes: int
    decode_slots: torch.Tensor
    decode_lengths: torch.Tensor
    prefills: list[Prefill]

    @classmethod
    def build(cls, scheduled: Sequence[ScheduledRequest], block_size: int, device: torch.device) -> InputBatch:
        """Lays the scheduled tokens out; ``block_size`` is in tokens."""
        decodes = [entry for entry in scheduled if entry.num_tokens == 1]
        rest = [entry for entry in scheduled if entry.num_tokens > 1]
        ordered = decodes + rest
        offsets = np.arange(block_size)

        def slots_of(entry: ScheduledRequest, length: int) -> np.ndarray:
            blocks = np.asarray(entry.request.block_ids[: -(-length // block_size)], dtype=np.int64)
            return (blocks[:, None] * block_size + offsets).reshape(-1)[:length]

        ids: list[int] = []
        positions: list[np.ndarray] = []
        mapping: list[np.ndarray] = []
        sample_rows: list[int] = []
        sampled: list[ScheduledRequest] = []
        lengths = [entry.request.num_computed_tokens + entry.num_tokens for entry in ordered]
        longest = max(lengths[: len(decodes)], default=0)
        decode_slots = np.zeros((len(decodes), longest), dtype=np.int64)
        prefills: list[Prefill] = []

        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        for index, (entry, length) in enumerate(zip(ordered, lengths, strict=True)):
            request = entry.request
            start = request.num_computed_tokens
            slots = slots_of(entry, length)
            row = len(ids)
            ids += request.token_ids[start:length]
            positions.append(np.arange(start, length))
            mapping.append(slots[start:])
            if index < len(decodes):
                decode_slots[index, :length] = slots
            else:
                prefills.append(Prefill(row, len(ids), tensor(positions[-1]), tensor(slots)))
            if entry.samples:
                sample_rows.append(len(ids) - 1)
                sampled.append(entry)
        return cls(
            input_ids=torch.tensor([ids], dtype=torch.int64, device=device),
            positions=tensor(np.concatenate(positions)[None]),
            slot_mapping=tensor(np.concatenate(mapping)),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
            sampled=sampled,
            num_decodes=len(decodes),
            decode_slots=tensor(decode_slots),
            decode_lengths=torch.tensor(lengths[: len(decodes)], dtype=torch.int64, device=device),
            prefills=prefills,
        )
