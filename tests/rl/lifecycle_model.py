"""What a server must answer, and what must be in force, after any sequence of control calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from counting_model import HEAD, Tensors, digest

PARTS = frozenset(("weights", "kv_cache"))


@dataclass
class OpenUpdate:
    """The update that is open: its mode, and what has come."""

    mode: str
    base: Tensors
    came: Tensors = field(default_factory=dict)
    pieces: int = 0
    delta: bool = False

    @property
    def touched(self) -> bool:
        """Weights have been written over."""
        return self.mode == "in_place" and bool(self.came)

    @property
    def result(self) -> Tensors:
        """What the weights are with it in force."""
        return self.base | self.came


class Model:
    """Each method is one call: it returns the reason of the refusal that must come, None for success.

    Attributes:
        weights: in force; without meaning while ``inconsistent``.
        label, commit: theirs.
        update: that is open.
        pause: None, ``new`` (what comes is refused, nothing runs any more) or ``all`` (everything is kept).
        asleep: what sleeps.
        inconsistent: the weights are no whole.
        finished: label that the last update has named, whose finish may come again.
    """

    def __init__(self, weights: Tensors, label: str, commit: int) -> None:
        self.weights = weights
        self.label, self.commit = label, commit
        self.update: OpenUpdate | None = None
        self.pause: str | None = None
        self.asleep: frozenset[str] = frozenset()
        self.inconsistent = False
        self.finished: str | None = None

    # What can be asked

    @property
    def state(self) -> str:
        """As the history tells it."""
        if self.inconsistent and "weights" not in self.asleep:
            return "inconsistent"
        if self.asleep:
            return "sleeping"
        return "updating" if self.update is not None else "ready"

    @property
    def digest(self) -> str | None:
        """Of the weights in force."""
        return None if self.inconsistent else digest(self.weights)

    @property
    def is_paused(self) -> bool:
        """As ``/is_paused`` tells it."""
        return bool(self.asleep) or self.pause is not None

    @property
    def health(self) -> str | None:
        """Reason of ``/health``."""
        return {"inconsistent": "weights_inconsistent", "sleeping": "engine_sleeping"}.get(self.state)

    @property
    def standstill(self) -> str | None:
        """Why nothing can run, whatever is resumed; None: it can."""
        return self.health or ("update_active" if self.update is not None and self.update.mode == "in_place" else None)

    # Calls

    def start(self, mode: str) -> str | None:
        if self.update is not None:
            return "update_active"
        if "weights" in self.asleep:
            return "engine_sleeping"
        if mode == "in_place" and not self.is_paused:
            return "pause_required"
        self.update = OpenUpdate(mode, dict(self.weights))
        self.finished = None
        return None

    def receive(self, values: Tensors, broken: str | None = None, *, delta: bool = False) -> str | None:
        """A piece; ``broken`` is what is wrong with it; a ``delta`` has been made into whole tensors here."""
        if self.update is None:
            return "no_update_active"
        reason = "base_mismatch" if delta and self.inconsistent else broken
        if reason is not None:
            self._drop()
            return reason
        self.update.came |= values
        self.update.pieces += 1
        self.update.delta |= delta
        return None

    def finish(self, label: str | None, *, partial: bool | None, expected: str | None) -> str | None:
        if self.update is None:
            again = label is not None and label == self.finished and not self.inconsistent
            return None if again and expected in (None, self.digest) else "no_update_active"
        partly = (self.update.delta if partial is None else partial) and not self.inconsistent
        if not self.update.came.keys() >= self.weights.keys() and not (partly and self.update.pieces):
            self._drop()
            return "weights_invalid"
        if expected not in (None, digest(self.update.result)):
            self._drop()
            return "digest_mismatch"
        self.weights, self.update, self.inconsistent = self.update.result, None, False
        self.commit += 1
        self.label, self.finished = label or self.label, label
        return None

    def abort(self) -> bool:
        """Whether one was open."""
        if self.update is None:
            return False
        self._drop()
        return True

    def _drop(self) -> None:
        assert self.update is not None
        self.inconsistent |= self.update.touched
        self.update = None

    def relabel(self, label: str) -> None:
        self.label, self.finished = label, None

    def hold(self, mode: str, *, something_runs: bool) -> str | None:
        if mode == "wait" and something_runs and self.standstill is not None:
            return self.standstill
        self.pause = "all" if mode == "keep" else "new"
        return None

    def resume(self) -> str | None:
        if self.standstill is None:
            self.pause = None
        return self.standstill

    def sleep(self, level: int, mode: str, *, something_runs: bool) -> str | None:
        if self.update is not None:
            return "update_active"
        if mode == "wait" and something_runs and self.standstill is not None:
            return self.standstill
        self.asleep = PARTS
        self.inconsistent |= level == 2
        return None

    def wake_up(self, parts: frozenset[str]) -> None:
        self.asleep -= parts

    def generate(self) -> str | None:
        """Of a request that comes now; one that is neither refused nor ``held`` runs to its end."""
        return self.health or ("engine_paused" if self.pause == "new" else None)

    @property
    def held(self) -> bool:
        """Requests that are admitted do not run."""
        return self.pause is not None or self.standstill is not None


def token_of(weights: Tensors) -> int:
    """What they emit."""
    return int(weights[HEAD][:, 0].argmax())
