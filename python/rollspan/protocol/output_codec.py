"""EngineCoreOutputs <-> MessagePack."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgpack

from rollspan.protocol import messages as m
from rollspan.protocol.arrays import (
    decode_experts,
    decode_logprobs,
    decode_tensors,
    encode_experts,
    encode_logprobs,
    encode_tensors,
)
from rollspan.protocol.strict import (
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

#: Stands for packed log-probs while the rest of a message is packed; nobody can write it into a request id.
_PLACE = msgpack.ExtType(127, secrets.token_bytes(16))
_PACKED_PLACE: bytes = msgpack.packb(_PLACE)


def _encode_output(output: m.EngineCoreOutput) -> tuple[Any, ...]:
    prompt_logprobs, experts, error = output.new_prompt_logprobs, output.routed_experts, output.error
    return (
        output.request_id,
        output.new_token_ids,
        None if output.new_logprobs is None else _PLACE,
        None if prompt_logprobs is None else encode_tensors(prompt_logprobs),
        None,
        None if output.finish_reason is None else int(output.finish_reason),
        output.stop_reason,
        None,
        None,
        None,
        None,
        output.prefill_stats,
        None if experts is None else encode_experts(experts),
        0,
        None,
        None,
        None,
        None,
        None if error is None else _encode_error(error),
        output.admission,
        *_encode_spans(output),
    )


def _encode_spans(output: m.EngineCoreOutput) -> tuple[Any, ...]:
    """Elements from the 21st on: none where an output has no such spans, as nearly all have."""
    if output.prompt_spans is not None:
        return output.kv_spans, output.prompt_spans
    return () if output.kv_spans is None else (output.kv_spans,)


def _encode_error(error: m.EngineError) -> dict[str, Any]:
    optional = {"param": error.param, "reason": error.reason}
    fields = {"code": error.code, "message": error.message, "retryable": error.retryable}
    return fields | {key: value for key, value in optional.items() if value is not None}


def _put_logprobs(packed: bytes, outputs: list[m.EngineCoreOutput]) -> bytes:
    """``packed`` with the log-probs of ``outputs`` in their places."""
    lists = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if not lists:
        return packed
    around = packed.split(_PACKED_PLACE)
    pieces = [b""] * (len(around) + len(lists))
    pieces[::2] = around
    pieces[1::2] = map(encode_logprobs, lists)
    return b"".join(pieces)


def encode_outputs(outputs: m.EngineCoreOutputs) -> bytes:
    """EngineCoreOutputs as 10 elements (vLLM's 9 and ours), each output as 20 to 22 (19 and ours), arrays inline."""
    utility = outputs.utility_output
    packed = pack(
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
    return _put_logprobs(packed, outputs.outputs)


def _decode_output(value: Any, buffers: Sequence[bytes]) -> tuple[m.EngineCoreOutput, int]:
    row = read_array(value, "EngineCoreOutput", 2)
    known = len(row)
    if known < 22:
        row = row + [None] * (22 - known)
        if known <= 13:
            row[13] = 0
    for index in (4, 7, 8, 9, 10, 14, 15, 16, 17):
        if row[index] is not None:
            shallow(row[index])
    for index, name in ((8, "kv_transfer_params"), (9, "ec_transfer_params"), (10, "trace_headers")):
        if row[index] is not None:
            read_map(row[index], name)
    if row[7] is not None:
        read_array(row[7], "events", 0)
    read_int(row[13], "num_nans_in_logits", 0, I64)
    for element in row[22:]:
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
            *(
                None if fields.get(key) is None else read_text(fields[key], f"error {key}")
                for key in ("param", "reason")
            ),
        )
    admission = None
    extra = max(known - 22, 0)
    if row[19] is not None:
        pair = read_array(row[19], "admission", 2)
        shallow(pair[2:], 5)
        extra += len(pair) - 2
        admission = (read_text(pair[0], "admission label"), read_int(pair[1], "admission commit", 0, U64))
    kv_spans, kv_extra = _decode_spans(row[20], "kv_spans")
    prompt_spans, prompt_extra = _decode_spans(row[21], "prompt_spans")
    output = m.EngineCoreOutput(
        request_id=read_text(row[0], "request_id"),
        new_token_ids=read_token_ids(row[1], "new_token_ids"),
        new_logprobs=None if row[2] is None else decode_logprobs(row[2], "new_logprobs", buffers),
        finish_reason=None if row[5] is None else m.FinishReason(read_int(row[5], "finish_reason", 0, 4)),
        stop_reason=stop_reason,
        prefill_stats=None if row[11] is None else shallow(read_map(row[11], "prefill_stats")),
        error=error,
        admission=admission,
        new_prompt_logprobs=None if row[3] is None else decode_tensors(row[3], "prompt_logprobs", buffers),
        routed_experts=None if row[12] is None else decode_experts(row[12], buffers),
        kv_spans=kv_spans,
        prompt_spans=prompt_spans,
    )
    if output.new_logprobs is not None and len(output.new_logprobs.token_ids) != len(output.new_token_ids):
        fail("bad_array", "log-probs and new tokens differ in number")
    return output, extra + kv_extra + prompt_extra


def _decode_spans(value: Any, name: str) -> tuple[list[m.StampSpan] | None, int]:
    """The spans, and how many elements of theirs were passed over."""
    if value is None:
        return None, 0
    spans: list[m.StampSpan] = []
    extra = 0
    for item in read_array(value, name, 0):
        row = read_array(item, name, 4)
        shallow(row[4:], 6)
        extra += len(row) - 4
        label, commit = read_text(row[0], f"{name} label"), read_int(row[1], f"{name} commit", 0, U64)
        spans.append(
            (label, commit, read_int(row[2], f"{name} start", 0, U32), read_int(row[3], f"{name} end", 0, U32))
        )
    return spans, extra


def _decode_stats(value: Any) -> dict[str, Any]:
    stats: dict[str, Any] = shallow(read_map(value, "scheduler_stats"), 2)
    if stats.get("prefix_cache_stats") is not None:
        read_map(stats["prefix_cache_stats"], "prefix_cache_stats")
    return stats


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
        scheduler_stats=None if row[2] is None else _decode_stats(row[2]),
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
