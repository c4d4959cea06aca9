"""Connection: which transport brings weights, and the one that a trainer has joined. Runs on the worker."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch

from rollspan.errors import RollspanError, wrong_value
from rollspan.weights import transfer
from rollspan.weights.parameters import invalid
from rollspan.weights.ticket import Ticket
from rollspan.weights.transfer.base import TransferContext, Transport

#: Fields of ``update_info`` that are not the transport's.
_OURS = ("backend", "delta")


class Connection:
    """Makes transports, and keeps the one that ``init_weight_transfer_engine`` has made until it is shut down.

    Args:
        context: what transports may know of the engine.
        default: the transport of who names none.
    """

    def __init__(self, context: TransferContext, default: str) -> None:
        self._context = context
        self._default = transfer.canonical(default, "weight_transfer_backend")
        self._joined: Transport | None = None

    def init(self, info: Any, ticket: Ticket) -> None:
        """Joins a trainer; whatever was joined before is left.

        Raises:
            RollspanError: the transport's, or ``update_aborted``.
        """
        chosen = _for_this_engine("init_info", {} if info is None else info, self._context)
        name = transfer.backend_of(chosen, self._default)
        self.close()
        transport = transfer.create(name, self._context)
        try:
            with ticket.using(transport):
                transport.init(_rest(chosen))
            ticket.check()
        except BaseException:
            transport.close()
            raise
        self._joined = transport

    def receive(self, info: Any, ticket: Ticket) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The tensors that an ``update_info`` announces.

        Raises:
            RollspanError: the transport's, or ``update_aborted``.
        """
        chosen = _for_this_engine("update_info", info, self._context)
        transport = self._transport(chosen)
        try:
            with ticket.using(transport):
                yield from transport.receive(_rest(chosen))
        finally:
            if transport is not self._joined:
                transport.close()
            elif ticket.cancelled:  # it is of no use any more
                self.close()

    def source(self, info: Any) -> str:
        """Where an ``update_info`` says that tensors come from, for the history."""
        try:
            chosen = _for_this_engine("update_info", info, self._context)
            name = self._transport(chosen).name
        except RollspanError:
            return "unknown"
        place = next((chosen[key] for key in ("path", "upload", "directory") if isinstance(chosen.get(key), str)), None)
        return name if place is None else f"{name}:{place}"

    def delta_base(self, info: Any) -> tuple[int | None, str | None] | None:
        """Commit and digest that an ``update_info`` says its delta is of; None where it brings whole tensors.

        Raises:
            RollspanError: ``invalid_request`` for a base that is none.
        """
        chosen = _for_this_engine("update_info", info, self._context)
        base = chosen.get("delta")
        if base is None:
            return None
        allowed = (
            'an object with "base_commit", an integer of at least 0, or "base_digest", "blake3:" and 64 hex digits'
        )
        good = isinstance(base, Mapping) and bool(base) and set(base) <= {"base_commit", "base_digest"}
        commit, digest = (
            (base.get("base_commit"), base.get("base_digest")) if isinstance(base, Mapping) else (None, None)
        )
        good = good and (commit is not None or digest is not None)
        good = good and (commit is None or (type(commit) is int and commit >= 0))
        good = good and (digest is None or isinstance(digest, str))
        if not good:
            raise wrong_value("update_info.delta", allowed, base)
        return commit, digest

    def close(self) -> None:
        """Leaves whoever was joined."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.close()

    def _transport(self, info: Mapping[str, Any]) -> Transport:
        wanted = info.get("backend")
        name = None if wanted is None else transfer.canonical(wanted, "update_info.backend")
        if self._joined is not None and name in (None, self._joined.name):
            return self._joined
        transport = transfer.create(name or self._default, self._context)
        if transport.needs_init:
            text = f"weights cannot come by {transport.name!r} before init_weight_transfer_engine has joined the sender"
            raise RollspanError(text, reason="weights_invalid", param="update_info.backend")
        return transport


def _for_this_engine(field: str, info: Any, context: TransferContext) -> Mapping[str, Any]:
    """The object for this engine: ``info`` itself, the one of a list that is for all, or the one of its rank."""
    if isinstance(info, list) and len(info) == 1:
        info = info[0]
    elif isinstance(info, list) and context.engine_index < len(info) == context.num_engines:
        info = info[context.engine_index]
    if not isinstance(info, Mapping):
        raise invalid(f'{field} must be an object such as {{"path": DIR}}, or a list with one such object')
    return info


def _rest(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key not in _OURS}
