"""Messages <-> MessagePack, strict about everything except the length of positional arrays (PROTOCOL.md, Tolerance)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rollspan.errors import RollspanError
from rollspan.protocol import messages as m
from rollspan.protocol.output_codec import decode_outputs, encode_outputs
from rollspan.protocol.strict import (
    I64,
    LENIENT,
    U32,
    U64,
    DecodeError,
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
from rollspan.provenance import NO_PROVENANCE, Provenance
from rollspan.sampling_params import SamplingParams

__all__ = [
    "CallRefusedError",
    "DecodeError",
    "RequestRefusedError",
    "decode_abort",
    "decode_client_hello",
    "decode_dead",
    "decode_engine_hello",
    "decode_outputs",
    "decode_request",
    "decode_utility_call",
    "encode_abort",
    "encode_client_hello",
    "encode_dead",
    "encode_engine_hello",
    "encode_outputs",
    "encode_request",
    "encode_utility_call",
]


class RequestRefusedError(RollspanError):
    """A well-formed EngineCoreRequest that asks for what is not allowed; ``request_id`` says which."""

    def __init__(self, request_id: str, error: RollspanError) -> None:
        super().__init__(error.message, reason=error.reason, param=error.param)
        self.request_id = request_id


# Requests


def encode_request(request: m.EngineCoreRequest) -> bytes:
    """EngineCoreRequest as vLLM's 22 elements, and ours where it asks for anything."""
    provenance = request.provenance.to_wire()
    return pack(
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
            *(() if provenance is None else (provenance,)),
        )
    )


_REQUEST_DEFAULTS = (None, None, 0, 0, 0, None, False, None, None, None, False, None, None, None)
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
    row = read_array(unpack(payload), "EngineCoreRequest", 9)
    for element in (*row[2:3], *row[4:5], *row[6:7], *row[9:]):
        shallow(element, 2)
    row = row + list(_REQUEST_DEFAULTS[len(row) - 9 :]) if len(row) < 23 else row
    request_id = read_text(row[0], "request_id")
    try:
        return _decode_request(request_id, row)
    except RollspanError as error:
        raise RequestRefusedError(request_id, error) from None


def _decode_request(request_id: str, row: list[Any]) -> m.EngineCoreRequest:
    read_int(row[12], "current_wave", 0, I64)
    read_bool(row[15], "resumable")
    read_bool(row[19], "abort_immediately")
    for index, name in _REQUEST_UNSUPPORTED.items():
        if row[index]:
            raise RollspanError(f"{name} is not supported", reason="unsupported_field", param=name)
    for index, name in ((1, "prompt_token_ids"), (3, "sampling_params")):
        if row[index] is None:
            raise RollspanError(f"{name} is required", reason="invalid_request", param=name)
    optional_text = {
        name: None if row[index] is None else read_text(row[index], name)
        for index, name in ((7, "cache_salt"), (16, "external_req_id"), (20, "session_id"))
    }
    return m.EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=read_token_ids(row[1], "prompt_token_ids"),
        sampling_params=SamplingParams.from_wire(shallow(read_map(row[3], "sampling_params"), 2)),
        arrival_time=read_float(row[5], "arrival_time"),
        data_parallel_rank=None if row[8] is None else read_int(row[8], "data_parallel_rank", 0, U32),
        client_index=read_int(row[11], "client_index", 0, U32),
        priority=read_int(row[13], "priority", -(2**63), I64),
        provenance=NO_PROVENANCE if row[22] is None else Provenance.from_fields(read_map(row[22], "provenance")),
        **optional_text,
    )


def encode_abort(request_ids: Sequence[str]) -> bytes:
    """ABORT: internal request ids."""
    return pack(list(request_ids))


def decode_abort(payload: bytes) -> list[str]:
    """Reads ABORT.

    Raises:
        DecodeError: the message is not well formed.
    """
    return [read_text(item, "request id") for item in read_array(unpack(payload), "ABORT", 0)]


