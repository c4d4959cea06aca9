"""The one table of errors: a stable reason, its HTTP status and its type, and the exception that carries them."""

from __future__ import annotations

import json
from typing import Any

#: reason -> (HTTP status, error type). Both frontends, both clients and the engine use these reasons and no others.
ERRORS: dict[str, tuple[int, str]] = {
    "invalid_json": (400, "BadRequestError"),
    "invalid_request": (400, "BadRequestError"),
    "unsupported_field": (400, "BadRequestError"),
    "unknown_field": (400, "BadRequestError"),
    "prompt_too_long": (400, "BadRequestError"),
    "weights_invalid": (400, "BadRequestError"),
    "checksum_mismatch": (400, "BadRequestError"),
    "invalid_label": (400, "BadRequestError"),
    "unknown_method": (400, "BadRequestError"),
    "not_found": (404, "NotFoundError"),
    "model_not_found": (404, "NotFoundError"),
    "method_not_allowed": (405, "MethodNotAllowedError"),
    "duplicate_request_id": (409, "ConflictError"),
    "update_active": (409, "ConflictError"),
    "no_update_active": (409, "ConflictError"),
    "update_aborted": (409, "ConflictError"),
    "digest_mismatch": (409, "ConflictError"),
    "base_mismatch": (409, "ConflictError"),
    "pause_required": (409, "ConflictError"),
    "upload_incomplete": (409, "ConflictError"),
    "stale_weights": (409, "ConflictError"),
    "engine_sleeping": (409, "ConflictError"),
    "pause_superseded": (409, "ConflictError"),
    "body_too_large": (413, "RequestEntityTooLargeError"),
    "unsupported_media_type": (415, "UnsupportedMediaTypeError"),
    "queue_full": (429, "TooManyRequestsError"),
    "internal_error": (500, "InternalServerError"),
    "engine_error": (500, "InternalServerError"),
    "nan_logits": (500, "InternalServerError"),
    "decode_error": (500, "InternalServerError"),
    "transfer_failed": (502, "BadGatewayError"),
    "partial_failure": (502, "BadGatewayError"),
    "engine_paused": (503, "ServiceUnavailableError"),
    "weights_inconsistent": (503, "ServiceUnavailableError"),
    "weights_undeclared": (503, "ServiceUnavailableError"),
    "engine_starting": (503, "ServiceUnavailableError"),
    "engine_dead": (503, "ServiceUnavailableError"),
    "shutting_down": (503, "ServiceUnavailableError"),
}


class RollspanError(Exception):
    """An error with a stable reason.

    Attributes:
        message: what was wrong, where, and what is allowed.
        reason: key of :data:`ERRORS`; an unknown one becomes ``internal_error``.
        param: dotted path of the field at fault, or None.
    """

    def __init__(self, message: str, *, reason: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason if reason in ERRORS else "internal_error"
        self.param = param

    @property
    def status(self) -> int:
        """HTTP status of this error."""
        return ERRORS[self.reason][0]

    @property
    def type(self) -> str:
        """OpenAI-style error type of this error."""
        return ERRORS[self.reason][1]

    def body(self) -> dict[str, Any]:
        """The JSON error body of the HTTP contract."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.status,
                "reason": self.reason,
            }
        }


def shown(value: Any) -> str:
    """``value`` as compact JSON, cut to 64 characters, for error messages."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        text = str(type(value).__name__)
    return text if len(text) <= 64 else text[:64] + "..."


def cut(name: str) -> str:
    """A client's text for an error message: at most 64 characters of it."""
    return name if len(name) <= 64 else name[:64] + "..."


def wrong_value(path: str, allowed: str, value: Any, index: int | None = None) -> RollspanError:
    """The error for a field outside its range: ``{path} must be {allowed}, got {value}[ at index {i}]``."""
    place = "" if index is None else f" at index {index}"
    return RollspanError(f"{path} must be {allowed}, got {shown(value)}{place}", reason="invalid_request", param=path)


LABEL_ALLOWED = "a string of 1 to 256 bytes without control characters or an integer"


def check_label(value: Any, field: str = "weight_version") -> str:
    """Returns ``value`` as a weight-version label.

    Strings of 1 to 256 UTF-8 bytes without control characters (Unicode category Cc) stay as they are, integers
    become their decimal string.

    Raises:
        RollspanError: ``invalid_label`` naming ``field``.
    """
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**256:
        value = str(value)
    if isinstance(value, str) and not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in value):
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            size = 0
        if 1 <= size <= 256:
            return value
    raise RollspanError(f"{field} must be {LABEL_ALLOWED}, got {shown(value)}", reason="invalid_label", param=field)
