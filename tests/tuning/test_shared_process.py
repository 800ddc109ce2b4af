"""A process that trials share: who may enter, and what it passes on to the driver."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import EngineDiedError, EngineMemoryError, NonFiniteError, PolicyError
from gdpo_tune.core.object_store import CACHE, SPEC, StoreDirectory
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Measurement, Outcome, Report
from gdpo_tune.ledger import Ledger
from gdpo_tune.training.checkpoints import read_checkpoint, write_checkpoint
from gdpo_tune.tuning.attempts import (
    FINISHED,
    WAIT,
    AttemptConfig,
    AttemptError,
    AttemptFailure,
    Failed,
    Fatal,
    Finished,
    Interrupted,
    RunSettings,
    StopFlag,
    TrialPlaced,
    TrialUpdate,
    unwrap_message,
    wrap_for_ray,
)
from gdpo_tune.tuning.ray import shared_process, tune
from gdpo_tune.tuning.ray.shared_process import FromTrial, PlaceFree, run_shared_process
from gdpo_tune.tuning.ray.tune import TuneSearcher
from tests.support.search_driver import Driver
from tests.support.tuning import load_code_spec

STEPS = 4
gates: defaultdict[int, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
"""One permit for each step that a trial may take."""
errors: dict[int, Exception] = {}
"""Trial -> error that it raises instead of its next step; -1: what all share cannot be built."""
running: list[int] = []
"""Trials inside of `SharedWorker.train`; -1 once it was closed."""


class SharedWorker:
    """A fake of the training in a shared process, whose steps wait for permits."""

    def __init__(self, size: int) -> None:
        if -1 in errors:
            raise errors[-1]
        self.size = size

    def train(self, config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
        """Take a step for each permit, with a checkpoint."""
        number = int(config.directory.name)
        running.append(number)
        assert len(running) <= self.size
        checkpoint, resumed = resume, 0
        try:
            if resume is not None:
                resumed = read_checkpoint(resume).step
            for step in range(resumed + 1, config.training.steps + 1):
                assert gates[number].acquire(timeout=20)
                if number in errors:
                    raise errors[number]
                written = write_checkpoint(config.directory, step, Cost(step), write_weights)
                checkpoint = written.path
                report(Measurement(step, {}, Cost(step)), checkpoint)
        finally:
            running.remove(number)
        return Outcome({}, {}, Cost(config.training.steps), checkpoint)

    def close(self) -> None:
        """Note the call."""
        running.append(-1)


def write_weights(directory: Path) -> None:
    (directory / "weights").write_bytes(b"w")


class Process:
    """The process in a thread, and a driver of it: one trial after the other of `waiting`."""

    def __init__(self, size: int = 2) -> None:
        self.waiting: list[AttemptConfig] = []
        self.is_over = False
        """True if there are no more trials."""
        self.messages: defaultdict[int, queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)
        self.handled: defaultdict[int, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(1)
        )
        """Trial -> permits for its next message to be handled."""
        self.ended: AttemptError | None = None
        self._answer = b""
        self._numbers: dict[str, int] = {}
        self._setup = RunSettings(f"{__name__}:SharedWorker", Path("none"), trials_per_process=size)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def report(self, packed: dict[str, Any]) -> None:
        """Stand in for `tune.report`."""
        message = unwrap_message(packed)
        if isinstance(message, PlaceFree):
            answer: Any = FINISHED if self.is_over else WAIT
            name = f"a{len(self._numbers)}"
            if self.waiting:
                answer = self.waiting.pop(0)
                self._numbers[name] = answer.number
            self._answer = pickle.dumps((name, answer))
        else:
            assert isinstance(message, FromTrial)
            self.messages[self._numbers[message.name]].put(message.message)

    def take_answer(self, key: str) -> bytes:
        assert key == "process"
        return self._answer

    def receive(self, number: int) -> Any:
        """Return the next message of a trial, apart from the one about its place."""
        message = self.messages[number].get(timeout=20)
        return self.receive(number) if isinstance(message, TrialPlaced) else message

    def take_steps(self, number: int, count: int) -> list[int]:
        """Let a trial take steps; return those of its messages."""
        steps: list[int] = []
        for _ in range(count):
            gates[number].release()
            message = self.receive(number)
            assert isinstance(message, TrialUpdate)
            steps.append(message.measurement.step)
        return steps

    def finish(self, number: int) -> Any:
        """Let a trial run to its end; return its result."""
        gates[number].release(STEPS)
        message = self.receive(number)
        while isinstance(message, TrialUpdate):
            message = self.receive(number)
        return message

    def enter(self, *attempts: AttemptConfig) -> None:
        """Offer trials, and wait until they run."""
        self.waiting += attempts
        wait_until(lambda: {a.number for a in attempts} <= {*running})

    def _run(self) -> None:
        try:
            run_shared_process(wrap_for_ray(self._setup))
        except AttemptError as error:
            self.ended = error


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """A process with two places."""
    driver = Process()
    context = SimpleNamespace(get_trial_id=lambda: "process")
    fake = SimpleNamespace(report=driver.report, get_context=lambda: context)
    monkeypatch.setattr(shared_process, "tune", fake)
    monkeypatch.setattr(shared_process, "take_answer", driver.take_answer)
    monkeypatch.setattr(shared_process, "describe_place", lambda: TrialPlaced("process", "node"))
    monkeypatch.setattr(shared_process, "compute_memory_limit", lambda *_: 2**60)
    monkeypatch.setattr(shared_process, "TRIAL_POLL_SECONDS", 0.01)
    monkeypatch.setattr("gdpo_tune.tuning.ray.attempt.SECONDS", 0.0)
    driver.thread.start()
    yield driver
    driver.is_over = True
    for number in range(1, 5):
        gates[number].release(100)
    driver.thread.join(20)
    assert not driver.thread.is_alive()
    for state in (gates, errors, running):
        state.clear()


def build_attempt(sweep: Path, number: int, address: str = "") -> AttemptConfig:
    (sweep / SPEC).touch()
    directory = sweep / "trials" / str(number)
    if not address:
        directory.mkdir(parents=True, exist_ok=True)
    trial = TrialConfig("code", "embedded", 0, {}, TrainingSettings(steps=STEPS), directory)
    return AttemptConfig(
        trial, RunSettings(f"{__name__}:SharedWorker", sweep / SPEC, address, trials_per_process=2)
    )


def test_trials_share_the_process_and_free_their_places(tmp_path: Path, process: Process):
    first, second, third = (build_attempt(tmp_path, number) for number in (1, 2, 3))
    process.enter(first, second)
    assert process.messages[1].get(timeout=20) == TrialPlaced("process", "node")
    process.waiting.append(third)
    assert process.take_steps(1, 2) == [1, 2]
    assert process.take_steps(2, 1) == [1]
    assert process.waiting == [third]  # there is no place for it
    result = process.finish(1)
    assert isinstance(result, Finished)
    assert result.outcome.checkpoint == first.trial.directory / f"checkpoint-{STEPS}"
    assert isinstance(process.finish(3), Finished)
    assert isinstance(process.finish(2), Finished)
    process.is_over = True
    process.thread.join(20)
    assert running == [-1]
    assert process.ended is None


def test_a_trial_takes_no_step_before_the_driver_has_handled_its_last(
    tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch
):
    handled = threading.Event()
    plain = shared_process.tune.report

    def report(packed: dict[str, Any]) -> None:
        plain(packed)
        message = unwrap_message(packed)
        if isinstance(message, FromTrial) and isinstance(message.message, TrialUpdate):
            assert handled.wait(20)

    monkeypatch.setattr(shared_process.tune, "report", report)
    process.enter(build_attempt(tmp_path, 1))
    gates[1].release(STEPS)
    assert isinstance(process.receive(1), TrialUpdate)
    time.sleep(0.1)
    assert not list(tmp_path.glob("trials/1/checkpoint-2"))
    handled.set()
    process.receive(1)
    assert list(tmp_path.glob("trials/1/checkpoint-2"))


def test_a_stopped_trial_frees_its_place_and_others_notice_nothing(
    tmp_path: Path, process: Process
):
    process.enter(build_attempt(tmp_path, 1), build_attempt(tmp_path, 2))
    for number in (1, 2):
        process.take_steps(number, 1)
    StopFlag(tmp_path).request(1)
    gates[1].release()
    assert process.receive(1) == Interrupted()
    assert (tmp_path / "trials" / "1" / "checkpoint-2").exists()
    assert process.take_steps(2, 1) == [2]
    process.enter(build_attempt(tmp_path, 3))
    StopFlag(tmp_path).request()  # Ctrl-C
    for number in (2, 3):
        gates[number].release()
        assert process.receive(number) == Interrupted()


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (NonFiniteError("loss is nan"), Failed("loss is nan")),
        (PolicyError("no pad token"), Fatal),
        (RuntimeError("broken"), AttemptFailure),
    ],
)
def test_a_trial_that_fails_ends_alone(
    tmp_path: Path, process: Process, error: Exception, result: Any
):
    process.enter(build_attempt(tmp_path, 1), build_attempt(tmp_path, 2))
    errors[1] = error
    gates[1].release()
    end = process.receive(1)
    assert end == result or isinstance(end, result)
    if isinstance(end, AttemptFailure):
        assert (end.cause, end.reason) == ("error", "RuntimeError: broken")
        assert "Traceback" in end.traceback
    assert process.take_steps(2, 1) == [1]


def test_a_trial_that_enters_leaves_the_rendezvous_of_another_ones_engine(
    tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch
):
    process.enter(build_attempt(tmp_path, 1))
    process.take_steps(1, 1)
    monkeypatch.setenv("MASTER_PORT", "41234")  # TRL, while vLLM starts
    process.enter(build_attempt(tmp_path, 2))
    process.take_steps(2, 1)
    assert os.environ["MASTER_PORT"] == "41234"


def test_what_trials_share_cannot_be_built(tmp_path: Path, process: Process):
    errors[-1] = PolicyError("no such policy")
    process.waiting.append(build_attempt(tmp_path, 1))
    assert process.receive(1) == Fatal(errors[-1])
    del errors[-1]
    process.enter(build_attempt(tmp_path, 2))
    assert process.take_steps(2, 1) == [1]


@pytest.mark.parametrize("why", ["engine", "engine's memory", "memory"])
def test_a_process_that_is_used_up_ends_once_it_is_empty(
    tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch, why: str
):
    process.enter(build_attempt(tmp_path, 1), build_attempt(tmp_path, 2))
    if why == "memory":
        monkeypatch.setattr(shared_process, "compute_memory_limit", lambda *_: 1)
        process.finish(1)
    else:
        errors[1] = {
            "engine": EngineDiedError("vLLM died"),
            "engine's memory": EngineMemoryError("no room for the cache"),
        }[why]
        gates[1].release()
        assert isinstance(process.receive(1), AttemptFailure)
    process.waiting.append(build_attempt(tmp_path, 3))
    assert isinstance(process.finish(2), Finished)
    process.thread.join(20)
    assert isinstance(process.ended, AttemptError)
    assert process.ended.cause == "needs_new_process"
    assert len(process.waiting) == 1


@pytest.mark.parametrize("others", [0, 1])
def test_an_error_of_cuda_ends_the_process_unless_only_one_trial_can_have_made_it(
    tmp_path: Path, process: Process, others: int
):
    process.enter(*(build_attempt(tmp_path, number) for number in (1, 2)[: 1 + others]))
    errors[1] = RuntimeError("CUDA error: device-side assert triggered")
    gates[1].release()
    if not others:
        assert process.receive(1).cause == "error"  # the next trial gets a new process
    process.thread.join(20)
    assert isinstance(process.ended, AttemptError)
    assert process.ended.cause == ("shared_process" if others else "needs_new_process")
    assert ("CUDA error: device-side assert" in str(process.ended)) is bool(others)
    gates[2].release(STEPS)


def test_trials_on_an_object_store_have_directories_of_their_own(
    tmp_path: Path, process: Process, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    process.enter(*(build_attempt(tmp_path, n, "memory://bucket/night") for n in (1, 2)))
    for number in (1, 2):
        process.take_steps(number, 1)
    for number in (1, 2):
        result = process.finish(number)
        assert isinstance(result, Finished)
        checkpoint = f"checkpoint-{STEPS}"
        assert result.outcome.checkpoint == tmp_path / "trials" / str(number) / checkpoint
        stored = StoreDirectory(f"memory://bucket/night/trials/{number}").list_sizes()
        assert f"{checkpoint}/weights" in stored
    assert list((tmp_path / "cache" / "attempts").iterdir()) == []


def test_trials_spread_over_the_processes_that_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0
    monkeypatch.setattr(tune.time, "monotonic", lambda: now)
    with Ledger.open(load_code_spec(tmp_path, ["search.scheduler={type: fifo}"])) as ledger:
        lifecycle = Driver(ledger, 4).searcher
        searcher = TuneSearcher(
            lifecycle, RunSettings("none:none", tmp_path / SPEC, trials_per_process=2)
        )
        for process in ("a", "b"):
            assert searcher.suggest(process) is not None
        assert searcher.suggest("c") is None  # there are as many places as slots
        assert isinstance(searcher.answer("a")[1], AttemptConfig)
        assert searcher.answer("a")[1] == WAIT  # b may still start
        assert isinstance(searcher.answer("b")[1], AttemptConfig)
        assert isinstance(searcher.answer("a")[1], AttemptConfig)
        assert lifecycle.count_by_process() == {"a": 2, "b": 1}
        now += 60  # nothing was heard from b, which may wait for a step of the driver
        lifecycle.on_end("a-1", Interrupted())
        lifecycle.on_end("a-4", Interrupted())
        lifecycle.stop()
        assert searcher.answer("a")[1] == FINISHED
        assert searcher.suggest("d") == searcher.FINISHED
