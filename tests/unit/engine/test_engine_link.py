"""A link of the engine process over a socket pair: what it lets in, what closes it, and that it blocks nobody."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from rollspan.engine import link as link_module
from rollspan.engine.link import Link
from rollspan.protocol import codec
from rollspan.protocol import messages as m
from rollspan.protocol.framing import FrameKind, FrameReader, encode_frame
from rollspan.sampling_params import SamplingParams

TIMEOUT = 20.0
REQUEST = m.EngineCoreRequest("r1", [1, 2], SamplingParams(max_tokens=4))
DEAD = m.DeadNotice("shutting_down", "bye")


class Pair:
    """A link and the frontend's end of its socket."""

    def __init__(self) -> None:
        self.peer, engine_end = socket.socketpair()
        self.peer.settimeout(TIMEOUT)
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.link = Link(engine_end, 3, self.said.put)

    def hear(self) -> Any:
        """The next thing that the link says to the engine."""
        link, message = self.said.get(timeout=TIMEOUT)
        assert link is self.link
        return message

    def read(self) -> list[tuple[FrameKind, bytes]]:
        """All frames until the link ends."""
        frames, found = FrameReader(), []
        try:
            while data := self.peer.recv(1 << 16):
                found += frames.feed(data)
        except ConnectionError:
            pass
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.link.close(TIMEOUT)
    pair.peer.close()


def frame(kind: int, payload: bytes) -> bytes:
    """A frame with any kind."""
    return (len(payload) + 1).to_bytes(4, "big") + bytes([kind]) + payload


def test_every_kind_of_message_arrives_in_order_however_the_bytes_come(pair: Pair) -> None:
    call = m.UtilityCall(0, 7, "resume_scheduler", [])
    stream = b"".join(
        (
            encode_frame(FrameKind.CLIENT_HELLO, codec.encode_client_hello(m.ClientHello("test"))),
            encode_frame(FrameKind.ADD, codec.encode_request(REQUEST)),
            encode_frame(FrameKind.ABORT, codec.encode_abort(["r1"])),
            encode_frame(FrameKind.UTILITY, codec.encode_utility_call(call)),
        )
    )
    for byte in stream:
        pair.peer.send(bytes([byte]))
    assert [pair.hear() for _ in range(4)] == [m.ClientHello("test"), REQUEST, ["r1"], call]


def test_a_request_that_is_refused_leaves_the_link_open(pair: Pair) -> None:
    row = list(msgpack.unpackb(codec.encode_request(REQUEST)))
    row[3] = {"temperature": 9.0}
    pair.peer.sendall(frame(FrameKind.ADD, msgpack.packb(row)))
    refused = pair.hear()
    assert isinstance(refused, codec.RequestRefusedError)
    assert refused.request_id == "r1"
    pair.peer.sendall(frame(FrameKind.ADD, codec.encode_request(REQUEST)))
    assert pair.hear() == REQUEST


