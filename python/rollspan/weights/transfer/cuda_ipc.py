"""Weights in GPU memory that a trainer on the same GPU shares by plain handles, copied from device to device.

A handle is what torch's storages share between processes, field by field; nothing of it is ever unpickled.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch

from rollspan.errors import RollspanError, cut, shown
from rollspan.weights.transfer.announced import FIELDS, Announced, announced, invalid
from rollspan.weights.transfer.base import Transport, check_keys

#: Bytes of the driver's handles; torch puts a version and a kind before that of memory. Handles of expandable segments
#: are longer: they hold descriptors of another process, and are refused.
_MEMORY_BYTES = (64, 66)
_EVENT_BYTES = (0, 64)
#: torch's shared memory of reference counters, 8 bytes each.
_COUNTER_NAME = re.compile(rb"/torch_[0-9A-Za-z_]{1,200}")
_COUNTERS = 10_000
_PICKLED = ("ipc_handles", "ipc_handles_pickled")


class CudaIpcTransport(Transport):
    """``update_info`` has vLLM's ``names``, ``dtype_names`` and ``shapes``, and ``handles``: for each tensor an object.

    | field | what |
    |---|---|
    | gpu_uuid | the GPU that holds it, as ``torch.cuda.get_device_properties(i).uuid``; must be the engine's |
    | memory, size, offset | base64 of the handle of an allocation; bytes and place in it of the tensor's storage |
    | start | bytes from the storage's beginning to the tensor, which is contiguous |
    | counter, counter_offset | base64 of the name of the memory that holds the reference count, and which one it is |
    | event, wait | base64 of the handle of the event after which the data is there; whether to wait for it |

    The trainer keeps the tensors until the update is answered; then they have been copied.
    """

    name = "cuda_ipc"

    def init(self, info: Mapping[str, Any]) -> None:
        _refuse_pickled("init_info", info)
        check_keys("init_info", {**info, "packed": info.get("packed") or None}, ())  # vLLM's trainers say false
        self._require_cuda()

    def receive(self, info: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        _refuse_pickled("update_info", info)
        check_keys("update_info", info, (*FIELDS, "handles"))
        tensors = announced(info, self.context.largest_update)
        handles = info.get("handles")
        if not isinstance(handles, list) or len(handles) != len(tensors):
            raise invalid(f"update_info.handles must be a list of {len(tensors)} objects, one for each name", "handles")
        pairs = zip(handles, tensors, strict=True)
        parsed = [_Handle(index, handle, entry) for index, (handle, entry) in enumerate(pairs)]
        self._require_cuda()
        uuid = str(torch.cuda.get_device_properties(self.context.device).uuid)
        for handle in parsed:
            if handle.gpu_uuid.removeprefix("GPU-") != uuid.removeprefix("GPU-"):
                text = f"is on GPU {cut(handle.gpu_uuid)}, the engine on {uuid}: use distributed or shm"
                raise invalid(f"update_info.handles[{handle.index}] {text}", "handles")
        return self._copy(parsed)

    def _copy(self, handles: list[_Handle]) -> Iterator[tuple[str, torch.Tensor]]:
        device = self.context.device
        for handle in handles:
            self.check_cancelled()
            entry = handle.entry
            if not entry.nbytes:
                yield entry.name, torch.empty(entry.shape, dtype=entry.dtype, device=device)
                continue
            try:
                with torch.cuda.device(device):
                    copied = handle.open(torch.cuda.current_device()).clone()
                    torch.cuda.current_stream().synchronize()  # the trainer may write to it as soon as this is answered
            except RuntimeError as error:
                text = (str(error).splitlines() or ["unknown error"])[0][:200]
                raise invalid(f"update_info.handles[{handle.index}] cannot be opened: {text}", "handles") from None
            yield entry.name, copied

    def _require_cuda(self) -> None:
        if self.context.device.type != "cuda":
            text = f"cuda_ipc needs an engine on a GPU, this one computes on {self.context.device}: use shm"
            raise RollspanError(text, reason="weights_invalid", param="update_info.backend")


class _Handle:
    """One checked element of ``handles``."""

    def __init__(self, index: int, fields: Any, entry: Announced) -> None:
        where = f"update_info.handles[{index}]"
        if not isinstance(fields, Mapping):
            raise invalid(f"{where} must be an object, got {shown(fields)}", "handles")
        known = "gpu_uuid memory size offset start counter counter_offset event wait"
        check_keys(where, fields, tuple(known.split()))
        self.index = index
        self.entry = entry
        uuid = fields.get("gpu_uuid")
        if not isinstance(uuid, str):
            raise invalid(f"{where}.gpu_uuid must be a string, got {shown(uuid)}", "handles")
        self.gpu_uuid = uuid
        self._memory = _bytes(where, fields, "memory", _MEMORY_BYTES)
        self._event = _bytes(where, fields, "event", _EVENT_BYTES)
        self._counter = _bytes(where, fields, "counter", range(1, 256))
        if not _COUNTER_NAME.fullmatch(self._counter):
            raise invalid(f"{where}.counter must be base64 of the name of torch's shared memory", "handles")
        self._size = _number(where, fields, "size", 2**48)
        self._offset = _number(where, fields, "offset", 2**48)
        self._start = _number(where, fields, "start", 2**48)
        self._counter_offset = _number(where, fields, "counter_offset", _COUNTERS - 1)
        self._wait = fields.get("wait")
        if not isinstance(self._wait, bool):
            raise invalid(f"{where}.wait must be true or false, got {shown(self._wait)}", "handles")
        if self._start + entry.nbytes > self._size or self._start % entry.dtype.itemsize:
            text = f"{where} puts {entry.nbytes} bytes at {self._start} of a storage of {self._size} bytes"
            raise invalid(text, "handles")

    def open(self, device: int) -> torch.Tensor:
        """The trainer's tensor itself."""
        storage = torch.UntypedStorage._new_shared_cuda(
            device,
            self._memory,
            self._size,
            self._offset,
            self._counter,
            self._counter_offset,
            self._event,
            self._wait,
        )
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
        flat.set_(storage, self._start, (self.entry.nbytes,), (1,))
        return flat.view(self.entry.dtype).reshape(self.entry.shape)


def _bytes(where: str, fields: Mapping[str, Any], field: str, sizes: Container[int]) -> bytes:
    value = fields.get(field)
    try:
        data = base64.b64decode(value, validate=True) if isinstance(value, str) and len(value) <= 1024 else None
    except ValueError:
        data = None
    if data is None or len(data) not in sizes:
        raise invalid(f"{where}.{field} must be base64 of a handle, got {shown(value)}", "handles")
    return data


def _number(where: str, fields: Mapping[str, Any], field: str, most: int) -> int:
    value = fields.get(field)
    if type(value) is not int or not 0 <= value <= most:
        raise invalid(f"{where}.{field} must be an integer from 0 to {most}, got {shown(value)}", "handles")
    return value


def _refuse_pickled(where: str, info: Mapping[str, Any]) -> None:
    for field in _PICKLED:
        if info.get(field) is not None:
            text = f"{where}.{field} is not supported, for it holds pickled objects: send {where}.handles"
            raise RollspanError(text, reason="unsupported_field", param=f"{where}.{field}")
