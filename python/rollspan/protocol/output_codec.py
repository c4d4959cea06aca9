"""EngineCoreOutputs <-> MessagePack."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from rollspan.protocol import messages as m
from rollspan.protocol.strict import (
    EXT_RAW,
    I64,
    LENIENT,
    U32,
    U64,
    fail,
    pack,
    read_array,
    read_bool,
    read_float,
    read_int,
    read_map,
    read_text,
    read_token_ids,
    shallow,
    unpack,
)


def _encode_array(array: npt.NDArray[Any], dtype: str) -> tuple[str, list[int], msgpack.ExtType]:
    return (dtype, list(array.shape), msgpack.ExtType(EXT_RAW, np.ascontiguousarray(array, dtype=dtype).tobytes()))


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
    return pack(
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
        LENIENT,
    )


def _decode_ndarray(value: Any, name: str, buffers: Sequence[bytes], dtypes: tuple[str, ...]) -> npt.NDArray[Any]:
    row = read_array(value, name, 3)
    shallow(row[3:], 6)
    dtype = read_text(row[0], f"{name} dtype")
    if dtype not in dtypes:
        fail("bad_array", f"{name} has dtype {dtype!r}, allowed are {', '.join(dtypes)}")
    shape = [read_int(item, f"{name} shape", 0, U32) for item in read_array(row[1], f"{name} shape", 0)]
    data = row[2]
    if isinstance(data, msgpack.ExtType):
        raw = data.data
    else:
        index = read_int(data, f"{name} buffer index", 1, U32)
        if index > len(buffers):
            fail("bad_array", f"{name} names buffer {index} of {len(buffers)}")
        raw = buffers[index - 1]
    count = 1
    for size in shape:
        count *= size
    if count * np.dtype(dtype).itemsize != len(raw):
        fail("bad_array", f"{name} of shape {shape} and dtype {dtype} does not fit {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _decode_logprobs(value: Any, buffers: Sequence[bytes]) -> m.LogprobsLists:
    row = read_array(value, "new_logprobs", 3)
    shallow(row[3:], 5)
    ids = _decode_ndarray(row[0], "logprob token ids", buffers, ("<i4", "<i8"))
    logprobs = _decode_ndarray(row[1], "logprobs", buffers, ("<f4", "<f8"))
    ranks = _decode_ndarray(row[2], "sampled ranks", buffers, ("<i4", "<i8"))
    if ids.ndim != 2 or ids.shape != logprobs.shape or ranks.shape != ids.shape[:1] or ids.shape[1] == 0:
        fail("bad_array", f"log-probs have shapes {ids.shape}, {logprobs.shape} and {ranks.shape}")
    return m.LogprobsLists(ids.astype("<i4", copy=False), logprobs.astype("<f4", copy=False), ranks.astype("<i4"))


def _decode_output(value: Any, buffers: Sequence[bytes]) -> tuple[m.EngineCoreOutput, int]:
    row = read_array(value, "EngineCoreOutput", 2)
    known = len(row)
    if known < 20:
        row = row + [None] * (20 - known)
        if known <= 13:
            row[13] = 0
    for index in (3, 4, 7, 8, 9, 10, 12, 14, 15, 16, 17):
        if row[index] is not None:
            shallow(row[index])
    for index, name in ((8, "kv_transfer_params"), (9, "ec_transfer_params"), (10, "trace_headers")):
        if row[index] is not None:
            read_map(row[index], name)
    if row[7] is not None:
        read_array(row[7], "events", 0)
    read_int(row[13], "num_nans_in_logits", 0, I64)
    for element in row[20:]:
        shallow(element)
    stop_reason = row[6]
    if stop_reason is not None and not isinstance(stop_reason, str):
        read_int(stop_reason, "stop_reason", -(2**63), I64)
    error = None
    if row[18] is not None:
        fields = shallow(read_map(row[18], "error"))
        error = m.EngineError(
            read_text(fields.get("code"), "error code"),
            read_text(fields.get("message"), "error message"),
            read_bool(fields.get("retryable", False), "error retryable"),
        )
    admission = None
    extra = max(known - 20, 0)
    if row[19] is not None:
        pair = read_array(row[19], "admission", 2)
        shallow(pair[2:], 5)
        extra += len(pair) - 2
        admission = (read_text(pair[0], "admission label"), read_int(pair[1], "admission commit", 0, U64))
    output = m.EngineCoreOutput(
        request_id=read_text(row[0], "request_id"),
        new_token_ids=read_token_ids(row[1], "new_token_ids"),
        new_logprobs=None if row[2] is None else _decode_logprobs(row[2], buffers),
        finish_reason=None if row[5] is None else m.FinishReason(read_int(row[5], "finish_reason", 0, 4)),
        stop_reason=stop_reason,
        prefill_stats=None if row[11] is None else shallow(read_map(row[11], "prefill_stats")),
        error=error,
        admission=admission,
    )
    if output.new_logprobs is not None and len(output.new_logprobs.token_ids) != len(output.new_token_ids):
        fail("bad_array", "log-probs and new tokens differ in number")
    return output, extra


def _decode_utility(value: Any) -> tuple[m.UtilityOutput, int]:
    row = read_array(value, "UtilityOutput", 3)
    shallow(row[4:], 2)
    result = None
    if row[2] is not None:
        pair = read_array(row[2], "UtilityResult", 2)
        if pair[0] is not None:
            fail("bad_extension", "a utility result with type hints (pickle) is not allowed")
        result = shallow(pair[1])
        shallow(pair[2:], 3)
    reason = row[3] if len(row) > 3 else None
    utility = m.UtilityOutput(
        call_id=read_int(row[0], "call_id", 0, U64),
        failure=None if row[1] is None else read_text(row[1], "failure"),
        result=result,
        reason=None if reason is None else read_text(reason, "reason"),
    )
    return utility, max(len(row) - 4, 0)


def decode_outputs(frames: Sequence[bytes]) -> m.EngineCoreOutputs:
    """Reads EngineCoreOutputs.

    Args:
        frames: the message, then the auxiliary buffers that its arrays name by 1-based index.

    Raises:
        DecodeError: the message is not well formed.
    """
    row = read_array(unpack(frames[0]), "EngineCoreOutputs", 0)
    skipped = max(len(row) - 10, 0)
    for element in row[10:]:
        shallow(element, 2)
    row = row + [0, [], None, 0.0, None, None, None, None, None, None][len(row) :]
    outputs = []
    for item in read_array(row[1], "outputs", 0):
        output, extra = _decode_output(item, frames[1:])
        outputs.append(output)
        skipped += extra
    utility = None
    if row[4] is not None:
        utility, extra = _decode_utility(row[4])
        skipped += extra
    message = m.EngineCoreOutputs(
        engine_index=read_int(row[0], "engine_index", 0, U32),
        outputs=outputs,
        scheduler_stats=None if row[2] is None else shallow(read_map(row[2], "scheduler_stats"), 2),
        timestamp=read_float(row[3], "timestamp"),
        utility_output=utility,
        finished_requests=None
        if row[5] is None
        else [read_text(item, "finished request") for item in read_array(row[5], "finished_requests", 0)],
        wave_complete=None if row[6] is None else read_int(row[6], "wave_complete", 0, I64),
        start_wave=None if row[7] is None else read_int(row[7], "start_wave", 0, I64),
        weight_version=None if row[8] is None else read_text(row[8], "weight_version"),
        weight_commit=None if row[9] is None else read_int(row[9], "weight_commit", 0, U64),
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
        fail("family", f"a message of {families} families instead of one")
