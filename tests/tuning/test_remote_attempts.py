"""One attempt at a trial on an object store: local files, stored files and their order."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.object_store import CACHE, SPEC, StoreDirectory
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import iterate_whole_checkpoints
from gdpo_tune.core.trials import Cost, Measurement, Outcome, Report
from gdpo_tune.training.checkpoints import find_checkpoint, read_checkpoint, write_checkpoint
from gdpo_tune.tuning.attempts import (
    AttemptConfig,
    AttemptError,
    Fatal,
    Finished,
    Interrupted,
    RunSettings,
    StopFlag,
    TrialMessage,
    TrialNotice,
    TrialPlaced,
    TrialUpdate,
    unwrap_message,
    wrap_for_ray,
)
from gdpo_tune.tuning.ray import attempt
from gdpo_tune.tuning.ray.attempt import (
    download_trial,
    make_attempt_directory,
    run_trial,
    upload_trial,
)
from tests.support.clock import replace_pauses

SWEEP = "memory://bucket/night"
actions_by_step: dict[int, Callable[[], None]] = {}
"""Functions that `train` below calls after a step."""


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Write a checkpoint at every second step, up to the last one."""
    resumed = read_checkpoint(resume).step if resume else 0
    checkpoint = resume
    for step in range(resumed + 1, config.training.steps + 1):
        config.directory.mkdir(parents=True, exist_ok=True)
        with (config.directory / "steps.jsonl").open("a") as file:
            file.write(f"{step}\n")
        written = None
        if step % 2 == 0:
            written = write_checkpoint(config.directory, step, Cost(step), write_weights).path
            checkpoint = written
        actions_by_step.get(step, lambda: None)()
        try:
            report(Measurement(step, {}, Cost(step)), written)
        except SystemExit:
            if written is None:
                write_checkpoint(config.directory, step, Cost(step), write_weights)
            raise
    (config.directory / "completions.jsonl").write_text("{}\n")
    return Outcome({}, {}, Cost(resumed), checkpoint)


def write_weights(directory: Path) -> None:
    (directory / "weights").write_bytes(b"w" * 10)


@pytest.fixture(autouse=True)
def messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TrialMessage]]:
    """Messages to the driver."""
    messages: list[TrialMessage] = []
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(attempt.tune, "report", lambda packed: messages.append(unpack(packed)))
    monkeypatch.setattr(attempt, "_trials_served", 0)
    monkeypatch.setattr(attempt, "describe_place", lambda: TrialPlaced("process", "node"))
    # the original queries Ray
    monkeypatch.setattr(attempt, "compute_memory_limit", lambda *_: float("inf"))
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    yield messages
    actions_by_step.clear()


def unpack(packed: dict[str, Any]) -> TrialMessage:
    message = unwrap_message(packed)
    assert message is not None
    return message


def run_attempt(driver: Path, steps: int = 6, token: str = "this") -> TrialMessage:
    setup = RunSettings(f"{__name__}:train", driver / SPEC, SWEEP)
    trial = TrialConfig("code", "embedded", 0, {}, TrainingSettings(steps=steps), driver / "3")
    return unpack(run_trial(wrap_for_ray(AttemptConfig(trial, setup, trial_token=token))))


def open_store() -> StoreDirectory:
    return StoreDirectory(f"{SWEEP}/trials/3")


def find_newest() -> str:
    return next(iterate_whole_checkpoints(open_store().list_sizes(), open_store().read))


def test_a_trial_ends_with_all_files_in_the_store_and_none_on_the_node(tmp_path: Path):
    result = run_attempt(tmp_path)
    assert isinstance(result, Finished)
    assert result.outcome.checkpoint == tmp_path / "3" / "checkpoint-6"  # as the driver sees it
    assert find_newest() == "checkpoint-6"
    assert open_store().read("steps.jsonl") == b"1\n2\n3\n4\n5\n6\n"
    assert open_store().read("completions.jsonl") == b"{}\n"
    assert not (tmp_path / "3").exists()
    assert list((tmp_path / "cache" / "attempts").iterdir()) == []


