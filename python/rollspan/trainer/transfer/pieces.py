"""Tensors as the bytes of a safetensors file, piece by piece, from wherever they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rollspan.safetensors_format import make_header

_ALIGNMENT = 64
_COPY_BYTES = 64 << 20  # of tensors on a GPU that are in host memory at a time


def file_pieces(tensors: Mapping[str, torch.Tensor]) -> tuple[int, Iterator[memoryview]]:
    """Bytes of the whole file, and the file in pieces.

    Tensors whose size would shift all that follow out of their alignment come last, so that an engine can use the
    others where they lie.

    Raises:
        SafetensorsError: a dtype that the format does not have.
    """
    ordered = sorted(tensors.items(), key=lambda item: item[1].nbytes % _ALIGNMENT != 0)
    header = make_header((name, tensor.dtype, tensor.shape) for name, tensor in ordered)
    size = len(header) + sum(tensor.nbytes for _, tensor in ordered)

    def pieces() -> Iterator[memoryview]:
        yield memoryview(header)
        for _, tensor in ordered:
            yield from tensor_pieces(tensor)

    return size, pieces()


def tensor_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of one tensor, row by row; of one on the CPU they are its own memory where it is contiguous."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        if len(flat):
            yield flat.numpy().data
        return
    for part in flat.split(_COPY_BYTES):
        yield part.cpu().numpy().data
