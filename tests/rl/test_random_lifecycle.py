"""Random control calls with requests running all the time: each answer is the model's, each token its weights'."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import count
from typing import Any

import pytest
from clients import drive
from counting_model import HEAD, VOCABULARY, Checkpoints, changed_token, digest, tensors
from counting_oracle import CountingOracle
from lifecycle_model import PARTS, Model, token_of
from raw_senders import DiskSender, HttpSender, MemfdSender, NamedSender

from rollspan.errors import RollspanError
from rollspan.http_client import HttpClient, HttpError
from support.drivers import HttpDriver, Order, Rollout
from support.meter import PATIENCE
from support.servers import FRONTENDS, Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

STEPS = 100
CLIENTS = 6
REFUSALS = {"engine_paused", "engine_sleeping", "weights_inconsistent"}
OTHER = "blake3:" + "00" * 32
_serial = count(1)


class Clients:
    """Requests of all kinds, one after the other; who is refused comes again after the next control call."""

    def __init__(self, driver: HttpDriver, seed: int) -> None:
        self.rollouts: list[Rollout] = []
        self.refused = 0
        self.left = 0
        self._driver = driver
        self._random = random.Random(seed)
        self._stopped = False
        self._news = asyncio.Event()
        self._tasks = [asyncio.create_task(self._go_on()) for _ in range(CLIENTS)]

    def tell(self) -> None:
        """Something has changed. Raises what a client has met that it must not."""
        self._news.set()
        self._news = asyncio.Event()
        for task in self._tasks:
            if task.done():
                task.result()

    async def _go_on(self) -> None:
        while not self._stopped:
            news = self._news
            try:
                await (self._leave() if self._random.random() < 0.2 else self._ask())
            except RollspanError as error:
                if error.reason not in REFUSALS:
                    raise
                self.refused += 1
                await news.wait()

    async def _ask(self) -> None:
        stream = self._random.random() < 0.6
        order = Order(
            token_ids=[self._random.randrange(VOCABULARY) for _ in range(self._random.randint(1, 8))],
            max_tokens=self._random.randint(1, 120),
            n=self._random.choice((1, 1, 2)),
            logprobs=self._random.choice((None, 1)),
            stream=stream,
            chunk_spans=stream and self._random.random() < 0.5,
        )
        self.rollouts.append(await self._driver.generate(order))

    async def _leave(self) -> None:
        """Goes away in mid-stream."""
        sampling = {"max_tokens": 4000, "ignore_eos": True}
        body = {"token_ids": [1, 2], "sampling_params": sampling, "stream": True}
        async with (
            HttpClient(self._driver.url) as http,
            aclosing(http.stream("/inference/v1/generate", body)) as chunks,
        ):
            try:
                async for _ in chunks:
                    break
            except HttpError as error:
                raise RollspanError(error.message, reason=error.reason) from error
        self.left += 1

    async def stop(self) -> None:
        """Lets what runs come to its end."""
        self._stopped = True
        self.tell()
        await asyncio.wait_for(asyncio.gather(*self._tasks), PATIENCE)

    async def close(self) -> None:
        """Ends those that have not come to their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Lifecycle:
    """Makes random calls, of the server and of the model alike."""

    def __init__(self, driver: HttpDriver, oracle: CountingOracle, clients: Clients, seed: int) -> None:
        self.driver, self.oracle, self.clients = driver, oracle, clients
        self.model = Model(tensors(1), oracle.label, oracle.commit)
        self.log: list[str] = []
        self._random = random.Random(seed)
        kinds = (DiskSender, HttpSender, MemfdSender, NamedSender)
        self._senders = [kind(driver, oracle.root) for kind in kinds]
        self._calls: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (6, self.start),
            (9, self.send),
            (6, self.finish),
            (2, self.abort),
            (2, self.whole_update),
            (1, self.relabel),
            (5, self.pause),
            (5, self.resume),
            (2, self.sleep),
            (4, self.wake_up),
            (4, self.generate),
            (1, self.abort_requests),
        ]

    async def step(self) -> None:
        """One call, and what must be in force afterwards."""
        weights = [weight for weight, _ in self._calls]
        ((_, call),) = self._random.choices(self._calls, weights)
        if self.model.health is not None and self._random.random() < 0.3:
            call = self.mend
        await call()
        self.clients.tell()
        await self.compare()

    async def compare(self) -> None:
        """What the server says of itself is the model's."""
        model, record = self.model, await self.driver.history()
        found = (record["state"], record["weight_version"], record["weight_commit"], record["update"] is not None)
        assert found == (model.state, model.label, model.commit, model.update is not None)
        assert record["weight_digest"] in (None, model.digest)
        assert (await self.driver.request("GET", "/is_paused"))["is_paused"] == model.is_paused
        assert (await self.driver.request("GET", "/is_sleeping"))["is_sleeping"] == bool(model.asleep)
        assert await self.driver.weight_version() == model.label
        await asyncio.wait_for(self._health(), PATIENCE)

    async def _health(self) -> None:
        """A frontend hears of the engine's state with its next report."""
        told: str | None = "nothing yet"
        while told != self.model.health:
            try:
                await self.driver.request("GET", "/health")
                told = None
            except RollspanError as error:
                told = error.reason

    async def told(self, what: str, call: Awaitable[Any], *expected: str | None) -> Any:
        """The answer of a call that must be refused for one of these reasons, or succeed where None is among them."""
        self.log.append(f"{what} -> {' or '.join(map(str, expected))}")
        try:
            answer, reason = await asyncio.wait_for(call, PATIENCE), None
        except RollspanError as error:
            answer, reason = None, error.reason
        assert reason in expected, reason
        return answer

    def token(self) -> int:
        """One that the weights in question do not emit."""
        update = self.model.update
        present = token_of(self.model.weights if update is None else update.result)
        return self._random.choice([token for token in range(2, 12) if token != present])

    async def start(self) -> None:
        mode = self._random.choice(("staged", "staged", "in_place"))
        expected = self.model.start(mode)
        await self.told(f"start {mode}", self.driver.start_update(mode), expected)

    async def send(self) -> None:
        sender, token = self._random.choice(self._senders), self.token()
        kind = self._random.choice(("whole",) * 6 + ("head", "rest", "delta", "delta", "old delta", "shape", "name"))
        whole, update = tensors(token), self.model.update
        fields: dict[str, Any] = {}
        sent, broken = whole, None
        if kind == "head":
            sent = {HEAD: whole[HEAD]}
        elif kind == "rest":
            sent = {name: values for name, values in whole.items() if name != HEAD}
        elif kind == "shape":
            sent, broken = {HEAD: whole[HEAD][1:]}, "weights_invalid"
        elif kind == "name":
            sent, broken = {"nobody": whole[HEAD]}, "weights_invalid"
        values = sent
        if "delta" in kind:
            values, sent = changed_token(self.model.weights if update is None else update.result, token)
            values = {HEAD: values[HEAD]}
            fields["delta"] = {"base_commit": self.model.commit - ("old" in kind)}
            broken = "base_mismatch" if "old" in kind else None
        expected = self.model.receive(values, broken, delta="delta" in kind)
        await self.told(f"send {kind} {token} by {sender.name}", sender.send(sent, **fields), expected)

    async def finish(self) -> None:
        model, update = self.model, self.model.update
        again = self._random.random() < 0.3 and model.finished is not None
        label = model.finished if again else self._random.choice((None, f"label-{next(_serial)}"))
        partial = self._random.choice((None, None, True, False))
        right = digest(model.weights if update is None else update.result)
        wanted = self._random.choice((None, right, right, OTHER))
        commit = model.commit
        if update is not None:  # before the answer is here, tokens may be
            self.oracle.foresee(label or model.label, token_of(update.result))
        expected = model.finish(label, partial=partial, expected=wanted)
        what = f"finish {label} partial {partial} digest {'right' if wanted == right else wanted}"
        answer = await self.told(what, self.driver.finish_update(label, partial=partial, digest=wanted), expected)
        if answer is not None:
            assert (answer["weight_version"], answer["weight_commit"]) == (model.label, model.commit)
            assert answer["weight_digest"] == model.digest
        if model.commit > commit:
            self._committed()

    def _committed(self) -> None:
        model = self.model
        self.oracle.adopt({"weight_version": model.label, "weight_commit": model.commit}, token_of(model.weights))

    async def abort(self) -> None:
        expected = self.model.abort()
        assert await self.told("abort", self.driver.abort_update(), None) == expected

    async def whole_update(self) -> None:
        """One call for all, as some trainers make it."""
        token, label = self.token(), f"label-{next(_serial)}"
        path = str(self.oracle.emitting(token))
        self.oracle.foresee(label, token)
        call = self.driver.request("POST", "/update_weights", {"weight_dir": path, "weight_version": label})
        expected = self.model.start("staged")
        if expected is None:
            assert self.model.receive(tensors(token)) is None
            assert self.model.finish(label, partial=None, expected=None) is None
            self._committed()
        await self.told(f"update to {token}", call, expected)

    async def relabel(self) -> None:
        label = f"label-{next(_serial)}"
        if self.model.inconsistent:
            return  # nobody knows what it would be the name of
        self.oracle.foresee(label, token_of(self.model.weights))
        self.model.relabel(label)
        await self.told(f"relabel {label}", self.driver.relabel(label), None)
        self.oracle.label = label

    async def pause(self) -> None:
        mode, clear = self._random.choice(("abort", "wait", "keep", "keep")), self._random.random() < 0.5
        await self._hold(f"/pause?mode={mode}&clear_cache={clear}", "hold", mode)

    async def sleep(self) -> None:
        level, mode = self._random.choice((1, 1, 2)), self._random.choice(("abort", "wait", "keep"))
        await self._hold(f"/sleep?level={level}&mode={mode}", "sleep", level, mode)

    async def _hold(self, path: str, method: str, *arguments: Any) -> None:
        """Whether there is something to wait for, only the server knows."""
        idle, busy = (getattr(copy.copy(self.model), method)(*arguments, something_runs=runs) for runs in (False, True))
        answer = await self.told(path, self.driver.request("POST", path), idle, busy)
        getattr(self.model, method)(*arguments, something_runs=answer is None)

    async def resume(self) -> None:
        expected = self.model.resume()
        await self.told("resume", self.driver.resume(), expected)

    async def wake_up(self) -> None:
        parts = self._random.choice((PARTS, PARTS, frozenset(("weights",)), frozenset(("kv_cache",))))
        self.model.wake_up(parts)
        call = self.driver.request("POST", "/wake_up", {"tags": sorted(parts)})
        answer = await self.told(f"wake up {sorted(parts)}", call, None)
        assert answer["status"] == ("sleeping" if self.model.asleep else "awake")

    async def generate(self) -> None:
        expected, held = self.model.generate(), self.model.held
        if expected is None and held:
            return  # it would wait until it is resumed, as those of the clients do
        stream = self._random.random() < 0.5
        call = self.driver.generate(Order([5, 6], 3, stream=stream))
        rollout = await self.told(f"generate stream {stream}", call, expected)
        if rollout is not None:
            self.oracle.check(rollout)
            assert rollout.only.token_ids == [token_of(self.model.weights)] * 3
            assert (rollout.weight_version, rollout.weight_commit) == (self.model.label, self.model.commit)

    async def abort_requests(self) -> None:
        await self.told("abort requests", self.driver.abort(), None)

    async def mend(self) -> None:
        """Wakes up, and brings whole weights where they are no whole."""
        self.model.wake_up(PARTS)
        await self.told("wake up", self.driver.request("POST", "/wake_up"), None)
        if self.model.inconsistent:
            if self.model.update is not None:
                await self.abort()
            await self.whole_update()


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for seed, kind in enumerate(FRONTENDS)], indirect=["kind"])
async def test_every_answer_is_the_models_and_every_token_its_weights(
    kind: str, counting_server: Server, checkpoints: Checkpoints, seed: int
) -> None:
    driver = await drive(kind, counting_server)
    assert isinstance(driver, HttpDriver)
    oracle = await CountingOracle.begin(driver, checkpoints)
    first, clients = oracle.commit, Clients(driver, seed)
    lifecycle = Lifecycle(driver, oracle, clients, seed)
    try:
        for _ in range(STEPS):
            await lifecycle.step()
        await lifecycle.abort()
        await lifecycle.mend()
        await lifecycle.resume()
        await clients.stop()
    except Exception as error:
        raise AssertionError("\n".join(["after these calls:", *lifecycle.log[-25:]])) from error
    finally:
        await clients.close()
        await driver.close()
    for rollout in clients.rollouts:
        oracle.check(rollout)
    assert oracle.commit - first >= 3
    assert clients.refused
    assert clients.left
    assert any(len(choice.weight_commits or []) > 1 for rollout in clients.rollouts for choice in rollout.choices)
