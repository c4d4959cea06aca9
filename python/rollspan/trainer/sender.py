"""WeightSender: brings a trainer's weights to one or more servers as one update."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from rollspan.digest import combine, tensor_digest
from rollspan.process_group import GroupError
from rollspan.trainer import transfer
from rollspan.trainer.progress import TransferBar
from rollspan.trainer.server import Loop, Server, WeightSendError
from rollspan.trainer.weights import sparse_difference, tensors_of, total_bytes

logger = logging.getLogger("rollspan.trainer")

Source = nn.Module | Mapping[str, torch.Tensor]
Progress = Callable[[int, int], None]
_CLEANUP_SECONDS = 10.0
_MISMATCH_HINT = (
    "; where nothing was damaged on the way, the engine has other names or dtypes than what was sent: "
    "pass tensors by the model's names and its dtype, or digest=False"
)


@dataclass(frozen=True)
class SentWeights:
    """An update that is in force.

    Attributes:
        weight_version: its label.
        weight_commits: its commit number at each server.
        weight_digest: of all weights now in force.
        num_tensors: that were sent; of a delta, indices and values.
        num_bytes: of them.
        seconds: it took in all.
    """

    weight_version: str
    weight_commits: tuple[int, ...]
    weight_digest: str
    num_tensors: int
    num_bytes: int
    seconds: float


class WeightSender:
    """Sends weights to servers; generation there goes on meanwhile.

        with WeightSender("http://127.0.0.1:8000", transport="disk", directory="/checkpoints/live") as sender:
            for step in range(steps):
                train(model)
                sender.send(model, weight_version=f"step-{step}")

    An update takes place at every server or, when anything fails before the last call, at none: a failure aborts it
    everywhere. One sender has one update at a time.

    Args:
        urls: one server or several, each of which may have several engines.
        transport: disk, http, shm, distributed or cuda_ipc; ``options`` are those of its class in
            ``rollspan.trainer.transfer``.
        dtype: what floating-point tensors are sent as; None for the dtype of the first server's model.
        digest: state what the digest of the weights must be, so that the servers refuse anything else.
        keep_last: keep a copy of what was sent in host memory, for ``delta_base="last"``.
        api_key: of the servers.
        timeout: seconds for the answer to one call.
        progress: called with bytes done and bytes in all; True shows a bar on standard error.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        transport: str = "disk",
        dtype: torch.dtype | None = None,
        digest: bool = True,
        keep_last: bool = False,
        api_key: str | None = None,
        timeout: float = 600.0,
        progress: Progress | bool = False,
        **options: Any,
    ) -> None:
        addresses = [urls] if isinstance(urls, str) else list(urls)
        if not addresses:
            raise ValueError("urls must name at least one server")
        self._transport = transfer.create(transport, options)
        self._loop = Loop()
        try:
            self._servers = [Server(self._loop, url, api_key, timeout) for url in addresses]
        except ValueError:
            self._loop.close()
            raise
        self._dtype = dtype
        self._digest = digest
        self._keep_last = keep_last
        self._progress = TransferBar(sys.stderr) if progress is True else progress or _silent
        self._leaves: dict[str, bytes] = {}  # of the weights in force, if this sender has brought all of them
        self._last: dict[str, torch.Tensor] = {}
        self._last_digest: str | None = None
        self._closed = False

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def send(
        self,
        source: Source,
        weight_version: str | None = None,
        *,
        partial: bool = False,
        delta_base: Literal["last"] | Source | None = None,
        mode: Literal["staged", "in_place"] | None = None,
    ) -> SentWeights:
        """Makes these weights those of all servers, and returns when they are in force.

        Args:
            source: a model, or tensors by the names of the engine's model or its checkpoints.
            weight_version: their label; None keeps the one in force.
            partial: weights that are not in ``source`` stay as they are.
            delta_base: send only the elements that differ from what was sent last (needs ``keep_last``), or from other
                tensors, where every server has exactly those; where one has not, everything is sent.
            mode: of the update; None for the servers' default. ``in_place`` needs them paused.

        Raises:
            WeightSendError: the update did not take place.
            RollspanError: ``weights_invalid``: these tensors cannot be sent.
        """
        started = time.monotonic()
        for server in self._servers:
            server.greet()
        dtype = self._dtype or self._servers[0].dtype
        tensors = tensors_of(source, dtype)
        base = self._base(delta_base, dtype)
        sent: SentWeights | None = None
        if base is not None:
            sent = self._send_delta(tensors, base, weight_version, mode, started)
        if sent is None:
            sent = self._update(tensors, tensors, weight_version, partial, None, mode, started)
        if self._keep_last:
            self._remember(tensors)
        return sent

    def _base(self, given: Any, dtype: torch.dtype | None) -> tuple[Mapping[str, torch.Tensor], str] | None:
        """Tensors and digest that a delta starts from; None where everything is to be sent."""
        if given is None:
            return None
        if isinstance(given, str):
            if given != "last":
                raise ValueError(f'delta_base must be "last", a model or tensors, got {given!r}')
            if not self._keep_last:
                raise ValueError('delta_base="last" needs a sender with keep_last=True')
            return None if self._last_digest is None else (self._last, self._last_digest)
        base = tensors_of(given, dtype)
        self._leaves = _leaves(base)
        return base, combine(self._leaves)

    def _send_delta(
        self,
        tensors: dict[str, torch.Tensor],
        base: tuple[Mapping[str, torch.Tensor], str],
        label: str | None,
        mode: str | None,
        started: float,
    ) -> SentWeights | None:
        """Sends what has changed; None where everything would be less, or a server has another base."""
        pairs, changed = sparse_difference(tensors, base[0])
        if total_bytes(pairs) >= total_bytes(tensors):
            return None
        new = {name: tensors[name] for name in changed}
        try:
            return self._update(pairs, new, label, True, base[1], mode, started)
        except WeightSendError as error:
            if error.reason != "base_mismatch":
                raise
            logger.warning("%s; all weights are sent", error)
            return None

    def _update(
        self,
        payload: Mapping[str, torch.Tensor],
        new: Mapping[str, torch.Tensor],
        label: str | None,
        partial: bool,
        base_digest: str | None,
        mode: str | None,
        started: float,
    ) -> SentWeights:
        """One update: ``payload`` is what goes out, ``new`` are the weights that it brings."""
        total = total_bytes(payload)
        done = 0

        def moved(count: int) -> None:
            nonlocal done
            done += count
            self._progress(done, total)

        moved(0)
        opened: list[Server] = []
        try:
            self._transport.connect(self._servers)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                hashing = pool.submit(_leaves, new) if self._digest else None
                for server in self._servers:
                    self._start(server, mode, opened)
                self._hand_over(payload, base_digest, moved)
                leaves = None if hashing is None else hashing.result()
            answers = self._finish(label, self._expected(leaves, partial), partial, opened)
        except BaseException:
            for server in opened:
                server.quietly("POST", "/abort_weight_update", _CLEANUP_SECONDS)
            raise
        self._known(leaves, partial, answers[0]["weight_digest"])
        moved(total - done)
        return SentWeights(
            weight_version=answers[0]["weight_version"],
            weight_commits=tuple(answer["weight_commit"] for answer in answers),
            weight_digest=answers[0]["weight_digest"],
            num_tensors=len(payload),
            num_bytes=total,
            seconds=time.monotonic() - started,
        )

    def _start(self, server: Server, mode: str | None, opened: list[Server]) -> None:
        """Opens the update; ``opened`` are the servers where it may be open afterwards, whatever happened."""
        try:
            server.call("POST", "/start_weight_update", None if mode is None else {"mode": mode})
        except BaseException as error:
            if not (isinstance(error, WeightSendError) and error.reason == "update_active"):  # it is another's
                opened.append(server)
            raise
        opened.append(server)

    def _hand_over(self, payload: Mapping[str, torch.Tensor], base_digest: str | None, moved: Any) -> None:
        with self._transport.offer(payload, self._servers, moved) as offer:
            calls = []
            for server, info in zip(self._servers, offer.infos, strict=True):
                body = {"backend": self._transport.name, **info}
                if base_digest is not None:
                    body["delta"] = {"base_digest": base_digest}
                path, repeat = "/update_weights", self._transport.repeatable
                calls.append(server.begin("POST", path, {"update_info": body}, repeat=repeat))
            try:
                failure: GroupError | None = None
                try:
                    offer.transmit(calls)
                except GroupError as error:
                    failure = error
                for server, call in zip(self._servers, calls, strict=True):
                    server.result(call)
                if failure is not None:
                    raise WeightSendError(str(failure), url=self._servers[0].url, reason="transfer_failed")
            finally:
                for call in calls:
                    call.cancel()

    def _expected(self, leaves: Mapping[str, bytes] | None, partial: bool) -> str | None:
        """Digest of all weights after the update, as far as it can be known here."""
        if leaves is None or (partial and not self._leaves):
            return None
        return combine({**self._leaves, **leaves} if partial else leaves)

    def _finish(
        self, label: str | None, expected: str | None, partial: bool, opened: list[Server]
    ) -> list[dict[str, Any]]:
        body = {"weight_version": label, "weight_digest": expected, "partial": partial}
        body = {name: value for name, value in body.items() if value not in (None, False)}
        answers: list[dict[str, Any]] = []
        known, self._leaves = self._leaves, {}  # whatever a failure leaves there, nothing is known of it
        for server in self._servers:
            try:
                # Only a named finish has the same answer when it reaches the server again.
                answers.append(server.call("POST", "/finish_weight_update", body, repeat=label is not None))
            except WeightSendError as error:
                text = str(error)[len(server.url) + 2 :]
                if error.reason == "digest_mismatch":
                    text += _MISMATCH_HINT
                if answers:
                    text += f"; {len(answers)} of {len(self._servers)} servers have the new weights already"
                raise WeightSendError(text, url=server.url, reason=error.reason) from None
            opened.remove(server)
        self._leaves = known
        return answers

    def _known(self, leaves: Mapping[str, bytes] | None, partial: bool, digest: str) -> None:
        self._last_digest = digest
        if leaves is None or (partial and not self._leaves):
            self._leaves = {}
        else:
            self._leaves = {**self._leaves, **leaves} if partial else dict(leaves)

    def _remember(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            kept = self._last.get(name)
            if kept is None or (kept.dtype, kept.shape) != (tensor.dtype, tensor.shape):
                self._last[name] = tensor.to("cpu", copy=True)
            else:
                kept.copy_(tensor)

    def close(self) -> None:
        """Leaves the servers; may be called twice."""
        if not self._closed:
            self._closed = True
            self._transport.close(self._servers)
            for server in self._servers:
                server.close()
            self._loop.close()


def _leaves(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    threads = min(8, os.cpu_count() or 1)
    return {name: tensor_digest(name, tensor, threads=threads) for name, tensor in tensors.items()}


def _silent(done: int, total: int) -> None:
    """Shows nothing."""