def test_a_checkpoint_is_reported_only_after_its_upload(
    tmp_path: Path, messages: list[TrialMessage], monkeypatch: pytest.MonkeyPatch
):
    def hear(packed: dict[str, Any]) -> None:
        update = unpack(packed)
        if isinstance(update, TrialPlaced):
            return
        assert isinstance(update, TrialUpdate)
        step = update.measurement.step
        if step % 2 == 0:
            assert find_newest() == f"checkpoint-{step}"
        messages.append(update)

    monkeypatch.setattr(attempt.tune, "report", hear)
    run_attempt(tmp_path)
    assert len(messages) == 6


def test_another_attempt_resumes_from_the_newest_checkpoint(
    tmp_path: Path, messages: list[TrialMessage]
):
    def die() -> None:
        raise RuntimeError("broken")

    actions_by_step[5] = die
    with pytest.raises(RuntimeError, match="broken"):
        run_attempt(tmp_path)
    assert open_store().read("steps.jsonl") == b"1\n2\n3\n4\n5\n"  # they tell why
    actions_by_step.clear()
    messages.clear()
    run_attempt(tmp_path)
    assert [
        message.measurement.step for message in messages if isinstance(message, TrialUpdate)
    ] == [5, 6]


def test_a_trial_that_is_stopped_leaves_its_last_step_in_the_store(tmp_path: Path):
    driver = StopFlag(Path(), SWEEP)
    actions_by_step[3] = driver.request
    assert run_attempt(tmp_path) == Interrupted()
    assert find_newest() == "checkpoint-3"
    driver = StopFlag(Path(), SWEEP)  # of the next start
    driver.clear()
    actions_by_step[4], actions_by_step[5] = lambda: driver.request(4), lambda: driver.request(3)
    assert run_attempt(tmp_path) == Interrupted()
    assert find_newest() == "checkpoint-5"
    driver.withdraw(3)
    assert StoreDirectory(SWEEP).read("stop") == b"4"


def test_a_trial_that_is_halted_at_a_rung_takes_no_further_step(
    tmp_path: Path, messages: list[TrialMessage], monkeypatch: pytest.MonkeyPatch
):
    def hear(packed: dict[str, Any]) -> None:  # Ray returns once the driver has dealt with it
        update = unpack(packed)
        if isinstance(update, TrialPlaced):
            return
        assert isinstance(update, TrialUpdate)
        messages.append(update)
        if update.measurement.has_validation:
            StopFlag(Path(), SWEEP).request(3)

    monkeypatch.setattr(attempt.tune, "report", hear)
    monkeypatch.setattr(
        Measurement, "has_validation", property(lambda measurement: measurement.step == 4)
    )
    assert run_attempt(tmp_path) == Interrupted()
    assert find_newest() == "checkpoint-4"


@pytest.mark.parametrize("error", [OSError("no route"), PermissionError("Access Denied")])
def test_a_store_that_does_not_answer_stops_no_trial(
    monkeypatch: pytest.MonkeyPatch, error: OSError
):
    def fail(*_: Any, **__: Any) -> None:
        raise error

    StopFlag(Path(), SWEEP).request(3)
    replace_pauses(monkeypatch, lambda _: pytest.fail("it waited"))
    flag = StopFlag(Path(), SWEEP, patience=0.0)
    with monkeypatch.context() as away:
        away.setattr(MemoryFileSystem, "cat_file", fail)
        assert not flag.is_set(3)
    assert flag.is_set(3)