BROKEN = {
    "a frame over the limit": (m.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    "the largest length there is": b"\xff\xff\xff\xff",
    "an empty frame": b"\0\0\0\0",
    "an unknown kind": frame(0x7F, b"\xc0"),
    "vLLM's kind 2, which is not ours": frame(0x02, b"\xc0"),
    "a kind that only engines send": frame(FrameKind.OUTPUTS, codec.encode_outputs(m.EngineCoreOutputs([]))),
    "another one": frame(FrameKind.DEAD, codec.encode_dead(DEAD)),
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a frame without a payload": frame(FrameKind.ADD, b""),
    "a message that is cut short": frame(FrameKind.ADD, codec.encode_request(REQUEST)[:-3]),
    "bytes after the message": frame(FrameKind.ABORT, codec.encode_abort(["r1"]) + b"\0"),
    "a request of too few elements": frame(FrameKind.ADD, msgpack.packb(["r1", [1]])),
    "a request as a map": frame(FrameKind.ADD, msgpack.packb({"request_id": "r1"})),
    "a negative token": frame(FrameKind.ADD, msgpack.packb(["r1", [-1], None, {}, None, 0.0, None, None, None])),
    "aborts that are no strings": frame(FrameKind.ABORT, msgpack.packb([1])),
    "a call as a string": frame(FrameKind.UTILITY, msgpack.packb("resume")),
    "a pickle": frame(FrameKind.UTILITY, msgpack.packb([0, 1, "f", [msgpack.ExtType(1, b"x")]])),
    "text that is not UTF-8": frame(FrameKind.ABORT, b"\x91\xa1\xff"),
    "another protocol": frame(FrameKind.CLIENT_HELLO, msgpack.packb({"magic": "HTTP", "version": [1, 0]})),
    "another major version": frame(
        FrameKind.CLIENT_HELLO,
        msgpack.packb({"magic": "rollspan", "version": [2, 0], "role": "frontend", "name": "x"}),
    ),
    "random bytes": bytes(range(255, 0, -1)),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_what_is_no_valid_message_ends_the_link_after_what_came_before_it(
    pair: Pair, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair.peer.sendall(encode_frame(FrameKind.ADD, codec.encode_request(REQUEST)))
    assert pair.hear() == REQUEST
    pair.peer.sendall(BROKEN[what])
    assert pair.hear() is None
    assert pair.read() == []
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "frontend 3 sent what is no valid message" in caplog.text


def test_the_end_of_the_stream_is_told_once_and_quietly(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.peer.sendall(encode_frame(FrameKind.ABORT, codec.encode_abort(["r1"]))[:-1])
    pair.peer.close()
    assert pair.hear() is None
    with pytest.raises(queue.Empty):
        pair.said.get(timeout=0.05)
    assert not caplog.records


def test_what_is_queued_is_sent_before_a_close(pair: Pair) -> None:
    for index in range(100):
        pair.link.send(FrameKind.OUTPUTS, m.EngineCoreOutputs(finished_requests=[f"r{index}"]))
    pair.link.send(FrameKind.DEAD, DEAD)
    pair.link.close(TIMEOUT)
    frames = pair.read()
    assert [kind for kind, _ in frames] == [FrameKind.OUTPUTS] * 100 + [FrameKind.DEAD]
    assert codec.decode_dead(frames[-1][1]) == DEAD


def test_closing_does_not_wait_for_a_frontend_that_does_not_read(pair: Pair) -> None:
    message = m.EngineCoreOutputs(finished_requests=["x" * 100_000])
    for _ in range(100):
        pair.link.send(FrameKind.OUTPUTS, message)
    pair.link.close(0.05)
    assert pair.hear() is None


def test_a_frontend_that_stops_reading_is_cut_off_and_never_blocks_the_engine(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "MAX_PENDING", 50)
    message = m.EngineCoreOutputs(finished_requests=["x" * 100_000])
    for _ in range(200):
        pair.link.send(FrameKind.OUTPUTS, message)
    assert pair.hear() is None
    assert "frontend 3 has stopped reading" in caplog.text


def test_sending_to_a_link_that_is_gone_is_harmless(pair: Pair) -> None:
    pair.peer.close()
    assert pair.hear() is None
    for _ in range(10):
        pair.link.send(FrameKind.OUTPUTS, m.EngineCoreOutputs(finished_requests=["x"]))
    pair.link.abandon()
    pair.link.abandon()


def test_a_text_that_no_utf_8_can_hold_is_sent_all_the_same(pair: Pair) -> None:
    reply = m.UtilityOutput(1, failure="broken file name \udcff", reason="weights_invalid")
    pair.link.send(FrameKind.OUTPUTS, m.EngineCoreOutputs(utility_output=reply))
    pair.link.close(TIMEOUT)
    sent = codec.decode_outputs([pair.read()[0][1]]).utility_output
    assert sent is not None
    assert sent.failure == "broken file name \\udcff"


def test_a_message_that_cannot_be_encoded_ends_the_link_instead_of_leaving_the_frontend_to_wait(pair: Pair) -> None:
    pair.link.send(FrameKind.OUTPUTS, m.EngineCoreOutputs(scheduler_stats={"no": object()}))
    assert pair.read() == []
    assert pair.hear() is None
