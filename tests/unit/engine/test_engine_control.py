"""Control of the engine: pause in every mode, resume, labels, and calls that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from engine.harness import Engine, Result
from engine.models import TinyModel
from rollspan.protocol.messages import FinishReason

PROMPT, OTHER, THIRD = (5, 6, 7), (8, 9), (30, 31, 32, 33)
MODES = ["abort", "wait", "keep"]


@pytest.fixture
def greedy(llama: TinyModel) -> dict[tuple[int, ...], list[int]]:
    """What the tiny Llama says after each prompt."""
    return {prompt: llama.generate(list(prompt), 12)[0] for prompt in (PROMPT, OTHER, THIRD)}


def running(engine: Engine, steps: int = 3) -> list[Result]:
    """Two requests in mid-generation."""
    results = [engine.add(f"run{i}", prompt, max_tokens=12) for i, prompt in enumerate((PROMPT, OTHER))]
    for _ in range(steps):
        engine.step()
    return results


def paused(engine: Engine) -> bool:
    return bool(engine.result_of("is_scheduler_paused"))


def test_an_engine_starts_unpaused_and_says_so(engine: Engine) -> None:
    assert paused(engine) is False
    assert engine.core.hello().paused is False


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clear_cache", [True, False])
def test_pausing_an_idle_engine_holds_until_resume_however_often_it_is_asked(
    engine: Engine, mode: str, clear_cache: bool, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    for _ in range(3):
        assert engine.result_of("pause_generation", mode, clear_cache) is None
        assert paused(engine) is True
        assert engine.core.hello().paused is True
    assert engine.stats[0][-1]["paused"] is True
    for _ in range(3):
        assert engine.result_of("resume_scheduler") is None
        assert paused(engine) is False
    assert engine.stats[0][-1]["paused"] is False
    assert engine.generate([PROMPT], max_tokens=12)[0].token_ids == greedy[PROMPT]


@pytest.mark.parametrize("clear_cache", [True, False])
def test_pause_abort_ends_every_request_with_what_it_has(
    engine: Engine, clear_cache: bool, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    results = running(engine)
    waiting = engine.add("waiting", PROMPT, max_tokens=5)
    engine.result_of("pause_generation", "abort", clear_cache)
    assert [result.token_ids for result in results] == [greedy[PROMPT][:3], greedy[OTHER][:3]]
    assert waiting.token_ids == []
    for result in (*results, waiting):
        assert (result.finish_reason, result.error) == (FinishReason.ABORT, None)
        assert result.admissions[-1] == ("default", 0)
    assert not engine.core.has_work()


@pytest.mark.parametrize("clear_cache", [True, False])
def test_pause_wait_is_answered_when_the_running_requests_have_ended(
    engine: Engine, clear_cache: bool, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    results = running(engine)
    answer = engine.start_call("pause_generation", "wait", clear_cache)
    refused = engine.add("late", THIRD, max_tokens=3)
    assert paused(engine) is True
    assert answer() is None
    engine.step_until(answer)
    assert [result.token_ids for result in results] == [greedy[PROMPT], greedy[OTHER]]
    assert refused.error is not None
    reply = answer()
    assert reply is not None
    assert (reply.failure, reply.result) == (None, None)


def test_pause_wait_leaves_requests_that_never_ran_in_the_queue(
    llama: TinyModel, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    engine = Engine(llama, max_num_seqs=1, max_num_batched_tokens=16)
    first = engine.add("first", PROMPT, max_tokens=12)
    engine.step()
    queued = engine.add("queued", OTHER, max_tokens=12)
    engine.result_of("pause_generation", "wait", False)
    assert first.token_ids == greedy[PROMPT]
    assert queued.outputs == []
    engine.run()
    assert queued.outputs == []
    engine.result_of("resume_scheduler")
    engine.run()
    assert queued.token_ids == greedy[OTHER]


def test_pause_wait_also_waits_for_requests_that_lost_their_blocks(
    llama: TinyModel, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    engine = Engine(llama, max_num_batched_tokens=64, max_num_seqs=8)
    results = running(engine)
    engine.result_of("pause_generation", "keep", True)  # takes the blocks
    engine.result_of("pause_generation", "wait", True)
    assert [result.token_ids for result in results] == [greedy[PROMPT], greedy[OTHER]]


def test_pause_wait_is_answered_when_the_last_running_request_is_aborted(engine: Engine) -> None:
    running(engine)
    answer = engine.start_call("pause_generation", "wait", True)
    engine.step()
    assert answer() is None
    engine.core.abort_requests(["run0", "run1"])
    assert engine.core.has_work()  # whoever only steps an engine with work must get the answer too
    engine.run()
    assert answer() is not None


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_new_requests_are_refused_while_the_engine_is_paused_to_abort_or_wait(engine: Engine, mode: str) -> None:
    engine.result_of("pause_generation", mode, True)
    refused = engine.add("new", PROMPT, max_tokens=3)
    engine.run()
    assert refused.error is not None
    assert (refused.error.code, refused.error.retryable) == ("engine_paused", True)
    assert refused.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("clear_cache", [True, False])
def test_pause_keep_freezes_requests_and_resume_goes_on_exactly_there(
    engine: Engine, clear_cache: bool, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    results = running(engine)
    engine.result_of("pause_generation", "keep", clear_cache)
    queued = engine.add("queued", THIRD, max_tokens=12)
    for _ in range(5):
        engine.step()
    assert [len(result.token_ids) for result in (*results, queued)] == [3, 3, 0]
    assert not engine.core.has_work()
    usage = engine.stats[0][-1]["kv_cache_usage"]
    assert (usage == 0.0) is clear_cache
    engine.result_of("resume_scheduler")
    engine.run()
    assert [result.token_ids for result in (*results, queued)] == list(greedy.values())


def test_a_request_may_be_aborted_while_the_engine_keeps_it(
    engine: Engine, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    results = running(engine)
    for clear_cache in (False, True):
        engine.result_of("pause_generation", "keep", clear_cache)
        queued = engine.add("queued", PROMPT, max_tokens=2)
        engine.core.abort_requests(["run0", "queued"])
        engine.run()
        assert queued.outputs == []
    engine.result_of("resume_scheduler")
    engine.run()
    assert [len(result.token_ids) for result in results] == [3, 12]
    assert results[1].token_ids == greedy[OTHER]


@pytest.mark.parametrize(
    "second",
    [("pause_generation", "keep", False), ("pause_generation", "wait", True), ("resume_scheduler",)],
)
def test_a_waiting_pause_is_superseded_by_the_next_pause_or_resume(engine: Engine, second: tuple[Any, ...]) -> None:
    running(engine)
    first = engine.start_call("pause_generation", "wait", True)
    last = engine.start_call(*second)
    engine.step_until(first)
    superseded = first()
    assert superseded is not None
    assert superseded.reason == "pause_superseded"
    assert superseded.failure == "another pause or resume came before the running requests ended"
    engine.step_until(last)
    reply = last()
    assert reply is not None
    assert reply.failure is None
    assert paused(engine) is (second[0] == "pause_generation")


def test_pause_abort_ends_a_waiting_pause_and_its_requests(engine: Engine) -> None:
    results = running(engine)
    first = engine.start_call("pause_generation", "wait", True)
    engine.result_of("pause_generation", "abort", True)
    superseded = first()
    assert superseded is not None
    assert superseded.reason == "pause_superseded"
    assert [result.finish_reason for result in results] == [FinishReason.ABORT] * 2


def test_going_from_keep_to_wait_lets_the_kept_requests_end(
    engine: Engine, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    results = running(engine)
    engine.result_of("pause_generation", "keep", False)
    engine.result_of("pause_generation", "wait", False)
    assert [result.token_ids for result in results] == [greedy[PROMPT], greedy[OTHER]]


def test_a_client_that_leaves_while_its_pause_waits_leaves_the_engine_usable(
    engine: Engine, greedy: dict[tuple[int, ...], list[int]]
) -> None:
    engine.core.add_client(1)
    engine.add("mine", PROMPT, client=1, max_tokens=50)
    engine.step()
    engine.start_call("pause_generation", "wait", True, client=1)
    engine.core.remove_client(1)
    engine.run()
    engine.result_of("resume_scheduler")
    assert engine.generate([OTHER], max_tokens=12)[0].token_ids == greedy[OTHER]


def test_answers_go_to_the_client_that_called(engine: Engine) -> None:
    engine.core.add_client(1)
    answer, other = engine.start_call("get_weight_version", client=1), engine.start_call("get_weight_commit")
    engine.step()
    mine, theirs = answer(), other()
    assert mine is not None
    assert theirs is not None
    assert (mine.result, theirs.result) == ("default", 0)


def test_every_change_of_state_is_reported_to_every_client(engine: Engine) -> None:
    engine.core.add_client(1)
    for method, *args in (("pause_generation", "keep", False), ("set_weight_version", "B"), ("resume_scheduler",)):
        counts = {client: len(engine.stats.get(client, [])) for client in (0, 1)}
        engine.result_of(method, *args)
        assert all(len(engine.stats[client]) > counts[client] for client in (0, 1))


@pytest.mark.parametrize(
    "args",
    [
        ("stop",),
        (None,),
        (7,),
        (["keep"],),
        ("keep", "yes"),
        ("keep", None),
        ("keep", 1),
        ("keep", True, "more"),
        ({"mode": "keep"},),
    ],
)
def test_a_pause_with_wrong_arguments_is_refused_and_changes_nothing(engine: Engine, args: tuple[Any, ...]) -> None:
    results = running(engine)
    reason, text = engine.failure_of("pause_generation", *args)
    assert reason == "invalid_request"
    too_many = "pause_generation cannot be called with 3 arguments: too many positional arguments"
    wrong = "mode must be abort, wait or keep and clear_cache true or false, got "
    assert text.startswith(too_many if len(args) > 2 else wrong)
    assert paused(engine) is False
    assert [result.finish_reason for result in results] == [None, None]


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("resume_scheduler", (1,)),
        ("is_scheduler_paused", (None,)),
        ("get_weight_version", ("x",)),
        ("get_weight_commit", (1, 2)),
        ("set_weight_version", ()),
        ("set_weight_version", ("a", "b")),
        ("start_weight_update", ({}, {})),
        ("update_weights", ()),
        ("update_weights", ({}, {})),
        ("finish_weight_update", ("a", {}, "b")),
        ("check_weights", ()),
        ("sleep", (1, "abort", True)),
    ],
)
def test_a_call_with_a_wrong_number_of_arguments_is_refused_by_name(
    engine: Engine, method: str, args: tuple[Any, ...]
) -> None:
    reason, text = engine.failure_of(method, *args)
    assert reason == "invalid_request"
    assert text.startswith(f"{method} cannot be called with {len(args)} arguments: ")


@pytest.mark.parametrize("method", ["", "shutdown", "__init__", "step", "get_weight", "pause_generation "])
def test_a_method_that_does_not_exist_is_refused_by_name(engine: Engine, method: str) -> None:
    assert engine.failure_of(method) == ("unknown_method", f'unknown method "{method}"')


def test_a_method_that_breaks_is_answered_as_an_internal_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("rollspan.weights.transfer.disk.DiskTransport.receive", fail)
    engine.result_of("start_weight_update")
    caplog.set_level("CRITICAL", "rollspan.engine")
    reply = engine.failure_of("update_weights", {"path": "x"})
    assert reply == ("internal_error", "ZeroDivisionError: a bug")
    assert engine.result_of("get_weight_version") == "default"


@pytest.mark.parametrize(("label", "kept"), [("step-1", "step-1"), (42, "42"), (-1, "-1"), ("ü" * 128, "ü" * 128)])
def test_a_label_changes_between_steps_and_is_no_commit(engine: Engine, label: object, kept: str) -> None:
    results = running(engine)
    engine.result_of("set_weight_version", label)
    engine.run()
    assert engine.result_of("get_weight_version") == kept
    assert engine.result_of("get_weight_commit") == 0
    for result in results:
        assert result.stamps == [("default", 0)] * 3 + [(kept, 0)] * 9
        assert set(result.admissions) == {("default", 0)}
    assert engine.generate([PROMPT], max_tokens=1)[0].admissions == [(kept, 0)]


@pytest.mark.parametrize("label", ["", None, True, 1.0, ["a"], {}, "a\nb", "\x7f", "\x85", "é" * 128 + "x", "x" * 257])
def test_a_label_that_is_none_is_refused_and_the_old_one_stays(engine: Engine, label: object) -> None:
    reason, text = engine.failure_of("set_weight_version", label)
    assert reason == "invalid_label"
    assert text.startswith("new_version must be a string of 1 to 256 bytes without control characters or an integer")
    assert engine.result_of("get_weight_version") == "default"
