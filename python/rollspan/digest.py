"""Content digest of a model's weights: binds a label to bits, whoever computes it and in whatever order.

Leaf of a tensor: BLAKE3(name, 0x00, dtype, 0x00, shape, 0x00, data), where name is UTF-8, dtype the code of
safetensors ("BF16"), shape its sizes in decimal joined by commas (a scalar has none), data its elements in row-major
order, little-endian. Root: BLAKE3 over (name, 0x00, leaf) of all tensors, sorted by the bytes of their names. Tied
tensors count once, under the first of their names. https://github.com/BLAKE3-team/BLAKE3-specs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from blake3 import blake3
from torch import nn

from rollspan.errors import RollspanError, cut
from rollspan.safetensors_format import CODES

PREFIX = "blake3:"
_PIECE_BYTES = 64 << 20  # of tensors on other devices, copied to the host piece by piece


def weight_digest(
    named: Mapping[str, torch.Tensor] | nn.Module, dtype: torch.dtype | None = None, *, threads: int = 1
) -> str:
    """Digest of all weights.

    Args:
        named: a model, of which parameters and persistent buffers count, or tensors by the names that they have in it.
        dtype: what floating-point tensors are converted to first; None takes them as they are.
        threads: of the hash; it takes about 0.3 s for 1 GB with one.

    Returns:
        ``"blake3:"`` and 64 hexadecimal digits.

    Raises:
        RollspanError: ``weights_invalid``, as in :func:`tensor_digest`.
    """
    leaves = {}
    for name, tensor in untied(named).items():
        cast = dtype is not None and tensor.is_floating_point()
        leaves[name] = tensor_digest(name, tensor.to(dtype) if cast else tensor, threads=threads)
    return combine(leaves)


def tensor_digest(name: str, tensor: torch.Tensor, *, threads: int = 1) -> bytes:
    """Leaf of one tensor, 32 bytes. The interpreter lock is free while it is computed.

    Raises:
        RollspanError: ``weights_invalid``: a name with a NUL or lone surrogates, a dtype that safetensors does not
            have, or a tensor without data of its own.
    """
    if tensor.dtype not in CODES or tensor.is_meta or tensor.layout != torch.strided:
        kind = f"{tensor.layout}, {tensor.dtype}, on {tensor.device}"
        raise RollspanError(f"tensor {cut(name)!r} ({kind}) has no bytes to digest", reason="weights_invalid")
    shape = ",".join(map(str, tensor.shape))
    hasher = blake3(_encoded(name) + f"\0{CODES[tensor.dtype]}\0{shape}\0".encode(), max_threads=threads)
    for piece in _pieces(tensor.detach().contiguous().reshape(-1).view(torch.uint8)):
        hasher.update(piece)
    return hasher.digest()


def combine(leaves: Mapping[str, bytes]) -> str:
    """Digest of all weights from the leaf of each, by name.

    Raises:
        RollspanError: ``weights_invalid`` for a name with a NUL or lone surrogates.
    """
    hasher = blake3()
    for name, leaf in sorted((_encoded(name), leaf) for name, leaf in leaves.items()):
        hasher.update(name + b"\0" + leaf)
    return PREFIX + hasher.hexdigest()


def untied(named: Mapping[str, torch.Tensor] | nn.Module) -> dict[str, torch.Tensor]:
    """Each tensor once, under the first name that it has: tensors are tied when they are the same memory.

    What else a module's ``state_dict`` holds (extra state of its own kind) is no weight.
    """
    if isinstance(named, nn.Module):
        named = {name: value for name, value in named.state_dict().items() if isinstance(value, torch.Tensor)}
    seen: set[object] = set()
    result = {}
    for name, tensor in named.items():
        identity: object = id(tensor)
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if identity not in seen:
            seen.add(identity)
            result[name] = tensor
    return result


def _encoded(name: str) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise RollspanError(f"{name[:64]!r} is no possible name of a tensor", reason="weights_invalid")
    return encoded


def _pieces(data: torch.Tensor) -> Iterator[memoryview]:
    """The flat bytes of ``data`` in host memory."""
    if data.device.type == "cpu":
        yield data.numpy().data
        return
    for piece in data.split(_PIECE_BYTES):
        yield piece.cpu().numpy().data
