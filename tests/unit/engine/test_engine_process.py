"""The engine as a process: its socket, several frontends, bad ones among them, signals, and every way to its end."""

from __future__ import annotations

import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.models import TinyModel
from engine.process import Frontend, Process
from rollspan.protocol.framing import FrameKind, encode_frame
from rollspan.protocol.messages import FinishReason

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engine processes that are gone after the test."""
    processes: list[Process] = []

    def make(model: str | TinyModel, *flags: str, **fields: object) -> Process:
        path = model if isinstance(model, str) else str(model.path)
        processes.append(Process(path, *flags, **fields))
        return processes[-1]

    yield make
    for process in processes:
        process.close()


@pytest.fixture(scope="module")
def doomed(tiny: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    """Engines that a test each brings to an end; started together with the shared one, as loading takes seconds."""
    model = str(tiny("llama").path)
    damaged = tmp_path_factory.mktemp("models") / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "model.safetensors").write_bytes(b"junk")
    processes = {
        "by signal": Process(model),
        "by its parent": Process(model, "--watch-stdin"),
        "by its model": Process(str(damaged)),
    }
    yield processes
    for process in processes.values():
        process.close()


@pytest.fixture(scope="module")
def waiting(doomed: dict[str, Process]) -> Iterator[Frontend]:
    """A frontend that waits for the engine which cannot load."""
    frontend = doomed["by its model"].connect(greet=False)
    yield frontend
    frontend.close()


@pytest.fixture(scope="module")
def early() -> dict[str, object]:
    """What was seen of the shared engine before its model was loaded."""
    return {}


@pytest.fixture(scope="module")
def shared(
    tiny: Callable[[str], TinyModel], early: dict[str, object], doomed: dict[str, Process], waiting: Frontend
) -> Iterator[Process]:
    """One engine for the tests that leave it running. Its stdin has ended: without --watch-stdin that means nothing."""
    process = Process(str(tiny("llama").path), max_num_seqs=32)
    assert process.popen.stdin is not None
    process.popen.stdin.close()
    first = process.connect(greet=False)
    early["mode"] = stat.S_IMODE(process.socket_path.stat().st_mode)
    early["first"] = first
    first.connection.setblocking(False)
    try:
        early["heard"] = first.connection.recv(1)
    except BlockingIOError:
        early["heard"] = None
    first.connection.settimeout(60)
    process.connect().close()  # the model is loaded now
    yield process
    first.close()
    assert process.popen.poll() is None, "the engine has not survived these tests"
    process.close()


@pytest.fixture
def frontend(shared: Process) -> Iterator[Frontend]:
    """A greeted frontend on the shared engine, the way back to an idle and unpaused engine included."""
    frontend = shared.connect()
    yield frontend
    frontend.call("resume_scheduler")
    frontend.close()


@pytest.fixture
def greedy(llama: TinyModel) -> list[int]:
    return llama.generate([1, 2, 3], 40)[0]


def test_the_socket_is_there_before_the_model_and_for_this_user_only(shared: Process, early: dict[str, object]) -> None:
    assert early["mode"] == 0o600
    assert early["heard"] is None  # connected, and the engine was still silent


def test_an_engine_says_nothing_to_a_frontend_before_its_hello(
    shared: Process, early: dict[str, object], frontend: Frontend
) -> None:
    for _ in range(3):  # changes of state, which every greeted frontend is told
        frontend.call("pause_generation", "keep", False)
        frontend.call("resume_scheduler")
    first = early["first"]
    assert isinstance(first, Frontend)
    assert first.greet().weight_version == "default"
    assert first.call("is_scheduler_paused").result is False


def test_the_hello_tells_process_model_and_state(shared: Process, frontend: Frontend) -> None:
    hello = frontend.hello
    assert hello is not None
    assert hello.pid == shared.popen.pid
    assert (hello.model.name, hello.limits.max_num_seqs, hello.paused) == ("llama", 32, False)
    frontend.call("pause_generation", "keep", False)
    other = shared.connect()
    assert other.hello is not None
    assert other.hello.paused is True
    other.close()


def test_a_request_is_generated_and_stamped(frontend: Frontend, greedy: list[int]) -> None:
    frontend.add("mine", 40)
    tokens, last = frontend.finish("mine")
    assert tokens == greedy
    assert (last.finish_reason, last.admission) == (FinishReason.LENGTH, ("default", 0))


def test_a_request_that_is_refused_ends_with_an_error_and_the_link_goes_on(
    frontend: Frontend, greedy: list[int]
) -> None:
    frontend.add("bad", 5, prompt=(10**6,))
    tokens, last = frontend.finish("bad")
    assert (tokens, last.finish_reason) == ([], FinishReason.ERROR)
    assert last.error is not None
    assert last.error.code == "validation_error"
    frontend.add("good", 40)
    assert frontend.finish("good")[0] == greedy


def test_an_idle_engine_answers_a_request_whose_time_to_wait_for_weights_is_over(frontend: Frontend) -> None:
    assert frontend.call("start_weight_update").failure is None
    frontend.add("late", 2, min_weight_commit=1, weight_wait_s=0.05)
    tokens, output = frontend.finish("late")
    assert tokens == []
    assert output.error is not None
    assert output.error.code == "stale_weights"
    assert "its time to wait is over" in output.error.message
    assert frontend.call("abort_weight_update").result is True


def test_an_id_in_use_by_another_frontend_is_refused_and_the_first_goes_on(
    shared: Process, frontend: Frontend, greedy: list[int]
) -> None:
    frontend.call("pause_generation", "keep", False)
    frontend.add("same", 40)
    frontend.call("is_scheduler_paused")  # answered after the request was taken in
    other = shared.connect()
    other.add("same", 3)
    _, refused = other.finish("same")
    assert refused.error is not None
    assert refused.error.code == "duplicate_request_id"
    other.close()
    frontend.call("resume_scheduler")
    assert frontend.finish("same")[0] == greedy


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\x02\x7f\xc0",
        encode_frame(FrameKind.ADD, b"\xc1"),
        encode_frame(FrameKind.DEAD, b"\x80"),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["oversized", "empty", "unknown kind", "malformed", "a kind of engines", "HTTP"],
)
def test_a_frontend_that_sends_nonsense_loses_its_link_and_nobody_else_does(
    shared: Process, frontend: Frontend, greedy: list[int], bad: bytes
) -> None:
    broken = shared.connect()
    broken.add("theirs", 60)
    frontend.add("mine", 40)
    broken.connection.sendall(bad)
    assert broken.last_words() is None
    broken.close()
    assert frontend.finish("mine")[0] == greedy
    frontend.wait_for_running(0)  # theirs has ended as well


def test_a_frontend_that_does_not_say_hello_first_loses_its_link(shared: Process, frontend: Frontend) -> None:
    rude = shared.connect(greet=False)
    rude.add("theirs", 5)
    assert rude.next() is None
    rude.close()
    assert frontend.call("is_scheduler_paused").failure is None


def test_a_frontend_that_disconnects_takes_its_requests_along(
    shared: Process, frontend: Frontend, greedy: list[int]
) -> None:
    frontend.call("pause_generation", "keep", False)
    leaving = shared.connect()
    for index in range(5):
        leaving.add(f"theirs-{index}", 60)
    leaving.call("is_scheduler_paused")
    frontend.add("mine", 40)
    leaving.close()
    frontend.call("resume_scheduler")
    assert frontend.finish("mine")[0] == greedy
    frontend.wait_for_running(0)


def test_a_frontend_may_abort_and_control_while_others_generate(
    shared: Process, frontend: Frontend, greedy: list[int]
) -> None:
    frontend.add("mine", 40)
    other = shared.connect()
    assert other.call("get_weight_version").result == "default"
    assert other.call("nonesuch").reason == "unknown_method"
    assert other.call("pause_generation", 1, 2, 3).reason == "invalid_request"
    assert other.call("update_weights", {"path": "x"}).reason == "no_update_active"
    other.close()
    assert frontend.finish("mine")[0] == greedy


def test_an_engine_has_no_children_that_could_outlive_it(shared: Process, frontend: Frontend) -> None:
    tasks = Path(f"/proc/{shared.popen.pid}/task")
    if not tasks.is_dir():
        pytest.skip("needs /proc")
    assert "".join((task / "children").read_text() for task in tasks.iterdir()) == ""


def test_a_signal_ends_a_serving_engine_with_a_notice_exit_code_0_and_no_socket(doomed: dict[str, Process]) -> None:
    process = doomed["by signal"]
    frontend, silent = process.connect(), process.connect(greet=False)
    frontend.add("open", 60)
    process.popen.send_signal(signal.SIGTERM)
    notice = frontend.last_words()
    assert notice is not None
    assert (notice.reason, notice.message) == ("shutting_down", "the engine is shutting down")
    silent.last_words()  # told or not, its link ends
    for link in (frontend, silent):
        link.close()
    assert process.ended() == (0, [])
    assert not process.socket_path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_the_engine_just_so(
    start: Start, llama: TinyModel, number: signal.Signals
) -> None:
    process = start(llama)
    waiting = process.connect(greet=False)
    process.popen.send_signal(number)
    notice = waiting.last_words()
    assert notice is not None
    assert notice.reason == "shutting_down"
    waiting.close()
    assert process.ended() == (0, [])
    assert not process.socket_path.exists()


def test_an_engine_ends_at_once_when_its_parent_is_gone(doomed: dict[str, Process]) -> None:
    process = doomed["by its parent"]
    frontend = process.connect()
    frontend.add("open", 60)
    end_of_parent(process)
    frontend.close()


def test_an_engine_ends_at_once_when_its_parent_is_gone_while_the_model_loads(start: Start, llama: TinyModel) -> None:
    process = start(llama, "--watch-stdin")
    process.wait_until_bound()
    end_of_parent(process)


def end_of_parent(process: Process) -> None:
    """Closes the pipe that the parent holds, and sees the engine end and tidy up."""
    assert process.popen.stdin is not None
    process.popen.stdin.close()
    assert process.ended() == (0, [])
    assert not process.directory.exists()


def test_an_engine_that_cannot_load_says_why_to_stderr_and_to_who_waits(
    doomed: dict[str, Process], waiting: Frontend
) -> None:
    process = doomed["by its model"]
    code, lines = process.ended()
    assert (code, len(lines)) == (1, 1)
    assert not process.socket_path.exists()
    message = lines[0].removeprefix("rollspan engine: ")
    assert message.startswith("model '")
    assert "damaged' cannot be loaded: SafetensorError: " in message
    notice = waiting.last_words()
    assert notice is not None
    assert (notice.reason, notice.message) == ("engine_dead", message)


@pytest.mark.parametrize("model", ["/nonexistent/model", "", "x" * 5000], ids=["missing", "empty", "long"])
def test_a_model_that_is_not_there_is_told_before_anything_is_imported(start: Start, model: str) -> None:
    code, lines = start(model).ended()
    assert code == 1
    assert lines == [f"rollspan engine: model '{model}' is no directory with a config.json"]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ('{"model": "x", "block_size": 0}', "block_size must be an integer of at least 1, got 0"),
        ('{"nonesuch": 1}', "engine configuration: "),
        ("{", "engine configuration: "),
    ],
)
def test_a_wrong_configuration_is_a_usage_error_in_one_line(start: Start, config: str, line: str) -> None:
    code, lines = start("x", config=config).ended()
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"rollspan engine: {line}")


def test_a_path_that_is_taken_is_reported_and_left_alone(start: Start, shared: Process) -> None:
    second = start("x", "--socket", str(shared.socket_path))
    code, lines = second.ended()
    assert code == 1
    assert lines == [f"rollspan engine: cannot listen on {shared.socket_path}: Address already in use"]
    shared.connect().close()


def test_a_directory_that_does_not_exist_is_reported(start: Start, tmp_path: Path) -> None:
    code, lines = start("x", "--socket", "/nonexistent/engine.sock").ended()
    assert code == 1
    assert lines == ["rollspan engine: cannot listen on /nonexistent/engine.sock: No such file or directory"]
