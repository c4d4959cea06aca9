"""Weights broadcast by a trainer: Gloo to a model in host memory, NCCL to one on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rollspan.errors import RollspanError, shown
from rollspan.process_group import BroadcastGroup, GroupError
from rollspan.weights.transfer.announced import FIELDS, Announced, announced, invalid, packets
from rollspan.weights.transfer.base import Transport, check_keys
from rollspan.weights.transfer.mapped_file import ALIGNMENT
from rollspan.weights.transfer.memory import new_tensor

PACKED_BYTES = 1 << 30
_PACKED_FIELDS = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
_UNIQUE_ID = "nccl_unique_id_b64"


@dataclass(frozen=True)
class _Packing:
    """Whether tensors come packed, and how large a packet is at most before its last tensor."""

    packed: bool = False
    limit: int = PACKED_BYTES

    def changed(self, where: str, info: Mapping[str, Any]) -> _Packing:
        packed, limit, buffers = (info.get(field) for field in _PACKED_FIELDS)
        if packed is not None and not isinstance(packed, bool):
            raise invalid(f"{where}.packed must be true or false, got {shown(packed)}", "packed", where)
        for field, value in zip(_PACKED_FIELDS[1:], (limit, buffers), strict=True):
            if value is not None and (type(value) is not int or not 1 <= value < 2**48):
                raise invalid(f"{where}.{field} must be an integer of at least 1, got {shown(value)}", field, where)
        return _Packing(self.packed if packed is None else packed, limit or self.limit)


class DistributedTransport(Transport):
    """The trainer is rank 0 of a group that its engines join.

    ``init_info`` and ``update_info`` have vLLM's fields: ``master_address``, ``master_port``, ``world_size`` (trainer
    and all engines), ``rank_offset`` (the first engine's rank, default 1), and how tensors are ``packed``; then
    ``names``, ``dtype_names`` and ``shapes``, all empty for those of the update before. Tensors are broadcast in that
    order, each flat and contiguous, packed or one by one; the next is under way while one is taken over.
    """

    name = "distributed"
    needs_init = True
    _group: BroadcastGroup | None = None
    _packing = _Packing()
    _previous: list[Announced] | None = None

    def init(self, info: Mapping[str, Any]) -> None:
        if info.get(_UNIQUE_ID) is not None:
            text = f"init_info.{_UNIQUE_ID} is not supported: give master_address and master_port of a TCPStore"
            raise RollspanError(text, reason="unsupported_field", param=f"init_info.{_UNIQUE_ID}")
        known = ("master_address", "master_port", "rank_offset", "world_size", *_PACKED_FIELDS)
        check_keys("init_info", info, known)
        address = info.get("master_address")
        if not isinstance(address, str) or not 1 <= len(address) <= 255 or not address.isprintable():
            raise invalid(
                f"init_info.master_address must be a host name, got {shown(address)}", "master_address", "init_info"
            )
        port = _number(info, "master_port", 1, 65535)
        size = _number(info, "world_size", 2, 65536)
        rank = _number(info, "rank_offset", 1, size - 1, default=1) + self.context.engine_index
        if rank >= size:
            text = f"init_info.world_size is {size}, but engine {self.context.engine_index} would have rank {rank}"
            raise invalid(text, "world_size", "init_info")
        self._packing = _Packing().changed("init_info", info)
        self.check_cancelled()
        try:
            self._group = BroadcastGroup(
                address,
                port,
                rank,
                size,
                device=self.context.device,
                timeout=self.context.timeout,
                cancelled=self._cancelled,
            )
        except GroupError as error:
            raise self._failed(error) from None

    def receive(self, info: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        check_keys("update_info", info, (*FIELDS, *_PACKED_FIELDS))
        if self._group is None:
            text = "no group was joined, or it was given up after a failure: call init_weight_transfer_engine"
            raise RollspanError(text, reason="transfer_failed", param="update_info.backend")
        packing = self._packing.changed("update_info", info)
        tensors = announced(info, self.context.largest_update)
        if not tensors:
            if self._previous is None:
                raise invalid("update_info.names is required in the first update", "names")
            tensors = self._previous
        self._previous = tensors
        parts = packets(tensors, packing.limit) if packing.packed else [[tensor] for tensor in tensors]
        try:
            yield from self._receive(self._group, parts)
        except GroupError as error:
            raise self._failed(error) from None
        except GeneratorExit:
            self.close()  # who gives up in the middle is not where the trainer is
            raise

    def _receive(self, group: BroadcastGroup, parts: list[list[Announced]]) -> Iterator[tuple[str, torch.Tensor]]:
        running: deque[tuple[Any, torch.Tensor, list[Announced]]] = deque()
        for part in (*parts, None):
            if part is not None:
                buffer = self._buffer(sum(entry.nbytes for entry in part))
                running.append((group.broadcast(buffer), buffer, part))
                if len(running) < 2:
                    continue
            work, buffer, arrived = running.popleft()
            group.wait(work)
            yield from _unpacked(buffer, arrived)

    def _buffer(self, count: int) -> torch.Tensor:
        if self.context.device.type == "cpu":
            return new_tensor((count,), torch.uint8)
        return torch.empty(count, dtype=torch.uint8, device=self.context.device)

    def _failed(self, error: GroupError) -> RollspanError:
        self.close()
        self.check_cancelled()
        return RollspanError(f"weights by broadcast: {error}", reason="transfer_failed")

    def cancel(self) -> None:
        super().cancel()
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _unpacked(buffer: torch.Tensor, tensors: list[Announced]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the buffer, or copies where they would lie crooked."""
    start = 0
    for entry in tensors:
        flat = buffer[start : start + entry.nbytes]
        if start % ALIGNMENT:
            flat = flat.clone()
        start += entry.nbytes
        yield entry.name, flat.view(entry.dtype).reshape(entry.shape)


def _number(info: Mapping[str, Any], field: str, low: int, high: int, default: int | None = None) -> int:
    value = info.get(field)
    if value is None and default is not None:
        return default
    if type(value) is not int or not low <= value <= high:
        allowed = f"an integer from {low} to {high}"
        raise invalid(f"init_info.{field} must be {allowed}, got {shown(value)}", field, "init_info")
    return value
