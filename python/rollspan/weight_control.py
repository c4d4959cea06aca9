"""WeightControl: the calls of `LLM` that change the weights, or tell about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from rollspan.errors import check_label
from rollspan.weight_calls import finish_args, info_args, prepare_args, start_args


class WeightControl(ABC):
    """What can be done with the weights of an engine, one caller at a time. `AsyncWeightControl` has the same calls.

    Every call may raise RollspanError; its reasons are those of the HTTP routes of the same names.
    """

    @abstractmethod
    def _call(self, method: str, *args: Any) -> Any:
        """Calls an engine method and returns its result.

        Raises:
            RollspanError: the engine refused, with its reason.
        """

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Sets a transport up: ``{"backend": NAME, ...}`` and what that backend needs to find the sender."""
        self._call("init_weight_transfer_engine", *info_args("init_info", init_info))

    def shutdown_weight_transfer_engine(self) -> None:
        """Takes it down. Nothing happens when there is none."""
        self._call("shutdown_weight_transfer_engine")

    def start_weight_update(self, mode: str | None = None) -> None:
        """Opens a weight update.

        Args:
            mode: "staged" (beside the weights in use) or "in_place" (into them, during a pause); None: the engine's
                ``weight_update_mode``.

        Raises:
            RollspanError: ``update_active`` when one is open, ``pause_required``.
        """
        self._call("start_weight_update", *start_args(mode))

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receives new weights; publishes nothing yet.

        Args:
            update_info: what the transport needs, ``{"path": DIR}`` (below ``weights_root``) for safetensors on a disk.

        Raises:
            RollspanError: ``no_update_active``, or what is wrong: the update is dropped, the old weights stay.
        """
        self._call("update_weights", *info_args("update_info", update_info))

    def prepare_weight_update(
        self, *, digest: str | None = None, partial: bool | None = None, commit: int | None = None
    ) -> str:
        """Verifies the update and does all but the swap, for a commit at the same time as other engines'.

        Takes the options of `finish_weight_update`. Returns the digest of the weights to be.
        """
        return str(self._call("prepare_weight_update", *prepare_args(digest, partial, commit))["weight_digest"])

    def finish_weight_update(
        self,
        weight_version: str | int | None = None,
        *,
        digest: str | None = None,
        partial: bool | None = None,
        commit: int | None = None,
    ) -> dict[str, Any]:
        """Commits the update between two steps: weights, label, commit number and digest change together.

        Args:
            weight_version: label of the new weights; None keeps the label.
            digest: that the weights must have.
            partial: parameters that did not come stay as they are; None: only when a delta has come.
            commit: number to take, above the present one; None for the next.

        Returns:
            ``{"weight_version": label, "weight_commit": number, "weight_digest": digest}`` now in force.

        Raises:
            RollspanError: ``no_update_active``, ``invalid_label``, ``weights_invalid``, ``digest_mismatch``,
                ``base_mismatch``.
        """
        return dict(self._call("finish_weight_update", *finish_args(weight_version, digest, partial, commit)))

    def abort_weight_update(self) -> bool:
        """Drops the open update; the old weights stay. Returns whether there was one."""
        return bool(self._call("abort_weight_update"))

    def get_weight_version(self) -> str:
        """Label of the weights in force."""
        return str(self._call("get_weight_version"))

    def get_weight_commit(self) -> int:
        """Commit number of the weights in force."""
        return int(self._call("get_weight_commit"))

    def get_weight_digest(self) -> str:
        """Digest of the weights in force, ``blake3:`` and 64 hex digits; waits until it is known."""
        return str(self._call("get_weight_digest"))

    def get_weight_history(self) -> dict[str, Any]:
        """What became of the weights: state, open update, commits and failures (an engine of ``/weight_history``)."""
        return dict(self._call("get_weight_history"))

    def check_weights(self, action: str = "checksum", baseline: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Digests of single tensors, or a comparison with such.

        Args:
            action: "checksum", "compare" or "reset" (all weights become zero).
            baseline: name -> digest, for "compare".

        Returns:
            ``{"checksums": {name: digest}}``, ``{"match": bool, "mismatches": [name]}`` or ``{"status": "reset"}``.
        """
        return dict(self._call("check_weights", action, *([] if baseline is None else [dict(baseline)])))

    def update_weight_version(self, new_version: str | int) -> str:
        """Changes the label only, at a step boundary; the commit number stays. Returns the label.

        Raises:
            RollspanError: ``invalid_label``.
        """
        label = check_label(new_version, "new_version")
        self._call("set_weight_version", label)
        return label

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Gives memory back until `wake_up`.

        Args:
            level: 1 drops the KV cache and, on CUDA, moves the weights to the host; 2 drops the weights too.
            mode: what becomes of running requests, as in `pause_generation`.
        """
        self._call("sleep", level, mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes it again: "weights", "kv_cache", or both (None). What is awake stays so."""
        self._call("wake_up", None if tags is None else list(tags))

    def is_sleeping(self) -> bool:
        """True while anything sleeps."""
        return bool(self._call("is_sleeping"))
