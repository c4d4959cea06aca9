"""WeightManager: the only writer of weights, label and commit; a commit is between two steps, the rest beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn

from rollspan.config import EngineConfig
from rollspan.errors import RollspanError, check_label
from rollspan.weights.connection import Connection
from rollspan.weights.history import Commit
from rollspan.weights.holder import WeightHolder
from rollspan.weights.operations import Operation
from rollspan.weights.options import FinishOptions, start_mode
from rollspan.weights.staging import Derived, Staging
from rollspan.weights.ticket import Ticket
from rollspan.weights.transfer.base import TransferContext
from rollspan.weights.update import Update
from rollspan.weights.worker import Worker

T = TypeVar("T")
#: Seconds that a transfer which makes no progress has beyond the limit, to say by itself what keeps it.
_GRACE = 2.0


class CommitListener(Protocol):
    """What has to know of commits: the engine."""

    def weights_change(self) -> None:
        """Other weights are about to come into force."""

    def weights_changed(self) -> None:
        """Other weights are in force."""

    def weights_settled(self) -> None:
        """An update has ended, in one way or the other."""


class WeightManager(WeightHolder):
    """Stages an update beside the weights in use and publishes it as a whole.

    An update is ``start``, any number of ``update``, perhaps ``prepare``, then ``finish``. All methods are called on
    the engine's thread; those that take time answer with a future, whose work is done by the worker and whose effects
    take place in :meth:`poll`. Whatever fails, is aborted or takes too long drops the update; the weights in force
    stay. Only an update in place can leave a mixture: then the state is ``inconsistent`` until a complete update.

    Args:
        model: whose parameters and persistent buffers are the weights.
        config: label, root, limits and defaults.
        worker: does what takes time.
        derived: keeps what is derived from the weights.
        listener: is told of commits.
    """

    def __init__(
        self, model: nn.Module, config: EngineConfig, worker: Worker, derived: Derived, listener: CommitListener
    ) -> None:
        super().__init__(model, config, worker)
        self._config, self._derived, self._listener = config, derived, listener
        self._finished: tuple[str, dict[str, Any]] | None = None  # label that the last finish named, and its answer
        context = TransferContext(
            root=None if config.weights_root is None else Path(config.weights_root),
            spool=None if config.weights_spool is None else Path(config.weights_spool),
            device=self._parameters.device,
            engine_index=config.engine_index,
            num_engines=config.num_engines,
            timeout=config.weight_update_timeout,
            parameters=self._parameters.specs,
        )
        self._connection = Connection(context, config.weight_transfer_backend)

    @property
    def staging_bytes(self) -> int:
        """Bytes that an update takes beside the weights in use, what is derived from them not counted."""
        in_place = self._config.weight_update_mode == "in_place"
        return self._parameters.largest if in_place else self._parameters.nbytes

    def describe(self) -> dict[str, Any]:
        """What ``get_weight_history`` answers."""
        return {
            "engine_index": self._config.engine_index,
            "mode": self._config.weight_update_mode,
            "staging_bytes": self.staging_bytes,
            **self.describe_state(),
        }

    # Time

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds at which :meth:`poll` has to be called although nothing is done; None for no such time."""
        return min(filter(None, (self._silent_at, self._operations.stuck_at)), default=None)

    @property
    def _silent_at(self) -> float | None:
        """When who sends weights, or is to, will have kept silent for too long."""
        limit = self._config.weight_update_timeout
        awaited = self._operations.awaited
        if awaited is not None:
            return awaited.moved + limit + _GRACE
        if self.opened is None or self._operations.busy:
            return None
        return self.opened.staging.ticket.moved + limit

    def due(self) -> bool:
        """True when :meth:`poll` has something to do."""
        return self._operations.due or _past(self.deadline)

    def poll(self) -> None:
        """Takes over what the worker has done and gives it what is next; a commit takes place in here."""
        if self._operations.due:
            self._operations.advance()
        elif _past(self._operations.stuck_at):
            self._operations.relieve()
        elif _past(self._silent_at):
            text = f"nothing was received for {self._config.weight_update_timeout:g} s (--weight-update-timeout)"
            if self.opened is not None:
                self._abort(f"the weight update was dropped: {text}")
            else:
                self._operations.cancel(self._connection, RollspanError(text, reason="transfer_failed"))

    # Senders

    def init(self, info: Any = None) -> Future[None]:
        """Joins a trainer; an ``init`` that still waits for its own is given up.

        Raises:
            RollspanError: ``update_active``. In the future: the transport's.
        """
        self._require_none_open("join a sender")
        self._leave_sender("another init_weight_transfer_engine came")
        ticket = Ticket()
        work = partial(self._connection.init, info, ticket)
        return self._operations.add(Operation(lambda: work, owner=self._connection, sender=ticket))

    def shut_down_transfer(self) -> Future[None]:
        """Leaves the trainer that was joined, or gives up joining.

        Raises:
            RollspanError: ``update_active``.
        """
        self._require_none_open("leave the sender")
        self._leave_sender("the weight transfer was shut down")
        return self._operations.add(Operation(lambda: self._connection.close))

    def _leave_sender(self, why: str) -> None:
        self._operations.cancel(self._connection, RollspanError(why, reason="update_aborted"))

    # An update

    def start(self, options: Any = None, *, quiet: bool = False) -> None:
        """Opens an update.

        Args:
            options: ``{"mode": "staged" or "in_place"}``, or None for the mode of the configuration.
            quiet: a pause is in force under which nothing runs.

        Raises:
            RollspanError: ``update_active`` when one is open already; it goes on. ``pause_required``,
                ``engine_sleeping``, ``invalid_request``.
        """
        mode = start_mode(options, self._config.weight_update_mode)
        if self.updating:
            text = "a weight update is already active: finish it, or drop it with abort_weight_update"
            raise RollspanError(text, reason="update_active")
        if "weights" in self.asleep:
            raise RollspanError("the weights sleep: wake them up before they are updated", reason="engine_sleeping")
        if mode == "in_place" and not quiet:
            text = "an update in place needs a pause under which nothing runs: call pause_generation first"
            raise RollspanError(text, reason="pause_required")
        staging = Staging(self._parameters, in_place=mode == "in_place", ticket=Ticket())
        self.opened = Update(staging, mode)
        self._finished = None

    def update(self, info: Any) -> Future[None]:
        """Receives tensors into the staging area, or in place.

        Args:
            info: of the transport; or a list that holds one such object for all engines, or one for each. Tensors have
                the model's names, or those of its checkpoints. With ``delta`` they are indices and values.

        Raises:
            RollspanError: ``no_update_active``. In the future: ``base_mismatch``, ``transfer_failed``, and
                ``weights_invalid`` or ``unsupported_field`` for what cannot be used. They also end the update.
        """
        update = self._require_open()

        def begin() -> Callable[[], None]:
            self._require_open(update)
            update.phase = "receiving"
            return partial(update.receive, info, self._connection, self.commit, self.known_digest)

        def end(_: None) -> None:
            update.phase = "open"

        return self._add(update, begin, end, sender=update.staging.ticket)

    def prepare(self, options: Any = None) -> Future[dict[str, Any]]:
        """Verifies the update and gets everything ready but the swap; publishes nothing.

        Args:
            options: as for :meth:`finish`.

        Returns:
            ``{"weight_digest": str}``.

        Raises:
            RollspanError: as for :meth:`finish`.
        """
        update, chosen = self._require_open(), FinishOptions.of(options)
        chosen.check_next(self.commit)

        def end(_: None) -> dict[str, Any]:
            update.phase = "prepared"
            return {"weight_digest": update.root}

        return self._add(update, partial(self._verifying, update, chosen), end)

    def finish(self, label: Any = None, options: Any = None) -> Future[dict[str, Any]]:
        """Verifies the update and publishes weights, label and commit number together.

        Args:
            label: name of the new weights; None keeps the label.
            options: ``digest`` (refuse others), ``partial`` (what did not come stays as it is; deltas are so by
                default) and ``commit`` (the number to take, above the present one).

        Returns:
            ``weight_version``, ``weight_commit`` and ``weight_digest`` now in force. The same named call again, by a
            client whose answer was lost, gets the same answer, whatever ``commit`` it says, while these weights are.

        Raises:
            RollspanError: ``invalid_label`` or ``invalid_request`` (the update stays open), ``no_update_active``. In
                the future: ``weights_invalid`` when parameters are missing or do not fit, ``digest_mismatch``; these
                drop it.
        """
        new_label = None if label is None else check_label(label)
        chosen = FinishOptions.of(options)
        repeated = self._repeated(new_label, chosen)
        if repeated is not None:
            return _done(repeated)
        update = self._require_open()
        chosen.check_next(self.commit)

        def begin() -> Callable[[], None] | None:
            return None if self._repeated(new_label, chosen) is not None else self._verifying(update, chosen)

        def end(_: None) -> dict[str, Any]:
            return self._repeated(new_label, chosen) or self._publish(update, new_label, chosen)

        return self._add(update, begin, end)

    def abort(self) -> bool:
        """Drops the update that is open; calls that are running for it get ``update_aborted``.

        Returns:
            Whether one was open.
        """
        return self._abort("the weight update was aborted")

    def set_label(self, label: Any) -> None:
        """Relabels the weights in force; they and the commit number stay.

        Raises:
            RollspanError: ``invalid_label``.
        """
        self.name(check_label(label, "new_version"))
        self._finished = None
        self.history.committed(Commit("relabel", self.label, self.commit, True, self.digest, "set_weight_version"))

    # What the calls do

    def _add(
        self,
        update: Update,
        begin: Callable[[], Callable[[], None] | None],
        end: Callable[[None], T],
        sender: Ticket | None = None,
    ) -> Future[T]:
        def failed(error: RollspanError) -> None:
            if self.opened is update:
                self._drop(update, error)

        return self._operations.add(Operation(begin, end, failed, owner=update, sender=sender))

    def _require_open(self, update: Update | None = None) -> Update:
        if self.opened is None or update not in (None, self.opened):
            raise RollspanError("no weight update is active: start one first", reason="no_update_active")
        return self.opened

    def _repeated(self, label: str | None, options: FinishOptions) -> dict[str, Any] | None:
        """The answer of the finish that is called once more, if that is so and the weights are still those."""
        if self.opened is not None or self.inconsistent or self._finished is None or self._finished[0] != label:
            return None
        answer = self._finished[1]
        return answer if options.digest in (None, answer["weight_digest"]) else None

    def _verifying(self, update: Update, options: FinishOptions) -> Callable[[], None]:
        self._require_open(update)
        update.phase = "verifying"
        partly = (update.is_delta if options.partial is None else options.partial) and not self.inconsistent
        return partial(update.verify, self.known_digest, self._derived, partial=partly, expected=options.digest)

    def _publish(self, update: Update, label: str | None, options: FinishOptions) -> dict[str, Any]:
        """The commit, between two steps."""
        self._listener.weights_change()
        staging, digest = update.staging, update.staging.digest
        assert digest is not None
        started = time.monotonic()
        try:
            staging.swap()
        except Exception:
            self.inconsistent = True  # some of it may be in place
            raise
        self.name(label)
        self.commit = self.commit + 1 if options.commit is None else options.commit
        self._digest = _done(digest)
        self.inconsistent = False
        self.opened = None
        self._listener.weights_changed()
        stall = time.monotonic() - started
        answer = {"weight_version": self.label, "weight_commit": self.commit, "weight_digest": digest.root}
        self._finished = None if label is None else (label, answer)
        self._worker.submit(staging.release)  # of what was in force before
        self.history.committed(
            Commit(
                kind="update",
                weight_version=self.label,
                weight_commit=self.commit,
                declared=self.declared,
                weight_digest=digest.root,
                source=update.source,
                tensors=staging.num_tensors,
                nbytes=staging.num_bytes,
                partial=bool(staging.missing),
                seconds={**update.seconds, "commit": stall},
                stall_seconds=stall,
            )
        )
        self._listener.weights_settled()
        return answer

    def _abort(self, message: str) -> bool:
        update = self.opened
        if update is None:
            return False
        error = RollspanError(message, reason="update_aborted")
        self._operations.cancel(update, error)
        self._drop(update, error)
        return True

    def _drop(self, update: Update, error: RollspanError) -> None:
        """The update has come to nothing; its memory is given back behind whatever the worker still does for it."""
        update.staging.ticket.cancel()
        self.opened = None
        if update.staging.touched:
            self.inconsistent = True
        self._worker.submit(update.staging.release)
        self.history.failed(error, update.phase)
        self._listener.weights_settled()


def _past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