def encode_utility_call(call: m.UtilityCall) -> bytes:
    """UTILITY as 4 elements."""
    return pack((call.client_index, call.call_id, call.method, call.args))


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
    row = read_array(unpack(payload), "UTILITY", 4)
    call = m.UtilityCall(
        read_int(row[0], "client_index", 0, U32),
        read_int(row[1], "call_id", 0, U64),
        read_text(row[2], "method"),
        [],
    )
    try:
        shallow(row[4:], 1)
        return dataclasses.replace(call, args=shallow(read_array(row[3], "args", 0), 2))
    except DecodeError as error:
        raise CallRefusedError(call, error) from None


# Hello and death


def encode_client_hello(hello: m.ClientHello) -> bytes:
    """CLIENT_HELLO."""
    return pack({"magic": m.MAGIC, **dataclasses.asdict(hello)})


def encode_engine_hello(hello: m.EngineHello) -> bytes:
    """ENGINE_HELLO."""
    return pack({"magic": m.MAGIC, **dataclasses.asdict(hello)}, LENIENT)


def _check_hello(payload: bytes) -> tuple[dict[str, Any], tuple[int, int]]:
    fields = shallow(read_map(unpack(payload), "hello"), 1)
    if fields.get("magic") != m.MAGIC:
        fail("version", "the peer does not speak the rollspan engine link (wrong magic)")
    version = [read_int(item, "version", 0, U32) for item in read_array(fields.get("version"), "version", 2)]
    if version[0] != m.PROTOCOL_VERSION[0]:
        fail(
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
        name=read_text(fields.get("name"), "name"),
        version=version,
        role=read_text(fields.get("role"), "role"),
        max_frame_bytes=read_int(fields.get("max_frame_bytes", m.MAX_FRAME_BYTES), "max_frame_bytes", 1, I64),
    )


def decode_engine_hello(payload: bytes) -> m.EngineHello:
    """Reads ENGINE_HELLO.

    Raises:
        DecodeError: not well formed, or of another protocol or major version.
    """
    fields, version = _check_hello(payload)
    limits, model = read_map(fields.get("limits"), "limits"), read_map(fields.get("model"), "model")
    return m.EngineHello(
        limits=m.Limits(
            **{
                field.name: read_int(limits.get(field.name, field.default), f"limits.{field.name}", 0, I64)
                for field in dataclasses.fields(m.Limits)
            }
        ),
        model=m.ModelFacts(
            **{
                name: read_text(model.get(name), f"model.{name}")
                for name in ("name", "architecture", "dtype", "device")
            },
            num_parameters=read_int(model.get("num_parameters"), "model.num_parameters", 0, I64),
            eos_token_ids=read_token_ids(model.get("eos_token_ids"), "model.eos_token_ids"),
        ),
        weight_version=read_text(fields.get("weight_version"), "weight_version"),
        weight_commit=read_int(fields.get("weight_commit"), "weight_commit", 0, U64),
        rollspan_version=read_text(fields.get("rollspan_version"), "rollspan_version"),
        pid=read_int(fields.get("pid"), "pid", 0, U32),
        engine_index=read_int(fields.get("engine_index", 0), "engine_index", 0, U32),
        paused=read_bool(fields.get("paused", False), "paused"),
        weight_state=read_text(fields.get("weight_state", "ready"), "weight_state"),
        version=version,
    )


def encode_dead(notice: m.DeadNotice) -> bytes:
    """DEAD."""
    return pack(dataclasses.asdict(notice), LENIENT)


def decode_dead(payload: bytes) -> m.DeadNotice:
    """Reads DEAD.

    Raises:
        DecodeError: the message is not well formed.
    """
    fields = shallow(read_map(unpack(payload), "DEAD"), 1)
    return m.DeadNotice(read_text(fields.get("reason"), "reason"), read_text(fields.get("message"), "message"))
