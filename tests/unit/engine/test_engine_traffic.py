"""An engine with a tiny cache under random traffic and control: right tokens, stamps and KV, an end for everyone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from engine.conftest import TOKENS, References
from engine.harness import Engine, Result
from engine.kv_truth import KvTruth
from engine.models import MAX_MODEL_LEN, TinyModel
from rollspan.protocol.messages import FinishReason, UtilityOutput
from rollspan.provenance import Provenance

LABELS = st.sampled_from(["A", "B", "C"])
Answer = Callable[[], UtilityOutput | None]


class Traffic(RuleBasedStateMachine):
    """Knows what each request must say (updates bring the same weights again), and the stamp and pause in force."""

    def __init__(self, engine: Engine, truth: KvTruth, references: References, path: str) -> None:
        super().__init__()
        self.truth = truth
        self.lags: dict[str, int | None] = {}
        #: Stamps of tokens that a step in flight had sampled when a call came; the next step delivers them.
        self.late: set[tuple[str, int]] = set()
        self.engine, self.path = engine, path
        self.prompts = list(references.items())
        engine.result_of("reset_prefix_cache")  # what one example leaves behind must not hasten the next
        self.stamp = (str(engine.result_of("get_weight_version")), int(engine.result_of("get_weight_commit")))
        self.paused: str | None = None
        self.open: dict[str, tuple[Result, list[int], int]] = {}
        self.waiting: Answer | None = None
        self.answers: list[tuple[Answer, str | None]] = []

    def call(self, method: str, *args: object) -> Answer:
        if self.engine.core.config.async_scheduling:
            self.late.add(self.stamp)
        return self.engine.start_call(method, *args)

    @rule(
        index=st.integers(0, 7),
        tokens=st.integers(1, TOKENS),
        priority=st.integers(-1, 1),
        provenance=st.builds(
            Provenance,
            return_kv_versions=st.booleans(),
            allow_stale_prefix=st.booleans(),
            max_weight_lag=st.sampled_from([None, None, 0, 1]),
        ),
    )
    def add(self, index: int, tokens: int, priority: int, provenance: Provenance) -> None:
        prompt, expected = self.prompts[index]
        name = f"r{len(self.engine.results)}"
        self.lags[name] = provenance.max_weight_lag
        result = self.engine.add(name, prompt, max_tokens=tokens, priority=priority, provenance=provenance)
        if self.paused in ("abort", "wait"):
            self.engine.step()
            assert result.error is not None
            assert result.error.code == "engine_paused"
            self.settle()
        else:
            self.open[name] = (result, expected[:tokens], self.stamp[1])

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def abort(self, data: st.DataObject) -> None:
        if self.late:
            self.step()  # what a call has collected is on its way: an abort does not take it back
        name = data.draw(st.sampled_from(sorted(self.open) or [""]))
        if not name:
            return
        self.engine.core.abort_requests([name])
        result, _, _ = self.open.pop(name)
        said = len(result.outputs)
        self.step()
        assert len(result.outputs) == said

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        self.engine.wait_for_worker()  # so that what a step finds does not depend on time
        late, self.late = self.late, set()
        for _, message in self.engine.step():
            for output in message.outputs:
                if output.new_token_ids:
                    assert self.paused != "keep" or late
                    assert (message.weight_version, message.weight_commit) in {self.stamp, *late}
        self.settle()

    def settle(self) -> None:
        """Files what has ended; checks what has been said so far."""
        for name, (result, expected, commit) in list(self.open.items()):
            assert result.token_ids == expected[: len(result.token_ids)]
            assert all(admission[1] == commit for admission in result.admissions)
            if result.kv_announced:
                self.truth.check(name, result)
            behind = self.stamp[1] - int(result.stamps[0][1] or 0) if result.stamps else 0
            lag = self.lags[name]
            if result.stop_reason == "stale_weights":
                assert lag is not None
                assert behind > lag
                assert result.finish_reason is FinishReason.ABORT
                del self.open[name]
            elif result.finish_reason is not None:
                assert result.finish_reason is FinishReason.LENGTH
                assert result.token_ids == expected
                del self.open[name]
            else:
                assert lag is None or behind <= lag

    @rule(mode=st.sampled_from(["abort", "wait", "keep"]), clear_cache=st.booleans())
    def pause(self, mode: str, clear_cache: bool) -> None:
        self.supersede()
        answer = self.call("pause_generation", mode, clear_cache)
        self.paused = mode
        if mode == "wait":
            self.waiting = answer
        else:
            self.answers.append((answer, None))
        if mode == "abort":
            self.late.clear()
            self.engine.step()
            for name, (result, expected, _) in list(self.open.items()):
                if result.finish_reason is FinishReason.LENGTH:  # the step in flight was its last
                    assert result.token_ids == expected
                    del self.open[name]
            for result, expected, _ in self.open.values():
                assert result.finish_reason is FinishReason.ABORT
                assert result.token_ids == expected[: len(result.token_ids)]
                assert len(result.token_ids) < len(expected)
            self.open.clear()

    @rule()
    def resume(self) -> None:
        self.supersede()
        self.answers.append((self.call("resume_scheduler"), None))
        self.paused = None

    def supersede(self) -> None:
        """A pause that waits is answered: by its end, or else by whatever control comes next."""
        if self.waiting is not None and self.waiting() is None:
            self.answers.append((self.waiting, "pause_superseded"))
        self.waiting = None

    @rule(label=LABELS)
    def relabel(self, label: str) -> None:
        self.answers.append((self.call("set_weight_version", label), None))
        self.stamp = (label, self.stamp[1])

    @rule(label=st.none() | LABELS, finish=st.booleans(), between=st.integers(0, 3))
    def update(self, label: str | None, finish: bool, between: int) -> None:
        self.answers.append((self.call("start_weight_update"), None))
        for _ in range(between):
            self.step()
        received = self.call("update_weights", {"path": self.path if finish else "nowhere"})
        self.answers.append((received, None if finish else "weights_invalid"))
        self.step()
        assert received() is not None
        if finish:
            finished = self.call("finish_weight_update", label)
            self.answers.append((finished, None))
            self.stamp = (label or self.stamp[0], self.stamp[1] + 1)
            self.step()
            assert finished() is not None

    def teardown(self) -> None:
        self.resume()
        for _ in range(100 * (len(self.open) + 1)):
            if not self.engine.core.has_work():
                break
            self.step()
        assert not self.open, "requests that never end"
        for answer, reason in self.answers:
            reply = answer()
            assert reply is not None, "a call without an answer"
            # A pause that was answered in the very step before it would have been superseded is as good.
            assert reply.reason == reason or (reason == "pause_superseded" and reply.failure is None)
        assert (self.engine.result_of("get_weight_version"), self.engine.result_of("get_weight_commit")) == self.stamp
        self.engine.run()  # going idle verifies the scheduler's invariants


@pytest.mark.parametrize(("kind", "asynchronous"), [("llama", False), ("mistral", False), ("llama", True)])
def test_random_traffic_and_control_gives_everyone_the_right_tokens_and_stamps(
    kind: str,
    asynchronous: bool,
    tiny: Callable[[str], TinyModel],
    references: Callable[[str], References],
    tmp_path: Path,
) -> None:
    shutil.copytree(tiny(kind).path, tmp_path / "same")
    engine = Engine(
        tiny(kind),
        weights_root=str(tmp_path),
        block_size=4,
        num_blocks=MAX_MODEL_LEN // 4 + 5,
        max_num_seqs=4,
        max_num_batched_tokens=9,
        async_scheduling=asynchronous,
    )
    truth = KvTruth(engine)
    run_state_machine_as_test(
        lambda: Traffic(engine, truth, references(kind), "same"),
        settings=settings(
            max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
