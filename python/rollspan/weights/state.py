"""WeightState: which weights are in force, under which name, and whether they may be used."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from rollspan.errors import RollspanError, check_label
from rollspan.protocol.messages import Stamp
from rollspan.weights.history import Commit, History
from rollspan.weights.staging import WeightDigest
from rollspan.weights.update import Update

DEFAULT_LABEL = "default"

#: state -> (reason, message) where nothing can be generated.
_REFUSALS = {
    "sleeping": ("engine_sleeping", "the engine sleeps: wake it up first"),
    "inconsistent": (
        "weights_inconsistent",
        "the weights are not whole: an update in place was cut off, or they were reset or dropped; update them all",
    ),
    "undeclared": (
        "weights_undeclared",
        "nobody has named the weights yet: finish an update with a weight_version, or set the version",
    ),
}


class WeightState:
    """Label, commit number and digest of the weights in force, and what stands against using them.

    Attributes:
        label: weight version in force.
        commit: number of finished updates since start.
        declared: somebody has named the label.
        history: what became of the weights.
        asleep: of ``weights`` and ``kv_cache``, what has been put to sleep.
        inconsistent: some of the weights are of one set and some of another, or of none.
        opened: the update that is open.
    """

    def __init__(self, *, label: str | None, require_label: bool, source: str) -> None:
        self.label = DEFAULT_LABEL if label is None else check_label(label)
        self.declared = label is not None
        self.commit = 0
        self.history = History()
        self.asleep: frozenset[str] = frozenset()
        self.inconsistent = False
        self.opened: Update | None = None
        self._undeclared = require_label
        self._digest: Future[WeightDigest] = Future()
        self.history.committed(Commit("load", self.label, 0, self.declared, None, source))

    @property
    def stamp(self) -> Stamp:
        """Label and commit number of the weights that a step launched now runs with."""
        return (self.label, self.commit)

    @property
    def updating(self) -> bool:
        """True between start and finish."""
        return self.opened is not None

    @property
    def state(self) -> str:
        """``sleeping``, ``inconsistent``, ``undeclared``, ``updating`` or ``ready``: the first of them that holds.

        Weights that are awake and inconsistent are so also while the KV cache sleeps.
        """
        if self.inconsistent and "weights" not in self.asleep:
            return "inconsistent"
        if self.asleep:
            return "sleeping"
        if self._undeclared:
            return "undeclared"
        return "updating" if self.updating else "ready"

    @property
    def runnable(self) -> bool:
        """Whether a step may compute with the weights."""
        in_place = self.opened is not None and self.opened.mode == "in_place"
        return not (self.asleep or self.inconsistent or in_place)

    @property
    def digest(self) -> str | None:
        """Digest of the weights in force; None until it is known, and while there are no whole ones."""
        known = self.known_digest
        if known is None or not known.done() or known.exception() is not None:
            return None
        return known.result().root

    @property
    def known_digest(self) -> Future[WeightDigest] | None:
        """The same with the digest of each weight, perhaps still being computed; None while there are no whole ones."""
        return None if self.inconsistent else self._digest

    def digest_known(self) -> Future[str]:
        """The digest of the weights in force, once it is known.

        Raises:
            RollspanError: ``weights_inconsistent`` or ``engine_sleeping``: there are no whole weights.
        """
        if self.known_digest is None:
            raise _refusal("sleeping" if self.state == "sleeping" else "inconsistent")
        answer: Future[str] = Future()

        def tell(known: Future[WeightDigest]) -> None:
            error = known.exception()
            answer.set_exception(error) if error is not None else answer.set_result(known.result().root)

        self._digest.add_done_callback(tell)
        return answer

    def check_ready(self) -> None:
        """Raises why nothing can be generated, if so.

        Raises:
            RollspanError: ``engine_sleeping``, ``weights_inconsistent`` or ``weights_undeclared``.
        """
        if self.state in _REFUSALS:
            raise _refusal(self.state)

    def check_runnable(self) -> None:
        """Raises why what has been admitted cannot go on, if so.

        Raises:
            RollspanError: ``engine_sleeping``, ``weights_inconsistent`` or ``update_active``.
        """
        if self.runnable:
            return
        if self.state != "undeclared":
            self.check_ready()
        text = "the weights are being written over in place: finish that update first, or abort it"
        raise RollspanError(text, reason="update_active")

    def name(self, label: str | None) -> None:
        """Somebody calls the weights in force so; None leaves their name."""
        self._note_digest()
        if label is not None:
            self.label, self.declared, self._undeclared = label, True, False

    def _note_digest(self) -> None:
        if self.digest is not None:
            self.history.digested(self.digest)

    def describe_state(self) -> dict[str, Any]:
        """The part of ``get_weight_history`` that is about now."""
        self._note_digest()
        return {
            "state": self.state,
            "weight_version": self.label,
            "weight_commit": self.commit,
            "declared": self.declared,
            "weight_digest": self.digest,
            "update": None if self.opened is None else self.opened.to_dict(),
            **self.history.to_dict(),
        }


def _refusal(state: str) -> RollspanError:
    reason, text = _REFUSALS[state]
    return RollspanError(text, reason=reason)
