"""The process in which trials share places: who may enter, and what each tells its proxy."""

from __future__ import annotations

import os
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
from gdpo_tune.training.checkpoints import read_checkpoint, write_checkpoint
from gdpo_tune.tuning.ray import pack_host
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    AttemptError,
    Failed,
    Fatal,
    Finished,
    Interrupted,
    Setup,
    TrialMessage,
    TrialUpdate,
)
from gdpo_tune.tuning.ray.pack_host import PackHost
from gdpo_tune.tuning.ray.stopping import StopFlag

STEPS = 4
gates: defaultdict[int, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(0))
"""One permit for each step that a trial may take."""
errors: dict[int, Exception] = {}
"""Trial -> error that it raises instead of its next step."""
running: list[int] = []
"""Trials inside of `Pack.train`."""


class Pack:
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


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what the last test did; stand in for Ray and for the size of the machine."""
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(pack_host.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr("gdpo_tune.tuning.ray.trainable.compute_memory_limit", lambda *_: 2**60)
    monkeypatch.setattr("gdpo_tune.tuning.ray.reporter.SECONDS", 0.0)
    monkeypatch.setattr(pack_host, "LOOK_SECONDS", 0.01)
    yield
    for state in (gates, errors, running):
        state.clear()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)


@pytest.fixture
def host(clean: None) -> Iterator[PackHost]:
    """A process with two places."""
    host = PackHost("pack-0", Setup(f"{__name__}:Pack", Path("none"), pack=2))
    yield host
    for number in range(1, 5):
        host.leave(number)
        gates[number].release(100)
    wait_until(lambda: host.count_trials() == 0)


def build_attempt(sweep: Path, number: int, address: str = "", **options: Any) -> AttemptConfig:
    (sweep / SPEC).touch()
    directory = sweep / "trials" / str(number)
    if not address:
        directory.mkdir(parents=True, exist_ok=True)
    trial = TrialConfig("code", "embedded", 0, {}, TrainingSettings(steps=STEPS), directory)
    setup = Setup(f"{__name__}:Pack", sweep / SPEC, address, pack=2)
    return AttemptConfig(trial, setup, **options)


def take_steps(host: PackHost, number: int, count: int) -> list[int]:
    """Let a trial take steps; return those of its messages."""
    steps: list[int] = []
    for _ in range(count):
        gates[number].release()
        message = host.exchange(number)
        assert isinstance(message, TrialUpdate)
        steps.append(message.measurement.step)
    return steps


def finish(host: PackHost, number: int) -> TrialMessage:
    """Let a trial run to its end; return its result."""
    gates[number].release(STEPS)
    message = host.exchange(number)
    while isinstance(message, TrialUpdate):
        message = host.exchange(number)
    return message


def test_trials_share_the_process_and_free_their_places(tmp_path: Path, host: PackHost):
    first, second, third = (build_attempt(tmp_path, number) for number in (1, 2, 3))
    placed = host.enter(first)
    assert placed is not None
    assert (placed.node, placed.host.partition("-0-")[0]) == ("node", "pack")
    assert host.enter(second) == placed
    assert host.enter(third) is None
    assert host.count_trials() == 2
    assert take_steps(host, 1, 2) == [1, 2]
    assert take_steps(host, 2, 1) == [1]
    result = finish(host, 1)
    assert isinstance(result, Finished)
    assert result.outcome.checkpoint == first.trial.directory / f"checkpoint-{STEPS}"
    wait_until(lambda: host.count_trials() == 1)
    assert host.enter(third) == placed
    assert isinstance(finish(host, 3), Finished)
    assert isinstance(finish(host, 2), Finished)
    host.close()
    assert running == [-1]


def test_a_trial_takes_no_step_before_the_driver_has_handled_its_last(
    tmp_path: Path, host: PackHost
):
    host.enter(build_attempt(tmp_path, 1))
    gates[1].release(STEPS)
    message = host.exchange(1)
    assert isinstance(message, TrialUpdate)
    time.sleep(0.1)
    assert not list(tmp_path.glob("trials/1/checkpoint-2"))
    host.exchange(1)
    assert list(tmp_path.glob("trials/1/checkpoint-2"))


def test_a_stopped_trial_frees_its_place_and_others_notice_nothing(tmp_path: Path, host: PackHost):
    for number in (1, 2):
        host.enter(build_attempt(tmp_path, number))
        take_steps(host, number, 1)
    StopFlag(tmp_path).request(1)
    gates[1].release()
    assert host.exchange(1) == Interrupted()
    assert (tmp_path / "trials" / "1" / "checkpoint-2").exists()
    assert take_steps(host, 2, 1) == [2]
    wait_until(lambda: host.count_trials() == 1)
    assert host.enter(build_attempt(tmp_path, 3))
    StopFlag(tmp_path).request()  # Ctrl-C
    for number in (2, 3):
        gates[number].release()
        assert host.exchange(number) == Interrupted()


@pytest.mark.parametrize(
    ("error", "result"),
    [(NonFiniteError("loss is nan"), Failed), (PolicyError("no pad token"), Fatal)],
)
def test_a_trial_that_fails_ends_alone(
    tmp_path: Path, host: PackHost, error: Exception, result: type
):
    for number in (1, 2):
        host.enter(build_attempt(tmp_path, number))
    errors[1] = error
    gates[1].release()
    assert isinstance(host.exchange(1), result)
    assert take_steps(host, 2, 1) == [1]


def test_a_trial_that_enters_leaves_the_rendezvous_of_another_ones_engine(
    tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MASTER_PORT", "of a launcher")
    host = PackHost("pack-0", Setup(f"{__name__}:Pack", tmp_path / SPEC, pack=2))
    assert "MASTER_PORT" not in os.environ
    host.enter(build_attempt(tmp_path, 1))
    take_steps(host, 1, 1)
    monkeypatch.setenv("MASTER_PORT", "41234")  # TRL, while vLLM starts
    host.enter(build_attempt(tmp_path, 2))
    take_steps(host, 2, 1)
    assert os.environ["MASTER_PORT"] == "41234"
    for number in (1, 2):
        finish(host, number)


def test_an_error_reaches_the_proxy_as_it_is(tmp_path: Path, host: PackHost):
    host.enter(build_attempt(tmp_path, 1))
    errors[1] = RuntimeError("broken")
    gates[1].release()
    with pytest.raises(RuntimeError, match="broken"):
        host.exchange(1)
    with pytest.raises(
        AttemptError, match="its process died"
    ) as caught:  # nobody knows it any more
        host.exchange(1)
    assert caught.value.cause == "host"


def test_what_trials_share_cannot_be_built(tmp_path: Path, host: PackHost):
    errors[-1] = PolicyError("no such policy")
    host.enter(build_attempt(tmp_path, 1))
    assert host.exchange(1) == Fatal(errors[-1])
    del errors[-1]
    wait_until(lambda: host.count_trials() == 0)
    host.enter(build_attempt(tmp_path, 2))
    assert take_steps(host, 2, 1) == [1]


def test_another_attempt_waits_until_the_one_without_a_proxy_has_ended(
    tmp_path: Path, host: PackHost
):
    attempt = build_attempt(tmp_path, 1)
    host.enter(attempt)
    take_steps(host, 1, 1)
    assert host.enter(attempt) is None
    gates[1].release()
    wait_until(lambda: host.count_trials() == 0)
    assert host.enter(attempt)
    assert take_steps(host, 1, 1) == [3]  # from the checkpoint of its last step
    host.leave(1)
    gates[1].release()
    wait_until(lambda: host.count_trials() == 0)


def test_a_trial_that_may_have_killed_others_gets_the_process_alone(tmp_path: Path, host: PackHost):
    suspect = build_attempt(tmp_path, 1, alone=True)
    host.enter(build_attempt(tmp_path, 2))
    assert host.enter(suspect) is None
    assert host.enter(build_attempt(tmp_path, 3)) is None  # reserved
    assert host.enter(build_attempt(tmp_path, 4, alone=True)) is None
    finish(host, 2)
    wait_until(lambda: host.count_trials() == 0)
    assert host.enter(build_attempt(tmp_path, 3)) is None
    assert host.enter(suspect)
    assert host.enter(build_attempt(tmp_path, 3)) is None
    finish(host, 1)
    wait_until(lambda: host.count_trials() == 0)
    assert host.enter(build_attempt(tmp_path, 3))


def test_a_reservation_of_a_trial_that_asks_no_more_expires(
    tmp_path: Path, host: PackHost, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pack_host, "RESERVED_SECONDS", 0.0)
    host.enter(build_attempt(tmp_path, 2))
    assert host.enter(build_attempt(tmp_path, 1, alone=True)) is None
    assert host.enter(build_attempt(tmp_path, 3))


@pytest.mark.parametrize("why", ["engine", "engine's memory", "memory"])
def test_a_process_that_is_used_up_restarts_once_it_is_empty(
    tmp_path: Path, host: PackHost, monkeypatch: pytest.MonkeyPatch, why: str
):
    def exit_process(status: int) -> None:
        raise ChildProcessError(status)

    monkeypatch.setattr(pack_host.os, "_exit", exit_process)
    for number in (1, 2):
        host.enter(build_attempt(tmp_path, number))
    if why == "memory":
        module = "gdpo_tune.tuning.ray.trainable.compute_memory_limit"
        monkeypatch.setattr(module, lambda *_: 1)
        finish(host, 1)
    else:
        errors[1] = {
            "engine": EngineDiedError("vLLM died"),
            "engine's memory": EngineMemoryError("no room for the cache"),
        }[why]
        gates[1].release()
        with pytest.raises((type(errors[1]), AttemptError)):
            host.exchange(1)
    wait_until(lambda: host.count_trials() == 1)
    assert host.enter(build_attempt(tmp_path, 3)) is None
    assert isinstance(finish(host, 2), Finished)
    wait_until(lambda: host.count_trials() == 0)
    with pytest.raises(ChildProcessError):
        host.enter(build_attempt(tmp_path, 3))


@pytest.mark.parametrize("others", [0, 1])
def test_an_error_of_cuda_ends_the_process_unless_only_one_trial_can_have_made_it(
    tmp_path: Path, host: PackHost, monkeypatch: pytest.MonkeyPatch, others: int
):
    exits: list[int] = []
    monkeypatch.setattr(pack_host.os, "_exit", exits.append)
    monkeypatch.setattr(pack_host, "FAREWELL_SECONDS", 0.0)
    running = (1, 2)[: 1 + others]
    for number in running:
        host.enter(build_attempt(tmp_path, number))
    errors[1] = RuntimeError("CUDA error: device-side assert triggered")
    gates[1].release()
    for number in running:  # they hear why, though not whose fault it was
        with pytest.raises(Exception, match="CUDA error: device-side assert") as caught:
            host.exchange(number)
        assert isinstance(caught.value, AttemptError) is bool(others)
    wait_until(lambda: exits == [1] * others)
    if not others:  # the next trial gets a new process
        host.enter(build_attempt(tmp_path, 3))
        assert exits == [1]


def test_trials_on_an_object_store_have_directories_of_their_own(
    tmp_path: Path, host: PackHost, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    for number in (1, 2):
        host.enter(build_attempt(tmp_path, number, "memory://bucket/night"))
        take_steps(host, number, 1)
    for number in (1, 2):
        result = finish(host, number)
        assert isinstance(result, Finished)
        checkpoint = f"checkpoint-{STEPS}"
        assert result.outcome.checkpoint == tmp_path / "trials" / str(number) / checkpoint
        stored = StoreDirectory(f"memory://bucket/night/trials/{number}").list_sizes()
        assert f"{checkpoint}/weights" in stored
    wait_until(lambda: host.count_trials() == 0)
    assert list((tmp_path / "cache" / "attempts").iterdir()) == []
