"""Weight updates, the label of the weights in force, and what is known of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from rollspan.errors import RollspanError, check_label, wrong_value
from rollspan.frontend.control import Control
from rollspan.frontend.fan_out import Outcome, agreed, call_engine, successes

logger = logging.getLogger("rollspan.frontend")

INIT = "init_weight_transfer_engine"
UPDATE_MODES = ("staged", "in_place")
CHECKS = ("checksum", "compare", "reset")
DIGEST = re.compile(r"blake3:[0-9a-f]{64}")
DIGEST_ALLOWED = "blake3: and 64 lower-case hex digits"


async def init_transfer(control: Control) -> Response:
    """POST /init_weight_transfer_engine"""
    given = control.field("init_info")
    engines = control.state.engines.callable()
    infos = [{}] if given is None else _infos(control, "init_info", given)
    calls = (call_engine(engine, INIT, infos[engine.index if len(infos) > 1 else 0]) for engine in engines)
    outcomes = await asyncio.gather(*calls)
    successes(outcomes)
    logger.info("weight transfer initialized")
    return control.answer({"message": "Weight transfer initialized"}, ("init_info",), outcomes)


async def shut_down_transfer(control: Control) -> Response:
    """POST /shutdown_weight_transfer_engine"""
    outcomes = await control.call("shutdown_weight_transfer_engine")
    logger.info("weight transfer shut down")
    return control.answer({"message": "Weight transfer shut down"}, (), outcomes)


async def start(control: Control) -> Response:
    """POST /start_weight_update"""
    mode = control.field("mode")
    if mode is not None and mode not in UPDATE_MODES:
        raise wrong_value("mode", " or ".join(UPDATE_MODES), mode)
    outcomes = await control.state.update.start(*([] if mode is None else [{"mode": mode}]))
    logger.info("weight update started")
    return control.answer({"message": "Weight update started"}, ("mode",), outcomes)


async def start_draft(control: Control) -> Response:
    """POST /start_draft_weight_update"""
    raise RollspanError("there is no draft model to update", reason="unsupported_field")


async def update(control: Control) -> Response:
    """POST /update_weights: a piece of the open update, or with ``weight_dir`` a whole one."""
    if control.field("weight_dir") is not None:
        return await _update_from_directory(control)
    infos = _infos(control, "update_info", control.required("update_info"))
    from_uploads = [info for info in infos if info.get("backend") in (None, "http")]
    uploads = [info["upload"] for info in from_uploads if info.get("upload") is not None]
    if uploads:
        outcomes = await _update_from_uploads(control, infos, uploads)
    else:
        outcomes = await control.state.update.update(infos)
    logger.info("weights updated")
    return control.answer({"message": "Weights updated"}, ("update_info",), outcomes)


async def finish(control: Control) -> Response:
    """POST /finish_weight_update: weights, label, commit number and digest change together."""
    label = _label(control)
    digest = control.field("weight_digest")
    if digest is not None and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise wrong_value("weight_digest", DIGEST_ALLOWED, digest)
    partial = control.field("partial")
    if partial is not None and not isinstance(partial, bool):
        raise wrong_value("partial", "true or false", partial)
    asked = {"digest": digest, "partial": partial}
    options = {name: value for name, value in asked.items() if value is not None}
    result, outcomes = await control.state.update.finish(label, options)
    _log_commit(result)
    known = ("weight_version", "weight_digest", "partial")
    return control.answer({"message": "Weight update finished", **result}, known, outcomes)


async def abort(control: Control) -> Response:
    """POST /abort_weight_update: drops the open update, if there is one."""
    outcomes = await control.state.update.abort()
    aborted = any(outcome.result for outcome in successes(outcomes))
    logger.info("weight update aborted" if aborted else "no weight update to abort")
    return control.answer({"status": "aborted", "aborted": aborted}, (), outcomes)


async def relabel(control: Control) -> Response:
    """POST /update_weight_version: a new label for the weights in force."""
    label = check_label(control.required("new_version"), "new_version")
    outcomes = await control.call("set_weight_version", label)
    logger.info("weight version is now %s", label)
    return control.answer({"success": True, "new_version": label}, ("new_version",), outcomes)


async def info(control: Control) -> Response:
    """GET /weight_info"""
    return control.answer({"weight_version": await control.ask("get_weight_version")})


async def history(control: Control) -> Response:
    """GET /weight_history: one record for each engine, also for one that is not there."""
    outcomes = await control.call("get_weight_history")
    records = {outcome.engine.index: outcome.result for outcome in outcomes if outcome.error is None}
    for index in range(len(control.state.engines)):
        records.setdefault(index, {"engine_index": index, "state": "dead", "weight_digest": None})
    listed = [record for _, record in sorted(records.items())]
    return control.answer({"engines": listed, "consistent": _consistent(listed)})


async def check(control: Control) -> Response:
    """POST /weight_checker: digests of single tensors, compared or not, or all weights zero."""
    action = control.required("action")
    if action not in CHECKS:
        raise wrong_value("action", "checksum, compare or reset", action)
    arguments = [action]
    if action == "compare":
        baseline = control.required("baseline")
        if not isinstance(baseline, dict) or not all(isinstance(digest, str) for digest in baseline.values()):
            raise wrong_value("baseline", "an object of digests by name", baseline)
        arguments.append(baseline)
    outcomes = await control.call("check_weights", *arguments)
    results = [outcome.result for outcome in outcomes if outcome.error is None]
    if action == "compare":
        mismatches = sorted({name for result in results for name in result["mismatches"]})
        value = {"match": all(result["match"] for result in results), "mismatches": mismatches}
    else:
        value = agreed(outcomes)
    return control.answer(value, ("action", "baseline"), outcomes if action != "checksum" else None)


async def _update_from_directory(control: Control) -> Response:
    """A whole update. A client that sends it again, because it got no answer, has it done again after the first."""
    directory = control.field("weight_dir")
    if control.field("update_info") is not None:
        message = "weight_dir and update_info exclude each other: send one of them"
        raise RollspanError(message, reason="invalid_request", param="weight_dir")
    if not isinstance(directory, str):
        raise wrong_value("weight_dir", "the path of a directory of safetensors", directory)
    label = _label(control)
    async with control.state.directory_update:
        update = control.state.update
        await update.start()
        await update.update([{"backend": "disk", "path": directory}])
        result, outcomes = await update.finish(label, {})
    _log_commit(result)
    return control.answer({"message": "Weights updated", **result}, ("weight_dir", "weight_version"), outcomes)


async def _update_from_uploads(control: Control, infos: list[dict[str, Any]], uploads: list[Any]) -> list[Outcome]:
    """An update from files that clients have uploaded; once they are in the engines they are deleted."""
    spool = control.state.open_spool()
    with contextlib.ExitStack() as held:
        for upload in uploads:
            held.enter_context(spool.reading(upload))
        outcomes = await control.state.update.update(infos)
    for upload in uploads:
        with contextlib.suppress(RollspanError):  # a second request that reads it: that one deletes it
            await spool.delete(upload)
    return outcomes


def _infos(control: Control, name: str, given: Any) -> list[dict[str, Any]]:
    """One object for all engines, or one for each."""
    count = len(control.state.engines)
    found = given if isinstance(given, list) else [given]
    if len(found) not in (1, count) or not all(isinstance(info, dict) for info in found):
        objects = "one object" if count == 1 else f"1 or {count} objects"
        raise wrong_value(name, f"an object or a list of {objects}", given)
    return found


def _label(control: Control) -> str | None:
    label = control.field("weight_version")
    return None if label is None else check_label(label, "weight_version")


def _consistent(records: list[dict[str, Any]]) -> bool:
    """Whether all engines serve the same weights: each is ready, and all have one digest."""
    digests = {record.get("weight_digest") for record in records}
    known = len(records) == 1 or None not in digests
    return all(record.get("state") == "ready" for record in records) and len(digests) == 1 and known


def _log_commit(result: Mapping[str, Any]) -> None:
    commit, label, digest = (result.get(key) for key in ("weight_commit", "weight_version", "weight_digest"))
    logger.info("weight update finished: commit %s, label %s, digest %s", commit, label, digest)
