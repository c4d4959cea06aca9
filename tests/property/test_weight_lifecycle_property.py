"""Weight updates in any order, with failures, pauses, sleep and requests between: an engine against a model of it.

Whatever happens, the engine's answers are the model's, the weights in force are whole or said not to be, and every
token is the one that the weights of its stamp emit.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from transformers import GPT2Config, GPT2LMHeadModel

from rollspan.config import EngineConfig
from rollspan.digest import weight_digest
from rollspan.engine.core import EngineCore
from rollspan.engine.scheduler import PauseState
from rollspan.protocol.messages import EngineCoreRequest, UtilityCall, UtilityOutput
from rollspan.sampling_params import SamplingParams
from support.gate import Gate

HEAD, VOCABULARY, WIDTH = "lm_head.weight", 16, 8
TOKENS = st.integers(0, VOCABULARY - 1)
LABELS = st.sampled_from([None, None, "a", "b", "c"])
MODES = st.sampled_from(["abort", "wait", "keep"])
WRONG = "blake3:" + "0" * 64


def blank() -> GPT2LMHeadModel:
    """The model with arbitrary weights."""
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 1, "n_head": 1, "n_positions": 64}
    none = dict.fromkeys(("bos_token_id", "eos_token_id"))
    return GPT2LMHeadModel(GPT2Config(**shape, **none, tie_word_embeddings=False))


def tensors(token: int) -> dict[str, torch.Tensor]:
    """Weights that emit ``token`` and no other: the last hidden state is the first unit vector, whatever the input."""
    torch.manual_seed(0)
    model = blank()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.eye(WIDTH)[0])
        model.lm_head.weight[:, 0] = 40.0 * torch.eye(VOCABULARY)[token]
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Driver:
    """The engine, in this thread."""

    def __init__(self, path: Path, gate: Gate) -> None:
        self.gate = gate
        self.core = EngineCore(
            EngineConfig(str(path), device="cpu", num_threads=1, kv_cache_memory=1 << 18, max_num_seqs=4)
        )
        self.emits: dict[int, int] = {}  # commit -> the token that its weights emit
        self.refusals: dict[str, str | None] = {}
        self._replies: dict[int, UtilityOutput] = {}
        self._calls = self._requests = 0

    def step(self) -> None:
        for _, message in self.core.step():
            if message.utility_output is not None:
                self._replies[message.utility_output.call_id] = message.utility_output
            for output in message.outputs:
                expected = [self.emits[message.weight_commit]] if output.new_token_ids else []
                assert output.new_token_ids == expected, message.weight_commit
                if output.error is not None:
                    self.refusals[output.request_id] = output.error.reason

    def begin(self, method: str, *args: Any) -> int:
        self._calls += 1
        self.core.call_utility(0, UtilityCall(0, self._calls, method, list(args)))
        return self._calls

    def answer(self, call_id: int) -> UtilityOutput:
        end = time.monotonic() + 30
        while call_id not in self._replies:
            assert time.monotonic() < end, "a call without an end"
            self.core.wait(1)
            self.step()
        return self._replies.pop(call_id)

    def call(self, method: str, *args: Any) -> tuple[str | None, Any]:
        """Reason of the failure, and the result."""
        reply = self.answer(self.begin(method, *args))
        return reply.reason, reply.result

    def request(self) -> str | None:
        """Opens a request; the reason if it is refused at once."""
        self._requests += 1
        name = f"r{self._requests}"
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        self.core.add_request(EngineCoreRequest(name, [1, 2, 3], params))
        self.step()
        return self.refusals.pop(name, None)


class Lifecycle(RuleBasedStateMachine):
    """The model. An open update has brought ``head`` and ``rest``; the weights in force emit ``token``."""

    driver: Driver
    whole: dict[int, dict[str, torch.Tensor]]
    digests: dict[int, str]

    @initialize()
    def begin(self) -> None:
        call = self.driver.call
        call("abort_weight_update")
        call("wake_up")
        call("pause_generation", "abort", True)
        self.label, self.named, self.token = "start", "start", 0
        call("start_weight_update")
        self.driver.gate.clear()
        self.driver.gate.send(self.whole[0])
        self.driver.gate.end()
        assert call("update_weights", {"backend": "gate"}) == (None, None)
        self.commit = self.driver.core.weights.commit + 1
        self.driver.emits = {self.commit: 0}
        reason, self.answer = call("finish_weight_update", "start")
        assert reason is None
        assert call("resume_scheduler") == (None, None)
        self.paused: str | None = None
        self.asleep: set[str] = set()
        self.dropped = self.inconsistent = False
        self.opened: str | None = None
        self.failures = self.driver.core.weights.history.failures

    # What the engine must be like

    @property
    def state(self) -> str:
        if self.inconsistent and "weights" not in self.asleep:
            return "inconsistent"
        return "sleeping" if self.asleep else "updating" if self.opened else "ready"

    @property
    def stopped(self) -> str | None:
        """Why running requests cannot go on."""
        found = {"inconsistent": "weights_inconsistent", "sleeping": "engine_sleeping"}.get(self.state)
        return found or ("update_active" if self.opened == "in_place" else None)

    @invariant()
    def agrees(self) -> None:
        weights = self.driver.core.weights
        assert (weights.state, weights.commit, weights.label) == (self.state, self.commit, self.label)
        assert weights.digest == (None if self.inconsistent else self.digests[self.token])
        assert weights.updating == (self.opened is not None)
        assert weights.history.failures == self.failures
        assert self.driver.core.scheduler.pause_state is (
            PauseState.PAUSED_ALL
            if self.asleep
            else {None: PauseState.UNPAUSED, "keep": PauseState.PAUSED_ALL}.get(self.paused, PauseState.PAUSED_NEW)
        )

    def teardown(self) -> None:
        if hasattr(self, "commit") and not self.inconsistent:  # what they say of themselves is what they are
            data = {name: tensor.data for name, tensor in self.driver.core.weights._parameters.first.items()}
            assert weight_digest(data) == self.digests[self.token]

    def _dropped(self) -> None:
        self.inconsistent = self.inconsistent or self.touched
        self.opened = None
        self.failures += 1

    # Updates

    @rule(mode=st.sampled_from(["staged", "staged", "in_place"]))
    def start(self, mode: str) -> None:
        reason, _ = self.driver.call("start_weight_update", {"mode": mode})
        if self.opened:
            assert reason == "update_active"
        elif "weights" in self.asleep:
            assert reason == "engine_sleeping"
        elif mode == "in_place" and not (self.paused or self.asleep):
            assert reason == "pause_required"
        else:
            assert reason is None
            self.opened, self.head, self.rest, self.pieces, self.touched = mode, None, False, 0, False
            self.named = None

    @rule(token=TOKENS, piece=st.sampled_from(["whole", "whole", "head", "rest", "misfit", "broken", "silent"]))
    def receive(self, token: int, piece: str) -> None:
        if self.opened is None:
            assert self.driver.call("update_weights", {"backend": "gate"})[0] == "no_update_active"
            return
        sent = dict(self.whole[token])
        if piece in ("head", "broken", "silent"):
            sent = {HEAD: sent[HEAD]}
        elif piece == "rest":
            del sent[HEAD]
        elif piece == "misfit":
            sent = {HEAD: torch.zeros(3)}
        self.driver.gate.clear()
        self.driver.gate.send(sent)
        if piece == "broken":
            self.driver.gate.fail(ZeroDivisionError("broken"))
        elif piece != "silent":
            self.driver.gate.end()
        call = self.driver.begin("update_weights", {"backend": "gate"})
        in_place = self.opened == "in_place"
        self.touched = self.touched or (in_place and piece != "misfit")
        if piece == "silent":
            self.driver.gate.await_reader()
            for _ in range(3):
                self.driver.step()
            assert self.driver.call("abort_weight_update") == (None, True)
            assert self.driver.answer(call).reason == "update_aborted"
            self._dropped()
            return
        reason = self.driver.answer(call).reason
        expected = {"misfit": "weights_invalid", "broken": "internal_error"}.get(piece)
        assert reason == expected
        if expected is not None:
            self._dropped()
            return
        self.pieces += 1
        self.head = self.head if piece == "rest" else token
        self.rest = self.rest or piece != "head"

    def _verified(self, reason: str | None, partial: bool | None, digest: str) -> bool:
        """Whether verification succeeds, which it does as the model says."""
        if self.opened is None:
            assert reason == "no_update_active"
            return False
        missing = self.head is None or not self.rest
        if missing and (not partial or self.inconsistent or not self.pieces):
            assert reason == "weights_invalid"
        elif digest == "wrong":
            assert reason == "digest_mismatch"
        else:
            assert reason is None
            return True
        self._dropped()
        return False

    def _options(self, partial: bool | None, digest: str) -> dict[str, Any]:
        token = self.token if self.opened is None or self.head is None else self.head
        return {"partial": partial, "digest": {"none": None, "wrong": WRONG, "right": self.digests[token]}[digest]}

    @rule(partial=st.sampled_from([None, False, True]), digest=st.sampled_from(["none", "right", "right", "wrong"]))
    def prepare(self, partial: bool | None, digest: str) -> None:
        reason, result = self.driver.call("prepare_weight_update", self._options(partial, digest))
        if self._verified(reason, partial, digest):
            assert result == {"weight_digest": self.digests[self.token if self.head is None else self.head]}

    @rule(
        label=LABELS,
        partial=st.sampled_from([None, False, True]),
        digest=st.sampled_from(["none", "right", "right", "wrong"]),
        jump=st.sampled_from([0, 0, 0, 7]),
    )
    def finish(self, label: str | None, partial: bool | None, digest: str, jump: int) -> None:
        options = self._options(partial, digest) | {"commit": self.commit + jump if jump else None}
        token = self.token if self.opened is None or self.head is None else self.head
        # The commit takes place within the call, so that its first tokens may come before its answer.
        expected = options["commit"] or self.commit + 1
        self.driver.emits.setdefault(expected, token)
        reason, result = self.driver.call("finish_weight_update", label, options)
        again = self.opened is None and label is not None and label == self.named
        if again and not self.inconsistent and digest != "wrong":
            assert (reason, result) == (None, self.answer)
        elif self._verified(reason, partial, digest):
            self.opened, self.inconsistent, self.token, self.commit = None, False, token, expected
            self.label, self.named = label or self.label, label
            self.answer = {
                "weight_version": self.label,
                "weight_commit": expected,
                "weight_digest": self.digests[token],
            }
            assert result == self.answer
            return
        del self.driver.emits[expected]

    @rule()
    def abort(self) -> None:
        assert self.driver.call("abort_weight_update") == (None, self.opened is not None)
        if self.opened:
            self._dropped()

    @rule(label=st.sampled_from(["a", "d"]))
    def relabel(self, label: str) -> None:
        assert self.driver.call("set_weight_version", label) == (None, None)
        self.label, self.named = label, None

    # What goes on meanwhile

    @rule(mode=MODES, clear=st.booleans())
    def pause(self, mode: str, clear: bool) -> None:
        waits = mode == "wait" and not self.driver.core.scheduler.drained
        reason, _ = self.driver.call("pause_generation", mode, clear)
        if waits and self.stopped:
            assert reason == self.stopped
        else:
            assert reason is None
            self.paused = mode

    @rule()
    def resume(self) -> None:
        reason, _ = self.driver.call("resume_scheduler")
        assert reason == self.stopped
        if reason is None:
            self.paused = None

    @rule()
    def request(self) -> None:
        reason = self.driver.request()
        refused = {"inconsistent": "weights_inconsistent", "sleeping": "engine_sleeping"}.get(self.state)
        assert reason == (refused or ("engine_paused" if self.paused in ("abort", "wait") else None))

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule(level=st.sampled_from([1, 1, 2]), mode=MODES)
    def sleep(self, level: int, mode: str) -> None:
        waits = mode == "wait" and not self.driver.core.scheduler.drained
        reason, _ = self.driver.call("sleep", level, mode)
        if self.opened:
            assert reason == "update_active"
        elif waits and self.stopped:
            assert reason == self.stopped
        else:
            assert reason is None
            self.asleep = {"weights", "kv_cache"}
            self.inconsistent = self.inconsistent or level == 2

    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"]]))
    def wake(self, tags: list[str] | None) -> None:
        assert self.driver.call("wake_up", tags) == (None, None)
        self.asleep -= set(tags or ("weights", "kv_cache"))


def test_the_engine_agrees_with_a_model_of_its_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.install(monkeypatch)
    blank().save_pretrained(tmp_path / "model")
    driver = Driver(tmp_path / "model", gate)

    class Bound(Lifecycle):
        whole = {token: tensors(token) for token in range(VOCABULARY)}  # noqa: RUF012
        digests = {token: weight_digest(values) for token, values in whole.items()}  # noqa: RUF012

    Bound.driver = driver
    run_state_machine_as_test(
        Bound,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
