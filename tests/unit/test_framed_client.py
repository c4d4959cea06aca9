"""The asyncio engine link, against a scripted engine on a real socket."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollspan.admission import admit
from rollspan.client.framed import FramedClient
from rollspan.errors import RollspanError
from rollspan.protocol import codec
from rollspan.protocol.framing import FrameKind
from rollspan.protocol.messages import EngineCoreOutputs
from rollspan.sampling_params import SamplingParams
from support.fake_engine import HELLO, FakeEngine, batch, output

PATIENCE = 10.0


@pytest.fixture
async def engine(socket_path: Path) -> AsyncIterator[FakeEngine]:
    async with FakeEngine(socket_path) as started:
        yield started


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[FramedClient]:
    connected = await FramedClient.connect(engine.path, PATIENCE)
    yield connected
    await connected.close()


async def death_of(client: FramedClient) -> RollspanError:
    died: asyncio.Future[RollspanError] = asyncio.get_running_loop().create_future()
    client.set_death_handler(died.set_result)
    return await asyncio.wait_for(died, PATIENCE)


async def test_the_hello_comes_first(client: FramedClient) -> None:
    assert client.hello == HELLO


async def test_connecting_waits_until_the_engine_has_bound_its_socket(socket_path: Path) -> None:
    connecting = asyncio.create_task(FramedClient.connect(socket_path, PATIENCE))
    await asyncio.sleep(0)
    async with FakeEngine(socket_path):
        client = await connecting
        await client.close()


async def test_connecting_gives_up_when_the_time_is_over(socket_path: Path) -> None:
    with pytest.raises(RollspanError, match=r"not ready within 0\.1 s") as caught:
        await FramedClient.connect(socket_path, 0.1)
    assert caught.value.reason == "engine_starting"


async def test_connecting_gives_up_when_the_engine_process_is_gone(socket_path: Path) -> None:
    with pytest.raises(RollspanError, match="ended before it was ready") as caught:
        await FramedClient.connect(socket_path, PATIENCE, alive=lambda: False)
    assert caught.value.reason == "engine_dead"


async def test_a_connection_reset_by_the_engine_before_its_hello_is_its_death(socket_path: Path) -> None:
    async with await asyncio.start_unix_server(lambda _, writer: writer.close(), socket_path):
        with pytest.raises(RollspanError) as caught:
            await FramedClient.connect(socket_path, PATIENCE)
    assert caught.value.reason == "engine_dead"


async def serve_once(path: Path, data: bytes) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(data)
        writer.close()

    return await asyncio.start_unix_server(answer, path)


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (b"", "engine_dead", "closed the link"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "decode_error", "engine link"),
        (b"\x00\x00\x00\x02\x20\x80", "decode_error", "magic"),
        (b"\x00\x00\x00\x02\x7f\x80", "decode_error", "unknown frame kind"),
    ],
)
async def test_a_peer_that_is_no_engine_is_refused(socket_path: Path, data: bytes, reason: str, message: str) -> None:
    async with await serve_once(socket_path, data):
        with pytest.raises(RollspanError, match=message) as caught:
            await FramedClient.connect(socket_path, PATIENCE)
    assert caught.value.reason == reason


async def test_an_engine_of_another_major_version_is_refused(socket_path: Path) -> None:
    async with FakeEngine(socket_path, dataclasses.replace(HELLO, version=(2, 0))):
        with pytest.raises(RollspanError) as caught:
            await FramedClient.connect(socket_path, PATIENCE)
    assert caught.value.reason == "decode_error"


async def test_requests_and_aborts_arrive_as_they_were_sent(engine: FakeEngine, client: FramedClient) -> None:
    (request,) = admit([1, 2, 3], SamplingParams(seed=3, max_tokens=4), HELLO, session_id="s").engine_requests
    await client.add_request(request)
    assert await engine.requests.get() == request
    await client.abort([request.request_id, "other"])
    assert await engine.aborts.get() == [request.request_id, "other"]


async def test_batches_reach_the_handler_in_order(engine: FakeEngine, client: FramedClient) -> None:
    received: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
    client.set_output_handler(received.put_nowait)
    messages = [batch(output("r", number), version=str(number), commit=number) for number in range(5)]
    for message in messages:
        engine.send(message)
    assert [await received.get() for _ in messages] == messages


async def test_calls_are_answered_in_any_order(engine: FakeEngine, client: FramedClient) -> None:
    pause = asyncio.create_task(client.call_utility("pause_generation", "wait", False))
    first = await engine.calls.get()
    assert (first.method, first.args) == ("pause_generation", ["wait", False])
    version = asyncio.create_task(client.call_utility("get_weight_version"))
    second = await engine.calls.get()
    assert second.call_id != first.call_id
    engine.reply(second.call_id, "label")
    assert await version == "label"
    engine.reply(first.call_id)
    assert await pause is None


async def test_a_refused_call_raises_with_the_engines_reason(engine: FakeEngine, client: FramedClient) -> None:
    call = asyncio.create_task(client.call_utility("start_weight_update"))
    engine.reply((await engine.calls.get()).call_id, failure="an update is open", reason="update_active")
    with pytest.raises(RollspanError, match="an update is open") as caught:
        await call
    assert (caught.value.reason, caught.value.status) == ("update_active", 409)


async def test_a_refused_call_without_a_reason_is_an_internal_error(engine: FakeEngine, client: FramedClient) -> None:
    call = asyncio.create_task(client.call_utility("start_weight_update"))
    engine.reply((await engine.calls.get()).call_id, failure="Call to start_weight_update method failed: boom")
    with pytest.raises(RollspanError, match="boom") as caught:
        await call
    assert caught.value.reason == "internal_error"


async def test_the_answer_to_a_call_that_was_given_up_is_dropped(engine: FakeEngine, client: FramedClient) -> None:
    given_up = asyncio.create_task(client.call_utility("pause_generation", "wait", False))
    call = await engine.calls.get()
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    engine.reply(call.call_id)
    engine.answers["get_weight_commit"] = lambda: 3
    assert await client.call_utility("get_weight_commit") == 3


async def test_end_of_stream_is_the_death_of_the_engine(engine: FakeEngine, client: FramedClient) -> None:
    call = asyncio.create_task(client.call_utility("pause_generation", "wait", False))
    await engine.calls.get()
    engine.hang_up()
    assert (await death_of(client)).reason == "engine_dead"
    with pytest.raises(RollspanError, match="closed the link"):
        await call
    with pytest.raises(RollspanError) as caught:
        await client.call_utility("get_weight_version")
    assert caught.value.reason == "engine_dead"
    await client.abort(["r"])


async def test_the_last_words_of_an_engine_are_passed_on(engine: FakeEngine, client: FramedClient) -> None:
    engine.die("out of memory")
    death = await death_of(client)
    assert (death.reason, death.message) == ("engine_dead", "the engine died: out of memory")


@pytest.mark.parametrize(
    ("kind", "payload", "counted"),
    [
        (FrameKind.OUTPUTS, b"\xc1", "malformed"),
        (FrameKind.OUTPUTS, b"\x80", "wrong_type"),
        (FrameKind.OUTPUTS, codec.encode_outputs(batch()) + b"\x00", "trailing_bytes"),
        (FrameKind.ADD, b"\x90", "framing"),
    ],
)
async def test_a_message_that_cannot_be_read_ends_the_link_loudly(
    engine: FakeEngine, client: FramedClient, kind: FrameKind, payload: bytes, counted: str
) -> None:
    engine.send_frame(kind, payload)
    assert (await death_of(client)).reason == "decode_error"
    assert client.decode_errors == {counted: 1}
    await asyncio.wait_for(engine.closed.wait(), PATIENCE)


async def test_a_bug_in_the_output_handler_is_reported_instead_of_hanging(
    engine: FakeEngine, client: FramedClient
) -> None:
    def broken(message: EngineCoreOutputs) -> None:
        raise KeyError("bug")

    client.set_output_handler(broken)
    engine.step(output("r", 1))
    death = await death_of(client)
    assert death.reason == "internal_error"
    assert "bug" in death.message


async def test_a_frame_may_arrive_in_pieces(engine: FakeEngine, client: FramedClient) -> None:
    received: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
    client.set_output_handler(received.put_nowait)
    payload = codec.encode_outputs(batch(output("r", *range(50))))
    frame = (len(payload) + 1).to_bytes(4, "big") + bytes([FrameKind.OUTPUTS]) + payload
    for start in range(0, len(frame), 7):
        engine.send_bytes(frame[start : start + 7])
        await asyncio.sleep(0)
    assert (await received.get()).outputs[0].new_token_ids == list(range(50))


async def test_closing_twice_is_fine_and_ends_open_calls(engine: FakeEngine, client: FramedClient) -> None:
    call = asyncio.create_task(client.call_utility("pause_generation", "wait", False))
    await engine.calls.get()
    await client.close()
    await client.close()
    with pytest.raises(RollspanError) as caught:
        await call
    assert caught.value.reason == "shutting_down"
    await asyncio.wait_for(engine.closed.wait(), PATIENCE)
