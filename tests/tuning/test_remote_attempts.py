"""One attempt at a trial on an object store: what `train` sees, what others see and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.checkpoint_names import iterate_whole_checkpoints
from gdpo_tune.core.errors import NonFiniteError, StoreUnreachableError
from gdpo_tune.core.object_store import CACHE, StoreDirectory
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trials import Cost, Measurement, Outcome, Report, TrialConfig
from gdpo_tune.spec.model import SPEC
from gdpo_tune.training.checkpoints import read_checkpoint, write_checkpoint
from gdpo_tune.tuning.ray import reporter, stopping, trainable
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    AttemptError,
    Failed,
    Fatal,
    Finished,
    Interrupted,
    Setup,
    TrialMessage,
    TrialNotice,
    TrialUpdate,
    pack,
    unpack_message,
)
from gdpo_tune.tuning.ray.stopping import RemoteStopFlag
from gdpo_tune.tuning.ray.trainable import run_trial

SWEEP = "memory://bucket/night"
at_step: dict[int, Callable[[], None]] = {}
"""What happens as `train` below has done a step."""


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """A checkpoint at every second step, until the last one."""
    known = read_checkpoint(resume).step if resume else 0
    checkpoint = resume
    for step in range(known + 1, config.training.steps + 1):
        config.directory.mkdir(parents=True, exist_ok=True)
        with (config.directory / "steps.jsonl").open("a") as file:
            file.write(f"{step}\n")
        written = None
        if step % 2 == 0:
            written = write_checkpoint(config.directory, step, Cost(step), fill).path
            checkpoint = written
        at_step.get(step, lambda: None)()
        try:
            report(Measurement(step, {}, Cost(step)), written)
        except SystemExit:
            if written is None:
                write_checkpoint(config.directory, step, Cost(step), fill)
            raise
    (config.directory / "completions.jsonl").write_text("{}\n")
    return Outcome({}, {}, Cost(known), checkpoint)


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 10)


@pytest.fixture(autouse=True)
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TrialMessage]]:
    """What the driver is told."""
    found: list[TrialMessage] = []
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(reporter.tune, "report", lambda told: found.append(message(told)))
    monkeypatch.setattr(trainable, "_trials_served", 0)
    # which asks Ray
    monkeypatch.setattr(trainable, "compute_memory_limit", lambda cpus: float("inf"))
    monkeypatch.setattr(stopping, "ASK_SECONDS", 0.0)  # steps take no time
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    yield found
    at_step.clear()


def message(told: dict[str, Any]) -> TrialMessage:
    found = unpack_message(told)
    assert found is not None
    return found


def run(driver: Path, steps: int = 6, begun: str = "this") -> TrialMessage:
    setup = Setup(f"{__name__}:train", driver / SPEC, SWEEP)
    trial = TrialConfig("code", "embedded", 0, {}, TrainingSettings(steps=steps), driver / "3")
    return message(run_trial(pack(AttemptConfig(trial, setup, begun=begun))))


def files() -> StoreDirectory:
    return StoreDirectory(f"{SWEEP}/trials/3")


def newest() -> str:
    return next(iterate_whole_checkpoints(files().sizes(), files().read))


def test_a_trial_ends_with_everything_in_the_store_and_nothing_here(tmp_path: Path):
    result = run(tmp_path)
    assert isinstance(result, Finished)
    assert result.outcome.checkpoint == tmp_path / "3" / "checkpoint-6"  # as the driver sees it
    assert newest() == "checkpoint-6"
    assert files().read("steps.jsonl") == b"1\n2\n3\n4\n5\n6\n"
    assert files().read("completions.jsonl") == b"{}\n"
    assert not (tmp_path / "3").exists()
    assert list((tmp_path / "cache" / "attempts").iterdir()) == []


def test_nobody_hears_of_a_checkpoint_that_is_not_in_the_store(
    tmp_path: Path, heard: list[TrialMessage], monkeypatch: pytest.MonkeyPatch
):
    def hear(told: dict[str, Any]) -> None:
        update = message(told)
        assert isinstance(update, TrialUpdate)
        step = update.measurement.step
        if step % 2 == 0:
            assert newest() == f"checkpoint-{step}"
        heard.append(update)

    monkeypatch.setattr(reporter.tune, "report", hear)
    run(tmp_path)
    assert len(heard) == 6


def test_another_attempt_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, heard: list[TrialMessage]
):
    def die() -> None:
        raise RuntimeError("broken")

    at_step[5] = die
    with pytest.raises(RuntimeError, match="broken"):
        run(tmp_path)
    assert files().read("steps.jsonl") == b"1\n2\n3\n4\n5\n"  # they tell why
    at_step.clear()
    heard.clear()
    run(tmp_path)
    assert [told.measurement.step for told in heard if isinstance(told, TrialUpdate)] == [5, 6]


def test_a_trial_that_is_asked_to_end_leaves_its_last_step_in_the_store(tmp_path: Path):
    driver = RemoteStopFlag(SWEEP)
    at_step[3] = driver.request
    assert run(tmp_path) == Interrupted()
    assert newest() == "checkpoint-3"
    driver = RemoteStopFlag(SWEEP)  # of the next start
    driver.clear()
    at_step[4], at_step[5] = lambda: driver.request(4), lambda: driver.request(3)
    assert run(tmp_path) == Interrupted()
    assert newest() == "checkpoint-5"
    driver.withdraw(3)
    assert StoreDirectory(SWEEP).read("stop") == b"4"


def test_a_trial_that_is_halted_at_a_rung_takes_no_further_step(
    tmp_path: Path, heard: list[TrialMessage], monkeypatch: pytest.MonkeyPatch
):
    """However short ago it asked the store."""
    monkeypatch.setattr(stopping, "ASK_SECONDS", 1e9)

    def hear(told: dict[str, Any]) -> None:  # Ray returns once the driver has dealt with it
        update = message(told)
        assert isinstance(update, TrialUpdate)
        heard.append(update)
        if update.measurement.has_validation:
            RemoteStopFlag(SWEEP).request(3)

    monkeypatch.setattr(reporter.tune, "report", hear)
    monkeypatch.setattr(
        Measurement, "has_validation", property(lambda measurement: measurement.step == 4)
    )
    assert run(tmp_path) == Interrupted()
    assert newest() == "checkpoint-4"


@pytest.mark.parametrize("outage", ["hangs", "fails", "refuses"])
def test_a_store_that_says_nothing_of_requests_stops_no_trial_and_holds_no_step_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outage: str
):
    monkeypatch.setattr(stopping, "ANSWER_SECONDS", 0.1)
    flag, back = RemoteStopFlag(SWEEP), threading.Event()
    flag.request(3)
    cat_file = MemoryFileSystem.cat_file

    def cat(self: MemoryFileSystem, path: str) -> bytes:
        if not back.is_set():
            if outage == "refuses":
                raise PermissionError("Access Denied")
            if outage == "fails":
                raise OSError("no route")
            back.wait()
        return cat_file(self, path)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    began = time.monotonic()
    assert [flag.is_set(3) for _ in range(10)] == [False] * 10
    assert time.monotonic() - began < 2.0
    back.set()
    deadline = time.monotonic() + 20
    while not flag.is_set(3, now=True):
        assert time.monotonic() < deadline


def test_a_request_that_the_store_does_not_take_at_once_is_sent_later(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(stopping, "ANSWER_SECONDS", 0.1)
    back, pipe_file = threading.Event(), MemoryFileSystem.pipe_file

    def pipe(self: MemoryFileSystem, path: str, content: bytes) -> None:
        if not back.is_set():
            raise OSError("no route")
        pipe_file(self, path, content)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe)
    flag = RemoteStopFlag(SWEEP)
    flag.request()
    assert not RemoteStopFlag(SWEEP).is_set(7)
    back.set()
    deadline = time.monotonic() + 20
    while not RemoteStopFlag(SWEEP).is_set(7):
        assert time.monotonic() < deadline


def test_a_failure_of_its_own_is_told_as_ever(tmp_path: Path):
    def fail() -> None:
        raise NonFiniteError("loss is nan at step 3")

    at_step[3] = fail
    assert run(tmp_path) == Failed("loss is nan at step 3")
    assert files().read("steps.jsonl") == b"1\n2\n3\n"


def test_a_short_outage_costs_no_attempt_and_is_told(
    tmp_path: Path, heard: list[TrialMessage], monkeypatch: pytest.MonkeyPatch
):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    put = MemoryFileSystem.put
    left = [OSError("no route")] * 3

    def flaky(*args: Any, **kwargs: Any) -> Any:
        if at_step.get(0) and left:
            raise left.pop()
        return put(*args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put", flaky)
    at_step[2] = lambda: at_step.update({0: lambda: None})
    assert isinstance(run(tmp_path), Finished)
    assert pauses == [1, 2, 4]
    notes = [told.text for told in heard if isinstance(told, TrialNotice)]
    assert [note.partition(":")[0] for note in notes] == ["waits for memory", "goes on"]


def test_a_store_that_stays_away_ends_the_attempt_and_not_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def away(*_: Any) -> None:
        raise StoreUnreachableError(SWEEP, "no route", 600)

    at_step[4] = lambda: monkeypatch.setattr(StoreDirectory, "upload", away)
    with pytest.raises(AttemptError) as caught:
        run(tmp_path)
    assert "has not answered for 600 s (no route)" in str(caught.value)
    assert newest() == "checkpoint-2"
    assert list((tmp_path / "cache" / "attempts").iterdir()) == []


def test_a_node_without_the_package_ends_the_sweep_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import fsspec

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", refuse)
    result = run(tmp_path)
    assert isinstance(result, Fatal)
    assert "Install s3fs" in str(result.error)


def test_a_store_that_refuses_ends_the_sweep_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    at_step[2] = lambda: monkeypatch.setattr(MemoryFileSystem, "put", refuse)
    result = run(tmp_path)
    assert isinstance(result, Fatal)
    assert str(result.error).startswith(f"storage {SWEEP}/trials/3: Access Denied\n    fix: ")
