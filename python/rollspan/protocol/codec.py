"""Messages <-> MessagePack, strict about everything except the length of positional arrays (PROTOCOL.md, Tolerance)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import msgpack
import numpy as np
import numpy.typing as npt

from rollspan.errors import RollspanError
from rollspan.protocol import messages as m
from rollspan.sampling_params import SamplingParams

EXT_RAW = 3
MAX_DEPTH = 64
U32 = 2**32 - 1
U64 = 2**64 - 1
I64 = 2**63 - 1


class DecodeError(Exception):
    """A message that is not what PROTOCOL.md allows.

    Attributes:
        reason: stable word for metrics (``malformed``, ``trailing_bytes``, ``too_deep``, ``wrong_type``,
            ``out_of_range``, ``too_short``, ``family``, ``bad_array``, ``bad_extension``, ``version``).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


def _fail(reason: str, message: str) -> NoReturn:
    raise DecodeError(reason, message)


class RequestRefusedError(RollspanError):
    """A well-formed EngineCoreRequest that asks for what is not allowed; ``request_id`` says which."""

    def __init__(self, request_id: str, error: RollspanError) -> None:
        super().__init__(error.message, reason=error.reason, param=error.param)
        self.request_id = request_id


def _unpack(payload: bytes) -> Any:
    def refuse_pickle(code: int, data: bytes) -> Any:
        if code != EXT_RAW:
            _fail("bad_extension", f"extension type {code} is not allowed, only {EXT_RAW}")
        return msgpack.ExtType(code, data)

    try:
        return msgpack.unpackb(payload, raw=False, strict_map_key=False, ext_hook=refuse_pickle, timestamp=0)
    except msgpack.ExtraData as error:
        raise DecodeError("trailing_bytes", f"{len(error.extra)} bytes after the message") from None
    except DecodeError:
        raise
    except (ValueError, msgpack.UnpackException, TypeError, OverflowError) as error:
        raise DecodeError("malformed", f"not a MessagePack message: {error}") from None
    except RecursionError:
        raise DecodeError("too_deep", f"nested deeper than {MAX_DEPTH}") from None


