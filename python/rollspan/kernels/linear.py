"""Linear layers for the CPU, with the weights of several side by side in a layout that multiplies faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rollspan.kernels import native

#: Rows that the layout is chosen for; it serves any number.
_TYPICAL_ROWS = 32
#: Products (rows times elements of the weights) up to which multiplying by the weights as they are is quicker: calling
#: oneDNN takes 20 us. For one and two rows, where reading the weights is all that takes time, it always is.
_FEW_PRODUCTS = 1 << 19


def packs(dtype: torch.dtype) -> bool:
    """Whether repacking a weight of this type makes multiplying by it faster on this CPU (1.3 to 2 times)."""
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear:
    """``x -> x W^T + b`` with one or more weights side by side, in the layout that oneDNN multiplies by.

    Args:
        weights: ``[N_i, K]`` each; parameters, whose present data is packed by :meth:`refresh`.
        biases: ``[N_i]`` each, None for none.
        transposed: the weights are ``[K, N_i]``.
    """

    __name__ = "packed_linear"  # a node of a graph calls something that has a name

    def __init__(self, weights: list[Tensor], biases: list[Tensor | None], *, transposed: bool = False) -> None:
        self._weights = weights
        self._biases = biases
        self._transposed = transposed
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._depth = weights[0].shape[0 if transposed else 1]
        self._outputs = sum(weight.numel() for weight in weights) // self._depth
        self._read = native.module().linear if native.available() else None
        self._few_rows = 0
        self._packed: Tensor | None = None
        self._bias: Tensor | None = None
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Memory of the packed copy."""
        return sum(weight.nbytes for weight in self._weights)

    def refresh(self) -> None:
        """Packs the weights as they are now."""
        self._packed = None  # so that there are never two copies
        self._packed, self._bias, self._few_rows = self._pack({})

    def prepare(self, new: Mapping[Tensor, Tensor]) -> Callable[[], None] | None:
        """Packs what the weights and biases that are keys of ``new`` are to be, beside what is in use.

        Returns:
            What exchanges the result with what is in use; None when nothing of it is new.
        """
        if not any(tensor is not None and tensor in new for tensor in (*self._weights, *self._biases)):
            return None
        other = self._pack(new)

        def exchange() -> None:
            nonlocal other
            present = self._packed, self._bias, self._few_rows
            (self._packed, self._bias, self._few_rows), other = other, present

        return exchange

    def drop(self) -> None:
        """Gives the packed copy back; nothing may be multiplied before it is made anew."""
        self._packed = self._bias = None

    def _pack(self, new: Mapping[Tensor, Tensor]) -> tuple[Tensor | None, Tensor | None, int]:
        """Packed weights, bias, and the number of rows up to which the weights themselves are read."""
        weights = [new.get(weight, weight) for weight in self._weights]
        columns = [weight.t() if self._transposed else weight for weight in weights]
        merged_bias = self._biases[0]  # of a single weight it is the parameter itself, whatever its data are
        with torch.no_grad():
            merged = torch.cat(columns).contiguous() if len(columns) > 1 else columns[0].detach().contiguous()
            packed = torch.ops.mkldnn._reorder_linear_weight(merged, _TYPICAL_ROWS)
            if len(columns) > 1 and any(bias is not None for bias in self._biases):
                rows = [column.new_zeros(column.shape[0]) for column in columns]
                merged_bias = torch.cat(
                    [row if bias is None else new.get(bias, bias) for row, bias in zip(rows, self._biases, strict=True)]
                )
        few_rows = 0
        if self._read is not None and not self._transposed and all(weight.is_contiguous() for weight in weights):
            few = max(2, _FEW_PRODUCTS // (self._depth * self._outputs))
            few_rows = min(few, native.module().linear_rows())
        return packed, merged_bias, few_rows

    def __call__(self, x: Tensor) -> Tensor:
        """``x [..., K] -> [..., N]``."""
        rows = x.numel() // self._depth
        # A step of prompt pieces only has no row to multiply by the last weight.
        if not 0 < rows <= self._few_rows or self._read is None or not x.is_contiguous():
            return self._multiply(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]
        output = torch.empty((*x.shape[:-1], self._outputs), dtype=x.dtype)
        matrices = [
            (weight.data_ptr(), weight.shape[0], 0 if bias is None else bias.data_ptr())
            for weight, bias in zip(self._weights, self._biases, strict=True)
        ]
        self._read(rows, self._depth, x.data_ptr(), self._depth, matrices, output.data_ptr())
        return output
