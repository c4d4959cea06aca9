"""Weights where they are in GPU memory, for engines on the same GPU, which copy them from device to device."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rollspan.trainer.server import Moved, Server
from rollspan.trainer.transfer.base import Offer, Outgoing


class CudaIpcOutgoing(Outgoing):
    """Needs no options; all tensors must be on the GPU of the engines, allocated without expandable segments."""

    name = "cuda_ipc"

    @contextmanager
    def offer(self, tensors: Mapping[str, torch.Tensor], servers: Sequence[Server], moved: Moved) -> Iterator[Offer]:
        held = {name: tensor.contiguous() for name, tensor in tensors.items()}
        torch.cuda.synchronize()
        # A handle counts one reader: each server has its own.
        yield Offer([handles(held) for _ in servers])
        moved(sum(tensor.nbytes for tensor in held.values()))
        del held
        torch.cuda.ipc_collect()


def handles(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """``update_info`` for contiguous tensors on a GPU, which must live until the update is answered.

    Raises:
        ValueError: a tensor that is not on a GPU.
    """
    described = []
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            raise ValueError(f"tensor {name!r} is on {tensor.device}: cuda_ipc sends from a GPU")
        _, memory, size, offset, counter, counter_offset, event, wait = tensor.untyped_storage()._share_cuda_()
        described.append(
            {
                "gpu_uuid": str(torch.cuda.get_device_properties(tensor.device).uuid),
                "memory": base64.b64encode(memory).decode(),
                "size": size,
                "offset": offset,
                "start": tensor.storage_offset() * tensor.element_size(),
                "counter": base64.b64encode(counter).decode(),
                "counter_offset": counter_offset,
                "event": base64.b64encode(event or b"").decode(),
                "wait": bool(wait),
            }
        )
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "handles": described,
    }