def test_a_short_outage_costs_no_attempt_and_is_reported(
    tmp_path: Path, messages: list[TrialMessage], monkeypatch: pytest.MonkeyPatch
):
    pauses: list[float] = []
    replace_pauses(monkeypatch, pauses.append)
    put = MemoryFileSystem.put
    left = [OSError("no route")] * 3

    def flaky(*args: Any, **kwargs: Any) -> Any:
        if actions_by_step.get(0) and left:
            raise left.pop()
        return put(*args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put", flaky)
    actions_by_step[2] = lambda: actions_by_step.update({0: lambda: None})
    assert isinstance(run_attempt(tmp_path), Finished)
    assert pauses == [1, 2, 4]
    notes = [message.text for message in messages if isinstance(message, TrialNotice)]
    assert [note.partition(":")[0] for note in notes] == ["waits for memory", "continues"]


def test_a_long_store_outage_ends_the_attempt_but_not_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def away(*_: Any) -> None:
        raise StoreUnreachableError(SWEEP, "no route", 600)

    actions_by_step[4] = lambda: monkeypatch.setattr(StoreDirectory, "upload", away)
    with pytest.raises(AttemptError) as caught:
        run_attempt(tmp_path)
    assert "has not answered for 600 s (no route)" in str(caught.value)
    assert find_newest() == "checkpoint-2"
    assert list((tmp_path / "cache" / "attempts").iterdir()) == []


def test_a_node_without_the_package_ends_the_sweep_and_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import fsspec

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", refuse)
    result = run_attempt(tmp_path)
    assert isinstance(result, Fatal)
    assert "Install s3fs" in str(result.error)


def test_a_store_that_refuses_ends_the_sweep_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    replace_pauses(monkeypatch, lambda _: pytest.fail("it waited"))
    actions_by_step[2] = lambda: monkeypatch.setattr(MemoryFileSystem, "put", refuse)
    result = run_attempt(tmp_path)
    assert isinstance(result, Fatal)
    assert str(result.error).startswith(f"storage {SWEEP}/trials/3: Access Denied\n    fix: ")


ADDRESS = "memory://bucket/night/trials/3"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> StoreDirectory:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return StoreDirectory(ADDRESS, patience=0.0)


def write_state(directory: Path) -> None:
    (directory / "weights").write_bytes(b"w" * 10)
    (directory / "state").mkdir()
    (directory / "state" / "rng").write_bytes(directory.name.encode())


def write_checkpoints(directory: Path, *steps: int) -> None:
    for step in steps:
        write_checkpoint(directory, step, Cost(step), write_state)
        with (directory / "steps.jsonl").open("a") as file:
            file.write(f"{step}\n")


def fetch_trial(directory: Path, trial: str = "this") -> Callable[[], None]:
    """Download the trial; return a function that uploads it."""
    files = StoreDirectory(ADDRESS, patience=0.0)
    download_trial(files, directory, trial)
    return partial(upload_trial, files, directory)


def list_checkpoints(files: StoreDirectory) -> list[str]:
    return list(iterate_whole_checkpoints(files.list_sizes(), files.read))


def test_another_node_resumes_at_the_last_checkpoint(tmp_path: Path, store: StoreDirectory):
    upload = fetch_trial(tmp_path / "one")
    write_checkpoints(tmp_path / "one", 2, 4)
    upload()
    fetch_trial(tmp_path / "two")
    checkpoints = find_checkpoint(tmp_path / "two")
    assert checkpoints.newest == tmp_path / "two" / "checkpoint-4"
    assert not checkpoints.damaged
    assert (tmp_path / "two" / "steps.jsonl").read_text() == "2\n4\n"
    assert not (tmp_path / "two" / "checkpoint-2").exists()  # the newest is enough


def test_two_checkpoints_stay_in_the_store(tmp_path: Path, store: StoreDirectory):
    upload = fetch_trial(tmp_path / "one")
    for step in (2, 4, 6):
        write_checkpoints(tmp_path / "one", step)
        upload()
    assert list_checkpoints(store) == ["checkpoint-6", "checkpoint-4"]
    upload_again = fetch_trial(tmp_path / "two")
    write_checkpoints(tmp_path / "two", 8)
    upload_again()
    assert list_checkpoints(store) == ["checkpoint-8", "checkpoint-6"]
    assert not any(
        name.startswith(("checkpoint-2/", "checkpoint-4/")) for name in store.list_sizes()
    )


def test_stored_files_are_not_uploaded_again(
    tmp_path: Path, store: StoreDirectory, monkeypatch: pytest.MonkeyPatch
):
    upload = fetch_trial(tmp_path / "one")
    write_checkpoints(tmp_path / "one", 2)
    upload()
    sent: list[str] = []
    monkeypatch.setattr(StoreDirectory, "upload", lambda _, files: sent.extend(files))
    upload()
    assert sent == []
    (tmp_path / "one" / "completions.jsonl").write_text("{}\n")
    (tmp_path / "one" / ".unfinished").write_text("")
    upload()
    assert sent == ["completions.jsonl"]


def test_an_incomplete_checkpoint_is_ignored(
    tmp_path: Path, store: StoreDirectory, monkeypatch: pytest.MonkeyPatch
):
    upload = fetch_trial(tmp_path / "one")
    write_checkpoints(tmp_path / "one", 2)
    upload()
    write_checkpoints(tmp_path / "one", 4)
    put = MemoryFileSystem.put

    def cut(self: MemoryFileSystem, sources: list[str], targets: list[str]) -> None:
        if any(target.endswith("complete.json") for target in targets):
            raise OSError("no route")
        put(self, sources, targets)

    monkeypatch.setattr(MemoryFileSystem, "put", cut)
    with pytest.raises(StoreUnreachableError):
        upload()
    assert "checkpoint-4/weights" in store.list_sizes()
    monkeypatch.setattr(MemoryFileSystem, "put", put)
    assert list_checkpoints(store) == ["checkpoint-2"]
    fetch_trial(tmp_path / "two")
    assert find_checkpoint(tmp_path / "two").newest == tmp_path / "two" / "checkpoint-2"


@pytest.mark.parametrize("harm", ["a file is missing", "other content"])
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(
    harm: str, tmp_path: Path, store: StoreDirectory
):
    upload = fetch_trial(tmp_path / "one")
    write_checkpoints(tmp_path / "one", 2, 4)
    upload()
    if harm == "other content":
        store.write("checkpoint-4/weights", b"x" * 10)
    else:
        store.delete(["checkpoint-4/weights"])
    fetch_trial(tmp_path / "two")
    assert find_checkpoint(tmp_path / "two").newest == tmp_path / "two" / "checkpoint-2"


def test_a_damaged_marker_is_ignored(store: StoreDirectory):
    store.write("checkpoint-4/complete.json", b'{"files": {')
    store.write("checkpoint-2/complete.json", json.dumps({"files": {}}).encode())
    assert list_checkpoints(store) == ["checkpoint-2"]


def test_files_of_another_trial_with_the_same_number_are_ignored(
    tmp_path: Path, store: StoreDirectory
):
    upload = fetch_trial(tmp_path / "one", "of a ledger that is gone")
    write_checkpoints(tmp_path / "one", 2)
    upload()
    fetch_trial(tmp_path / "two")
    assert find_checkpoint(tmp_path / "two").newest is None
    assert list(store.list_sizes()) == ["begun"]


def test_a_process_deletes_the_directories_of_ended_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CACHE, str(tmp_path))
    attempts = tmp_path / "attempts"
    names = {
        "gone": f"{socket.gethostname()}_{2**22 + 1}_5.00_3",
        "elsewhere": f"another-host_{os.getpid()}_5.00_3",
        "next_to_it": f"{socket.gethostname()}_1_{2**22 + 1}_5.00_3",
        "below": f"{socket.gethostname()}_1_{psutil.Process(1).create_time():.2f}_3",
    }
    for name in names.values():
        (attempts / name).mkdir(parents=True)
    own = make_attempt_directory("3")
    (own / "left").touch()
    assert make_attempt_directory("3") == own
    assert list(own.iterdir()) == []
    left = {path.name for path in attempts.iterdir()}
    assert left == {own.name, names["elsewhere"], names["next_to_it"], names["below"]}


def test_the_start_is_fetched_once_for_all_trials_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    start = write_checkpoint(tmp_path / "made", 7, Cost(), write_weights).path
    stored = {f"trials/0/checkpoint-7/{path.name}": path for path in start.iterdir()}
    StoreDirectory(SWEEP).upload(stored)
    setup = RunSettings(f"{__name__}:train", tmp_path / SPEC, SWEEP)
    trial = TrialConfig("code", "embedded", 0, {}, TrainingSettings(steps=2), tmp_path / "3")
    seen_by_driver = tmp_path / "trials" / "0" / "checkpoint-7"
    config = AttemptConfig(replace(trial, start=seen_by_driver), setup, "this")
    here = attempt.download_start(config, print)
    assert here is not None
    assert here.is_relative_to(tmp_path / "cache")
    assert read_checkpoint(here).step == 7
    monkeypatch.setattr(attempt, "_download_policy", None)
    assert attempt.download_start(config, print) == here
    assert isinstance(unpack(run_trial(wrap_for_ray(config))), Finished)
    assert read_checkpoint(here).step == 7
    assert attempt.download_start(replace(config, trial=trial), print) is None
