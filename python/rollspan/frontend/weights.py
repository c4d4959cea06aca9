"""Weight updates, the label of the weights in force, and what is known of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from rollspan.errors import RollspanError, check_label, wrong_value
from rollspan.frontend.control import Control

logger = logging.getLogger("rollspan.frontend")

UPDATE_MODES = ("staged", "in_place")
CHECKS = ("checksum", "compare", "reset")
DIGEST = re.compile(r"blake3:[0-9a-f]{64}")
DIGEST_ALLOWED = "blake3: and 64 lower-case hex digits"


async def init_transfer(control: Control) -> Response:
    """POST /init_weight_transfer_engine"""
    given = control.field("init_info")
    await control.call("init_weight_transfer_engine", {} if given is None else _info("init_info", given))
    logger.info("weight transfer initialized")
    return control.answer({"message": "Weight transfer initialized"}, ("init_info",))


async def shut_down_transfer(control: Control) -> Response:
    """POST /shutdown_weight_transfer_engine"""
    await control.call("shutdown_weight_transfer_engine")
    logger.info("weight transfer shut down")
    return control.answer({"message": "Weight transfer shut down"})


async def start(control: Control) -> Response:
    """POST /start_weight_update"""
    mode = control.field("mode")
    if mode is not None and mode not in UPDATE_MODES:
        raise wrong_value("mode", " or ".join(UPDATE_MODES), mode)
    await control.call("start_weight_update", *_options(mode=mode))
    logger.info("weight update started")
    return control.answer({"message": "Weight update started"}, ("mode",))


async def start_draft(control: Control) -> Response:
    """POST /start_draft_weight_update"""
    raise RollspanError("there is no draft model to update", reason="unsupported_field")


async def update(control: Control) -> Response:
    """POST /update_weights: a piece of the open update, or with ``weight_dir`` a whole one."""
    if control.field("weight_dir") is not None:
        return await _update_from_directory(control)
    info = _info("update_info", control.required("update_info"))
    upload = info.get("upload")
    if upload is None or info.get("backend") not in (None, "http"):
        await control.call("update_weights", info)
    else:
        await _update_from_upload(control, info, upload)
    logger.info("weights updated")
    return control.answer({"message": "Weights updated"}, ("update_info",))


async def finish(control: Control) -> Response:
    """POST /finish_weight_update: weights, label, commit number and digest change together."""
    label = _label(control)
    digest = control.field("weight_digest")
    if digest is not None and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise wrong_value("weight_digest", DIGEST_ALLOWED, digest)
    partial = control.field("partial")
    if partial is not None and not isinstance(partial, bool):
        raise wrong_value("partial", "true or false", partial)
    result = await control.call("finish_weight_update", label, *_options(digest=digest, partial=partial))
    _log_commit(result)
    known = ("weight_version", "weight_digest", "partial")
    return control.answer({"message": "Weight update finished", **result}, known)


async def abort(control: Control) -> Response:
    """POST /abort_weight_update: drops the open update, if there is one."""
    aborted = await control.call("abort_weight_update")
    logger.info("weight update aborted" if aborted else "no weight update to abort")
    return control.answer({"status": "aborted", "aborted": aborted})


async def relabel(control: Control) -> Response:
    """POST /update_weight_version: a new label for the weights in force."""
    label = check_label(control.required("new_version"), "new_version")
    await control.call("set_weight_version", label)
    logger.info("weight version is now %s", label)
    return control.answer({"success": True, "new_version": label}, ("new_version",))


async def info(control: Control) -> Response:
    """GET /weight_info"""
    return control.answer({"weight_version": await control.call("get_weight_version")})


async def history(control: Control) -> Response:
    """GET /weight_history: one record for each engine."""
    records = [await control.call("get_weight_history")]
    return control.answer({"engines": records, "consistent": _consistent(records)})


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
    result = await control.call("check_weights", *arguments)
    return control.answer(result, ("action", "baseline"))


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
        await control.call("start_weight_update")
        await control.call("update_weights", {"backend": "disk", "path": directory})
        result = await control.call("finish_weight_update", label)
    _log_commit(result)
    return control.answer({"message": "Weights updated", **result}, ("weight_dir", "weight_version"))


async def _update_from_upload(control: Control, info: Mapping[str, Any], upload: Any) -> None:
    """An update from files that clients have uploaded; once they are in the engine they are deleted."""
    spool = control.state.open_spool()
    with spool.reading(upload):
        await control.call("update_weights", info)
    await spool.delete(upload)


def _info(name: str, given: Any) -> dict[str, Any]:
    found = given[0] if isinstance(given, list) and len(given) == 1 else given
    if not isinstance(found, dict):
        raise wrong_value(name, "an object or a list of one object", given)
    return found


def _label(control: Control) -> str | None:
    label = control.field("weight_version")
    return None if label is None else check_label(label, "weight_version")


def _options(**options: Any) -> list[dict[str, Any]]:
    """The options of a call that were given, as its last argument; none when there are none."""
    given = {name: value for name, value in options.items() if value is not None}
    return [given] if given else []


def _consistent(records: list[dict[str, Any]]) -> bool:
    """Whether all engines serve the same weights: each is ready, and all have one digest."""
    digests = {record.get("weight_digest") for record in records}
    return all(record.get("state") == "ready" for record in records) and len(digests) == 1


def _log_commit(result: Mapping[str, Any]) -> None:
    commit, label, digest = (result.get(key) for key in ("weight_commit", "weight_version", "weight_digest"))
    logger.info("weight update finished: commit %s, label %s, digest %s", commit, label, digest)
