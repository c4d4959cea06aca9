"""Staging: the tensors of one update on their way into the model. All but :meth:`Staging.swap` runs on the worker."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from rollspan.digest import combine, tensor_digest
from rollspan.errors import RollspanError, cut
from rollspan.weights.parameters import Parameters, invalid, some
from rollspan.weights.ticket import Ticket
from rollspan.weights.transfer.delta import apply_deltas


class Derived(Protocol):
    """What keeps copies that are derived from weights: a runner."""

    def prepare(self, new: Mapping[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
        """Derives anew what depends on the parameters that are the keys, from the data that are the values.

        Called beside the steps; what it returns exchanges the result with what is in use, between two steps. Called
        once more it takes that back.
        """

    def after_commit(self) -> None:
        """Weights have changed where they are: derives everything anew. Nothing runs meanwhile."""


@dataclass(frozen=True)
class WeightDigest:
    """Content digest of all weights.

    Attributes:
        root: ``"blake3:"`` and 64 hexadecimal digits.
        leaves: digest of each weight by the first of its names.
    """

    root: str
    leaves: Mapping[str, bytes]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], known: Mapping[str, bytes]) -> WeightDigest:
        """Digests ``tensors`` but those whose leaf is ``known``."""
        leaves = {
            name: known[name] if name in known else tensor_digest(name, tensor) for name, tensor in tensors.items()
        }
        return cls(combine(leaves), leaves)


class Staging:
    """Collects an update, verifies it as a whole, and repacks what is derived from it; then it takes one swap.

    Args:
        parameters: of the model.
        in_place: write tensors into the model as they come; nobody computes with it meanwhile.
        ticket: taken back when the update is dropped.

    Attributes:
        num_tensors: received so far.
        num_bytes: of them.
        touched: weights of the model have been written over.
        pieces: calls that have brought tensors, or said that there are none.
        missing: weights that have not come; set by :meth:`verify`.
        digest: of all weights with this update in force; set by :meth:`verify`.
    """

    def __init__(self, parameters: Parameters, *, in_place: bool, ticket: Ticket) -> None:
        self._parameters = parameters
        self._in_place = in_place
        self.ticket = ticket
        self.num_tensors = self.num_bytes = self.pieces = 0
        self.touched = False
        self.missing: set[str] = set()
        self.digest: WeightDigest | None = None
        self._tensors: dict[str, torch.Tensor] = {}  # by the model's names, fitted
        self._parts: dict[str, torch.Tensor] = {}  # by a checkpoint's names, as they came
        self._whole: set[str] = set()  # the model's names under which tensors or deltas came
        self._written: dict[str, str] = {}  # first name -> the name under which it was written in place
        self._new: dict[torch.Tensor, torch.Tensor] = {}
        self._exchange: Callable[[], None] | None = None

    def receive(self, tensors: Iterable[tuple[str, torch.Tensor]], *, delta: bool) -> None:
        """Takes tensors over; of a delta, pairs of indices and values.

        Raises:
            RollspanError: ``weights_invalid``, and whatever the iterator raises.
        """
        self._unprepare()
        if delta:
            present = {name: tensor.data for name, tensor in self._parameters.named.items()}
            current = ChainMap(self._tensors, present)
            tensors = apply_deltas(self._counted(tensors), current)
        else:
            tensors = self._counted(tensors)
        for name, tensor in tensors:
            if name in self._parameters.named:
                self._whole.add(name)
                self._take(name, self._parameters.fitted(name, tensor))
            elif self._parameters.known(name):
                self._parts[name] = tensor
            else:
                raise invalid(f"tensor {cut(name)!r} is none of the model's parameters")
        self.pieces += 1

    def _counted(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self.ticket.check()
            self.num_tensors += 1
            self.num_bytes += tensor.nbytes
            yield name, tensor

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        if not self._in_place:
            self._tensors[name] = tensor
            return
        parameter = self._parameters.named[name]
        before = self._written.setdefault(self._parameters.first_name[parameter], name)
        if before == name:
            with self.ticket.holding():  # who cancels knows from then on whether anything was written
                self.touched = True
            parameter.data.copy_(tensor)
        elif not torch.equal(parameter.data, tensor.to(parameter.device)):
            raise _untied(name)

    def verify(self, known: Mapping[str, bytes], *, partial: bool, expected: str | None) -> None:
        """Checks that the update is whole and computes the digest of what it makes of the weights.

        Args:
            known: leaves of the weights in force, as far as they are known.
            partial: weights that did not come stay as they are.
            expected: the digest that it must have; None for any.

        Raises:
            RollspanError: ``weights_invalid`` or ``digest_mismatch``.
        """
        if self.digest is None:
            parts, self._parts = self._parts, {}
            for name, tensor in self._parameters.converted(parts).items():
                if name in self._whole:
                    raise invalid(f"tensor {name!r} came by its own name and by names of a checkpoint")
                self._take(name, tensor)
            if not self._in_place:
                self._merge()
            came = set(self._written) | {self._parameters.first_name[parameter] for parameter in self._new}
            self.missing = self._parameters.first.keys() - came
        if self.missing and (not partial or not self.pieces):
            listed = some(self.missing)
            raise invalid(f"the update lacks {len(self.missing)} of the model's parameters: {listed}")
        if self.digest is None:
            self.ticket.check()
            after = {name: self._new.get(tensor, tensor.data) for name, tensor in self._parameters.first.items()}
            self.digest = WeightDigest.of(after, {name: known[name] for name in self.missing if name in known})
            if not self._in_place:
                self._part_from_old()
        if expected not in (None, self.digest.root):
            text = f"the weights received have the digest {self.digest.root}, not {expected}"
            raise RollspanError(text, reason="digest_mismatch", param="weight_digest")

    def _part_from_old(self) -> None:
        """Weights that stay get memory of their own where it belongs to a larger block, which would stay with them."""
        for name in self.missing:
            parameter = self._parameters.first[name]
            data = parameter.data
            if data.device.type == "cpu" and data.untyped_storage().nbytes() > data.nbytes:
                self._new[parameter] = data.clone()

    def _merge(self) -> None:
        """One tensor for each parameter, under whatever names it came."""
        for name, tensor in self._tensors.items():
            parameter = self._parameters.named[name]
            if parameter in self._new and not torch.equal(self._new[parameter], tensor):
                raise _untied(name)
            self._new[parameter] = tensor

    def prepare(self, derived: Derived) -> None:
        """Repacks what is derived from the new weights, beside what is in use unless the update is in place."""
        self.ticket.check()
        if self._exchange is not None:
            return
        if self._in_place:
            if self.touched:  # else the weights may be in use again as soon as the update is aborted
                derived.after_commit()
            self._exchange = _nothing
        else:
            self._exchange = derived.prepare(self._new)

    def swap(self) -> None:
        """Exchanges new and old, on the engine's thread; old is what is held here afterwards.

        On the CPU pointers are swapped; on other devices data is copied, so that addresses stay, for captured graphs.
        """
        for parameter, tensor in self._new.items():
            if parameter.device.type == "cpu":
                self._new[parameter] = parameter.data
                parameter.data = tensor
            else:
                parameter.data.copy_(tensor)
        if self._exchange is not None:
            self._exchange()

    def release(self) -> None:
        """Gives back all memory."""
        self._unprepare()
        self._tensors.clear()
        self._parts.clear()

    def _unprepare(self) -> None:
        self.digest = self._exchange = None
        self._new.clear()


def _nothing() -> None:
    """Exchanges nothing: it is all in its place."""


def _untied(name: str) -> RollspanError:
    return invalid(f"tensor {name!r} differs from another tensor that the model ties it to")