def _shallow(value: Any, depth: int = 4) -> Any:
    """Refuses an untyped value that nests beyond MAX_DEPTH (typed positions cannot); ``depth`` counts what is above."""
    if depth > MAX_DEPTH:
        _fail("too_deep", f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            _shallow(key, depth + 1)
            _shallow(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _shallow(item, depth + 1)
    elif isinstance(value, msgpack.Timestamp):  # MessagePack's own extension type -1 never reaches the hook
        _fail("bad_extension", f"extension type -1 is not allowed, only {EXT_RAW}")
    return value


def _pack(value: Any, unicode_errors: str = "strict") -> bytes:
    packed = msgpack.packb(value, use_bin_type=True, unicode_errors=unicode_errors)
    assert isinstance(packed, bytes)
    return packed


def _array(value: Any, name: str, required: int) -> list[Any]:
    if not isinstance(value, list):
        _fail("wrong_type", f"{name} is no array")
    if len(value) < required:
        _fail("too_short", f"{name} has {len(value)} elements, at least {required} are required")
    return value


def _map(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        _fail("wrong_type", f"{name} is no map with string keys")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        _fail("wrong_type", f"{name} is no string")
    return value


def _int(value: Any, name: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        _fail("wrong_type", f"{name} is no integer")
    if not low <= value <= high:
        _fail("out_of_range", f"{name} is {value}, allowed are {low} to {high}")
    return value


def _float(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail("wrong_type", f"{name} is no number")
    return float(value)


def _bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        _fail("wrong_type", f"{name} is no boolean")
    return value


def _token_ids(value: Any, name: str) -> list[int]:
    ids = _array(value, name, 0)
    for token in ids:
        if type(token) is not int:
            _fail("wrong_type", f"{name} holds a value that is no integer")
        if not 0 <= token <= U32:
            _fail("out_of_range", f"{name} holds {token}, allowed are 0 to {U32}")
    return ids


# Requests


def encode_request(request: m.EngineCoreRequest) -> bytes:
    """EngineCoreRequest as 22 elements."""
    return _pack(
        (
            request.request_id,
            request.prompt_token_ids,
            None,
            request.sampling_params.to_wire(),
            None,
            request.arrival_time,
            None,
            request.cache_salt,
            request.data_parallel_rank,
            None,
            None,
            request.client_index,
            0,
            request.priority,
            None,
            False,
            request.external_req_id,
            None,
            None,
            False,
            request.session_id,
            None,
        )
    )


_REQUEST_DEFAULTS = (None, None, 0, 0, 0, None, False, None, None, None, False, None, None)
#: Elements that only a feature which we lack would set, by index.
_REQUEST_UNSUPPORTED = {
    2: "mm_features",
    4: "pooling_params",
    6: "lora_request",
    9: "prompt_embeds",
    15: "resumable",
    19: "abort_immediately",
}


def decode_request(payload: bytes) -> m.EngineCoreRequest:
    """Reads an EngineCoreRequest.

    Raises:
        DecodeError: the message is not well formed.
        RequestRefusedError: it is, but asks for what is not allowed or not supported.
    """
    row = _array(_unpack(payload), "EngineCoreRequest", 9)
    for element in (*row[2:3], *row[4:5], *row[6:7], *row[9:]):
        _shallow(element, 2)
    row = row + list(_REQUEST_DEFAULTS[len(row) - 9 :]) if len(row) < 22 else row
    request_id = _text(row[0], "request_id")
    try:
        return _decode_request(request_id, row)
    except RollspanError as error:
        raise RequestRefusedError(request_id, error) from None


def _decode_request(request_id: str, row: list[Any]) -> m.EngineCoreRequest:
    _int(row[12], "current_wave", 0, I64)
    _bool(row[15], "resumable")
    _bool(row[19], "abort_immediately")
    for index, name in _REQUEST_UNSUPPORTED.items():
        if row[index]:
            raise RollspanError(f"{name} is not supported", reason="unsupported_field", param=name)
    for index, name in ((1, "prompt_token_ids"), (3, "sampling_params")):
        if row[index] is None:
            raise RollspanError(f"{name} is required", reason="invalid_request", param=name)
    optional_text = {
        name: None if row[index] is None else _text(row[index], name)
        for index, name in ((7, "cache_salt"), (16, "external_req_id"), (20, "session_id"))
    }
    return m.EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=_token_ids(row[1], "prompt_token_ids"),
        sampling_params=SamplingParams.from_wire(_shallow(_map(row[3], "sampling_params"), 2)),
        arrival_time=_float(row[5], "arrival_time"),
        data_parallel_rank=None if row[8] is None else _int(row[8], "data_parallel_rank", 0, U32),
        client_index=_int(row[11], "client_index", 0, U32),
        priority=_int(row[13], "priority", -(2**63), I64),
        **optional_text,
    )


def encode_abort(request_ids: Sequence[str]) -> bytes:
    """ABORT: internal request ids."""
    return _pack(list(request_ids))


def decode_abort(payload: bytes) -> list[str]:
    """Reads ABORT.

    Raises:
        DecodeError: the message is not well formed.
    """
    return [_text(item, "request id") for item in _array(_unpack(payload), "ABORT", 0)]


def encode_utility_call(call: m.UtilityCall) -> bytes:
    """UTILITY as 4 elements."""
    return _pack((call.client_index, call.call_id, call.method, call.args))


class CallRefusedError(DecodeError):
    """A call that can be answered, though what it says cannot be read; ``call`` has no arguments."""

    def __init__(self, call: m.UtilityCall, error: DecodeError) -> None:
        super().__init__(error.reason, error.message)
        self.call = call


def decode_utility_call(payload: bytes) -> m.UtilityCall:
    """Reads UTILITY.

    Raises:
        CallRefusedError: the arguments are not allowed; the caller can be told.
        DecodeError: the message is not well formed.
    """
    row = _array(_unpack(payload), "UTILITY", 4)
    call = m.UtilityCall(
        _int(row[0], "client_index", 0, U32),
        _int(row[1], "call_id", 0, U64),
        _text(row[2], "method"),
        [],
    )
    try:
        _shallow(row[4:], 1)
        return dataclasses.replace(call, args=_shallow(_array(row[3], "args", 0), 2))
    except DecodeError as error:
        raise CallRefusedError(call, error) from None


# Outputs


def _encode_array(array: npt.NDArray[Any], dtype: str) -> tuple[str, list[int], msgpack.ExtType]:
    return (dtype, list(array.shape), msgpack.ExtType(EXT_RAW, np.ascontiguousarray(array, dtype=dtype).tobytes()))


#: Messages of errors may quote file names that are not UTF-8; an answer that cannot be sent would be worse.
_LENIENT = "backslashreplace"


def _encode_output(output: m.EngineCoreOutput) -> tuple[Any, ...]:
    logprobs = output.new_logprobs
    error = output.error
    return (
        output.request_id,
        output.new_token_ids,
        None
        if logprobs is None
        else (
            _encode_array(logprobs.token_ids, "<i4"),
            _encode_array(logprobs.logprobs, "<f4"),
            _encode_array(logprobs.sampled_ranks, "<i4"),
            None,
        ),
        None,
        None,
        None if output.finish_reason is None else int(output.finish_reason),
        output.stop_reason,
        None,
        None,
        None,
        None,
        output.prefill_stats,
        None,
        0,
        None,
        None,
        None,
        None,
        None if error is None else {"code": error.code, "message": error.message, "retryable": error.retryable},
        output.admission,
    )


def encode_outputs(outputs: m.EngineCoreOutputs) -> bytes:
    """EngineCoreOutputs as 10 elements (vLLM's 9 and ours), each output as 20 (19 and ours), arrays inline."""
    utility = outputs.utility_output
    return _pack(
        (
            outputs.engine_index,
            [_encode_output(output) for output in outputs.outputs],
            outputs.scheduler_stats,
            outputs.timestamp or time.monotonic(),
            None
            if utility is None
            else (
                utility.call_id,
                utility.failure,
                None if utility.failure is not None else (None, utility.result),
                utility.reason,
            ),
            outputs.finished_requests,
            outputs.wave_complete,
            outputs.start_wave,
            outputs.weight_version,
            outputs.weight_commit,
        ),
        _LENIENT,
    )


def _decode_ndarray(value: Any, name: str, buffers: Sequence[bytes], dtypes: tuple[str, ...]) -> npt.NDArray[Any]:
    row = _array(value, name, 3)
    _shallow(row[3:], 6)
    dtype = _text(row[0], f"{name} dtype")
    if dtype not in dtypes:
        _fail("bad_array", f"{name} has dtype {dtype!r}, allowed are {', '.join(dtypes)}")
    shape = [_int(item, f"{name} shape", 0, U32) for item in _array(row[1], f"{name} shape", 0)]
    data = row[2]
    if isinstance(data, msgpack.ExtType):
        raw = data.data
    else:
        index = _int(data, f"{name} buffer index", 1, U32)
        if index > len(buffers):
            _fail("bad_array", f"{name} names buffer {index} of {len(buffers)}")
        raw = buffers[index - 1]
    count = 1
    for size in shape:
        count *= size
    if count * np.dtype(dtype).itemsize != len(raw):
        _fail("bad_array", f"{name} of shape {shape} and dtype {dtype} does not fit {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _decode_logprobs(value: Any, buffers: Sequence[bytes]) -> m.LogprobsLists:
    row = _array(value, "new_logprobs", 3)
    _shallow(row[3:], 5)
    ids = _decode_ndarray(row[0], "logprob token ids", buffers, ("<i4", "<i8"))
    logprobs = _decode_ndarray(row[1], "logprobs", buffers, ("<f4", "<f8"))
    ranks = _decode_ndarray(row[2], "sampled ranks", buffers, ("<i4", "<i8"))
    if ids.ndim != 2 or ids.shape != logprobs.shape or ranks.shape != ids.shape[:1] or ids.shape[1] == 0:
        _fail("bad_array", f"log-probs have shapes {ids.shape}, {logprobs.shape} and {ranks.shape}")
    return m.LogprobsLists(ids.astype("<i4", copy=False), logprobs.astype("<f4", copy=False), ranks.astype("<i4"))


def _decode_output(value: Any, buffers: Sequence[bytes]) -> tuple[m.EngineCoreOutput, int]:
    row = _array(value, "EngineCoreOutput", 2)
    known = len(row)
    if known < 20:
        row = row + [None] * (20 - known)
        if known <= 13:
            row[13] = 0
    for index in (3, 4, 7, 8, 9, 10, 12, 14, 15, 16, 17):
        if row[index] is not None:
            _shallow(row[index])
    for index, name in ((8, "kv_transfer_params"), (9, "ec_transfer_params"), (10, "trace_headers")):
        if row[index] is not None:
            _map(row[index], name)
    if row[7] is not None:
        _array(row[7], "events", 0)
    _int(row[13], "num_nans_in_logits", 0, I64)
    for element in row[20:]:
        _shallow(element)
    stop_reason = row[6]
    if stop_reason is not None and not isinstance(stop_reason, str):
        _int(stop_reason, "stop_reason", -(2**63), I64)
    error = None
    if row[18] is not None:
        fields = _shallow(_map(row[18], "error"))
        error = m.EngineError(
            _text(fields.get("code"), "error code"),
            _text(fields.get("message"), "error message"),
            _bool(fields.get("retryable", False), "error retryable"),
        )
    admission = None
    extra = max(known - 20, 0)
    if row[19] is not None:
        pair = _array(row[19], "admission", 2)
        _shallow(pair[2:], 5)
        extra += len(pair) - 2
        admission = (_text(pair[0], "admission label"), _int(pair[1], "admission commit", 0, U64))
    output = m.EngineCoreOutput(
        request_id=_text(row[0], "request_id"),
        new_token_ids=_token_ids(row[1], "new_token_ids"),
        new_logprobs=None if row[2] is None else _decode_logprobs(row[2], buffers),
        finish_reason=None if row[5] is None else m.FinishReason(_int(row[5], "finish_reason", 0, 4)),
        stop_reason=stop_reason,
        prefill_stats=None if row[11] is None else _shallow(_map(row[11], "prefill_stats")),
        error=error,
        admission=admission,
    )
    if output.new_logprobs is not None and len(output.new_logprobs.token_ids) != len(output.new_token_ids):
        _fail("bad_array", "log-probs and new tokens differ in number")
    return output, extra


def _decode_utility(value: Any) -> tuple[m.UtilityOutput, int]:
    row = _array(value, "UtilityOutput", 3)
    _shallow(row[4:], 2)
    result = None
    if row[2] is not None:
        pair = _array(row[2], "UtilityResult", 2)
        if pair[0] is not None:
            _fail("bad_extension", "a utility result with type hints (pickle) is not allowed")
        result = _shallow(pair[1])
        _shallow(pair[2:], 3)
    reason = row[3] if len(row) > 3 else None
    utility = m.UtilityOutput(
        call_id=_int(row[0], "call_id", 0, U64),
        failure=None if row[1] is None else _text(row[1], "failure"),
        result=result,
        reason=None if reason is None else _text(reason, "reason"),
    )
    return utility, max(len(row) - 4, 0)


def decode_outputs(frames: Sequence[bytes]) -> m.EngineCoreOutputs:
    """Reads EngineCoreOutputs.

    Args:
        frames: the message, then the auxiliary buffers that its arrays name by 1-based index.

    Raises:
        DecodeError: the message is not well formed.
    """
    row = _array(_unpack(frames[0]), "EngineCoreOutputs", 0)
    skipped = max(len(row) - 10, 0)
    for element in row[10:]:
        _shallow(element, 2)
    row = row + [0, [], None, 0.0, None, None, None, None, None, None][len(row) :]
    outputs = []
    for item in _array(row[1], "outputs", 0):
        output, extra = _decode_output(item, frames[1:])
        outputs.append(output)
        skipped += extra
    utility = None
    if row[4] is not None:
        utility, extra = _decode_utility(row[4])
        skipped += extra
    message = m.EngineCoreOutputs(
        engine_index=_int(row[0], "engine_index", 0, U32),
        outputs=outputs,
        scheduler_stats=None if row[2] is None else _shallow(_map(row[2], "scheduler_stats"), 2),
        timestamp=_float(row[3], "timestamp"),
        utility_output=utility,
        finished_requests=None
        if row[5] is None
        else [_text(item, "finished request") for item in _array(row[5], "finished_requests", 0)],
        wave_complete=None if row[6] is None else _int(row[6], "wave_complete", 0, I64),
        start_wave=None if row[7] is None else _int(row[7], "start_wave", 0, I64),
        weight_version=None if row[8] is None else _text(row[8], "weight_version"),
        weight_commit=None if row[9] is None else _int(row[9], "weight_commit", 0, U64),
        skipped_fields=skipped,
    )
    _check_family(message)
    return message


def _check_family(message: m.EngineCoreOutputs) -> None:
    batch = bool(message.outputs) or message.scheduler_stats is not None or message.finished_requests is not None
    families = (
        int(batch)
        + int(message.utility_output is not None)
        + int(message.wave_complete is not None)
        + int(message.start_wave is not None)
    )
    if families != 1:
        _fail("family", f"a message of {families} families instead of one")


# Hello and death


def encode_client_hello(hello: m.ClientHello) -> bytes:
    """CLIENT_HELLO."""
    return _pack({"magic": m.MAGIC, **dataclasses.asdict(hello)})


def encode_engine_hello(hello: m.EngineHello) -> bytes:
    """ENGINE_HELLO."""
    return _pack({"magic": m.MAGIC, **dataclasses.asdict(hello)}, _LENIENT)


def _check_hello(payload: bytes) -> tuple[dict[str, Any], tuple[int, int]]:
    fields = _shallow(_map(_unpack(payload), "hello"), 1)
    if fields.get("magic") != m.MAGIC:
        _fail("version", "the peer does not speak the rollspan engine link (wrong magic)")
    version = [_int(item, "version", 0, U32) for item in _array(fields.get("version"), "version", 2)]
    if version[0] != m.PROTOCOL_VERSION[0]:
        _fail(
            "version",
            f"the peer speaks version {version[0]} of the engine link, this side {m.PROTOCOL_VERSION[0]}: "
            "install the same rollspan release on both sides",
        )
    return fields, (version[0], version[1])


def decode_client_hello(payload: bytes) -> m.ClientHello:
    """Reads CLIENT_HELLO.

    Raises:
        DecodeError: not well formed, or of another protocol or major version.
    """
    fields, version = _check_hello(payload)
    return m.ClientHello(
        name=_text(fields.get("name"), "name"),
        version=version,
        role=_text(fields.get("role"), "role"),
        max_frame_bytes=_int(fields.get("max_frame_bytes", m.MAX_FRAME_BYTES), "max_frame_bytes", 1, I64),
    )


def decode_engine_hello(payload: bytes) -> m.EngineHello:
    """Reads ENGINE_HELLO.

    Raises:
        DecodeError: not well formed, or of another protocol or major version.
    """
    fields, version = _check_hello(payload)
    limits, model = _map(fields.get("limits"), "limits"), _map(fields.get("model"), "model")
    return m.EngineHello(
        limits=m.Limits(
            **{
                field.name: _int(limits.get(field.name, field.default), f"limits.{field.name}", 0, I64)
                for field in dataclasses.fields(m.Limits)
            }
        ),
        model=m.ModelFacts(
            **{name: _text(model.get(name), f"model.{name}") for name in ("name", "architecture", "dtype", "device")},
            num_parameters=_int(model.get("num_parameters"), "model.num_parameters", 0, I64),
            eos_token_ids=_token_ids(model.get("eos_token_ids"), "model.eos_token_ids"),
        ),
        weight_version=_text(fields.get("weight_version"), "weight_version"),
        weight_commit=_int(fields.get("weight_commit"), "weight_commit", 0, U64),
        rollspan_version=_text(fields.get("rollspan_version"), "rollspan_version"),
        pid=_int(fields.get("pid"), "pid", 0, U32),
        engine_index=_int(fields.get("engine_index", 0), "engine_index", 0, U32),
        paused=_bool(fields.get("paused", False), "paused"),
        version=version,
    )


def encode_dead(notice: m.DeadNotice) -> bytes:
    """DEAD."""
    return _pack(dataclasses.asdict(notice), _LENIENT)


def decode_dead(payload: bytes) -> m.DeadNotice:
    """Reads DEAD.

    Raises:
        DecodeError: the message is not well formed.
    """
    fields = _shallow(_map(_unpack(payload), "DEAD"), 1)
    return m.DeadNotice(_text(fields.get("reason"), "reason"), _text(fields.get("message"), "message"))
