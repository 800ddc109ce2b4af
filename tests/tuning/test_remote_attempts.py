"""One attempt at a trial on an object store: local files, stored files and their order."""

import json
import os
import socket
from dataclasses import replace
from functools import partial
from unittest.mock import Mock, patch

import fsspec
import psutil
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.object_store import CACHE, SPEC, StoreDirectory
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_config import TrainedPart, TrialConfig
from gdpo_tune.core.trial_files import iterate_whole_checkpoints
from gdpo_tune.core.trials import Cost, Measurement, Outcome
from gdpo_tune.training.checkpoints import find_checkpoint, read_checkpoint, write_checkpoint
from gdpo_tune.tuning.attempts import (
    AttemptConfig,
    AttemptError,
    Fatal,
    Finished,
    Interrupted,
    RunSettings,
    StopFlag,
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
ADDRESS = f"{SWEEP}/trials/3"
actions_by_step = {}
"""Functions that `train` below calls after a step."""
on_update = []
"""Functions that are called with each update before the trial goes on, as the driver would."""


def train(config, *, resume, report):
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


def write_weights(directory):
    (directory / "weights").write_bytes(b"w" * 10)


@pytest.fixture(autouse=True)
def store(monkeypatch):
    """The directory of trial 3 in an object store in memory."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return StoreDirectory(ADDRESS, patience=0.0)


@pytest.fixture(autouse=True)
def messages(tmp_path, monkeypatch):
    """Messages to the driver."""
    messages = []

    def hear(packed):  # Ray returns once the driver has dealt with it
        messages.append(unwrap_message(packed))
        if isinstance(messages[-1], TrialUpdate):
            for listen in on_update:
                listen(messages[-1].measurement)

    monkeypatch.setattr(attempt.tune, "report", hear)
    monkeypatch.setattr(attempt, "_trials_served", 0)
    monkeypatch.setattr(attempt, "describe_place", lambda: TrialPlaced("process", "node"))
    # the original queries Ray
    monkeypatch.setattr(attempt, "compute_memory_limit", lambda *_: float("inf"))
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    yield messages
    actions_by_step.clear()
    on_update.clear()


def build_trial(driver, steps=6):
    setup = RunSettings(f"{__name__}:train", driver / SPEC, SWEEP)
    trial = TrialConfig("code", "embedded", 0, {}, TrainingSettings(steps=steps), driver / "3")
    return AttemptConfig(trial, setup, trial_token="this")


def run_attempt(driver, steps=6):
    return unwrap_message(run_trial(wrap_for_ray(build_trial(driver, steps))))


def list_steps(messages):
    return [m.measurement.step for m in messages if isinstance(m, TrialUpdate)]


def list_checkpoints(store):
    return list(iterate_whole_checkpoints(store.list_sizes(), store.read))


def list_left(tmp_path):
    return list((tmp_path / "cache" / "attempts").iterdir())


def test_a_trial_ends_with_all_files_in_the_store_and_none_on_the_node(tmp_path, store):
    result = run_attempt(tmp_path)
    assert isinstance(result, Finished)
    assert result.outcome.checkpoint == tmp_path / "3" / "checkpoint-6"  # as the driver sees it
    assert list_checkpoints(store)[0] == "checkpoint-6"
    assert store.read("steps.jsonl") == b"1\n2\n3\n4\n5\n6\n"
    assert store.read("completions.jsonl") == b"{}\n"
    assert not (tmp_path / "3").exists()
    assert list_left(tmp_path) == []


def test_a_checkpoint_is_reported_only_after_its_upload(tmp_path, store, messages):
    stored = {}
    on_update.append(lambda measured: stored.update({measured.step: list_checkpoints(store)[:1]}))
    run_attempt(tmp_path)
    assert list_steps(messages) == [1, 2, 3, 4, 5, 6]
    assert {step: stored[step] for step in (2, 4, 6)} == {s: [f"checkpoint-{s}"] for s in (2, 4, 6)}


def test_another_attempt_resumes_from_the_newest_checkpoint(tmp_path, store, messages):
    actions_by_step[5] = Mock(side_effect=RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        run_attempt(tmp_path)
    assert store.read("steps.jsonl") == b"1\n2\n3\n4\n5\n"  # they tell why
    actions_by_step.clear()
    messages.clear()
    run_attempt(tmp_path)
    assert list_steps(messages) == [5, 6]


def test_a_trial_that_is_stopped_leaves_its_last_step_in_the_store(tmp_path, store):
    actions_by_step[3] = StopFlag(tmp_path, SWEEP).request
    assert run_attempt(tmp_path) == Interrupted()
    assert list_checkpoints(store)[0] == "checkpoint-3"
    driver = StopFlag(tmp_path, SWEEP)  # of the next start
    driver.clear()
    actions_by_step[4], actions_by_step[5] = lambda: driver.request(4), lambda: driver.request(3)
    assert run_attempt(tmp_path) == Interrupted()
    assert list_checkpoints(store)[0] == "checkpoint-5"
    driver.withdraw(3)
    assert StoreDirectory(SWEEP).read("stop") == b"4"


def test_a_trial_that_is_halted_at_a_rung_takes_no_further_step(tmp_path, store, monkeypatch):
    is_rung = property(lambda measurement: measurement.step == 4)
    monkeypatch.setattr(Measurement, "has_validation", is_rung)
    on_update.append(lambda m: StopFlag(tmp_path, SWEEP).request(3) if m.has_validation else None)
    assert run_attempt(tmp_path) == Interrupted()
    assert list_checkpoints(store)[0] == "checkpoint-4"


@pytest.mark.parametrize("error", [OSError("no route"), PermissionError("Access Denied")])
def test_a_store_that_does_not_answer_stops_no_trial(tmp_path, monkeypatch, error):
    StopFlag(tmp_path, SWEEP).request(3)
    replace_pauses(monkeypatch, lambda _: pytest.fail("it waited"))
    flag = StopFlag(tmp_path, SWEEP, patience=0.0)
    with monkeypatch.context() as away:
        away.setattr(MemoryFileSystem, "cat_file", Mock(side_effect=error))
        assert not flag.is_set(3)
    assert flag.is_set(3)


def test_a_short_outage_costs_no_attempt_and_is_reported(tmp_path, messages, monkeypatch):
    pauses, put, left = [], MemoryFileSystem.put, []
    replace_pauses(monkeypatch, pauses.append)

    def flaky(*args, **kwargs):
        if left:
            raise left.pop()
        return put(*args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "put", flaky)
    actions_by_step[2] = lambda: left.extend([OSError("no route")] * 3)
    assert isinstance(run_attempt(tmp_path), Finished)
    assert pauses == [1, 2, 4]
    notes = [message.text for message in messages if isinstance(message, TrialNotice)]
    assert [note.partition(":")[0] for note in notes] == ["waits for memory", "continues"]


def test_a_long_store_outage_ends_the_attempt_but_not_the_trial(tmp_path, store, monkeypatch):
    away = Mock(side_effect=StoreUnreachableError(SWEEP, "no route", 600))
    actions_by_step[4] = lambda: monkeypatch.setattr(StoreDirectory, "upload", away)
    with pytest.raises(AttemptError) as caught:
        run_attempt(tmp_path)
    assert "has not answered for 600 s (no route)" in str(caught.value)
    assert list_checkpoints(store)[0] == "checkpoint-2"
    assert list_left(tmp_path) == []


@pytest.mark.parametrize(
    ("target", "name", "error", "message"),
    [
        (fsspec, "url_to_fs", ImportError("Install s3fs to access S3"), "Install s3fs"),
        (
            MemoryFileSystem,
            "put",
            PermissionError("Access Denied"),
            f"storage {ADDRESS}: Access Denied\n    fix: ",
        ),
    ],
)
def test_a_store_that_refuses_or_a_missing_package_ends_the_sweep_at_once(
    tmp_path, monkeypatch, target, name, error, message
):
    replace_pauses(monkeypatch, lambda _: pytest.fail("it waited"))
    broken = partial(monkeypatch.setattr, target, name, Mock(side_effect=error))
    if target is fsspec:
        broken()
    actions_by_step[2] = broken
    result = run_attempt(tmp_path)
    assert isinstance(result, Fatal)
    assert message in str(result.error)


# The files of a trial


def write_state(directory):
    write_weights(directory)
    (directory / "state").mkdir()
    (directory / "state" / "rng").write_bytes(directory.name.encode())


class Node:
    """A node that has downloaded the trial."""

    def __init__(self, directory, trial="this"):
        self.directory, self._files = directory, StoreDirectory(ADDRESS, patience=0.0)
        download_trial(self._files, directory, trial)

    def write(self, *steps):
        for step in steps:
            write_checkpoint(self.directory, step, Cost(step), write_state)
            with (self.directory / "steps.jsonl").open("a") as file:
                file.write(f"{step}\n")

    def upload(self, *steps):
        """Write checkpoints and upload what is new."""
        self.write(*steps)
        upload_trial(self._files, self.directory)

    def find_newest(self):
        found = find_checkpoint(self.directory)
        return found.newest and found.newest.relative_to(self.directory).name


@pytest.fixture
def one(tmp_path, store):
    return Node(tmp_path / "one")


def test_another_node_resumes_at_the_last_checkpoint(tmp_path, one):
    one.upload(2, 4)
    two = Node(tmp_path / "two")
    assert two.find_newest() == "checkpoint-4"
    assert not find_checkpoint(two.directory).damaged
    assert (two.directory / "steps.jsonl").read_text() == "2\n4\n"
    assert not (two.directory / "checkpoint-2").exists()  # the newest is enough


def test_two_checkpoints_stay_in_the_store(tmp_path, store, one):
    for step in (2, 4, 6):
        one.upload(step)
    assert list_checkpoints(store) == ["checkpoint-6", "checkpoint-4"]
    Node(tmp_path / "two").upload(8)
    assert list_checkpoints(store) == ["checkpoint-8", "checkpoint-6"]
    stored = {name.partition("/")[0] for name in store.list_sizes()}
    assert stored.isdisjoint({"checkpoint-2", "checkpoint-4"})


def test_stored_files_are_not_uploaded_again(one, monkeypatch):
    one.upload(2)
    sent = []
    monkeypatch.setattr(StoreDirectory, "upload", lambda _, files: sent.extend(files))
    one.upload()
    assert sent == []
    (one.directory / "completions.jsonl").write_text("{}\n")
    (one.directory / ".unfinished").write_text("")
    one.upload()
    assert sent == ["completions.jsonl"]


def test_an_incomplete_checkpoint_is_ignored(tmp_path, store, one):
    one.upload(2)
    put = MemoryFileSystem.put

    def cut(self, sources, targets):
        if any(target.endswith("complete.json") for target in targets):
            raise OSError("no route")
        put(self, sources, targets)

    with patch.object(MemoryFileSystem, "put", cut), pytest.raises(StoreUnreachableError):
        one.upload(4)
    assert "checkpoint-4/weights" in store.list_sizes()
    assert list_checkpoints(store) == ["checkpoint-2"]
    assert Node(tmp_path / "two").find_newest() == "checkpoint-2"


@pytest.mark.parametrize(
    "harm",
    [
        lambda store: store.delete(["checkpoint-4/weights"]),
        lambda store: store.write("checkpoint-4/weights", b"x" * 10),
    ],
    ids=["a file is missing", "other content"],
)
def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(harm, tmp_path, store, one):
    one.upload(2, 4)
    harm(store)
    assert Node(tmp_path / "two").find_newest() == "checkpoint-2"


def test_a_damaged_marker_is_ignored(store):
    store.write("checkpoint-4/complete.json", b'{"files": {')
    store.write("checkpoint-2/complete.json", json.dumps({"files": {}}).encode())
    assert list_checkpoints(store) == ["checkpoint-2"]


def test_files_of_another_trial_with_the_same_number_are_ignored(tmp_path, store):
    Node(tmp_path / "one", "of a ledger that is gone").upload(2)
    assert Node(tmp_path / "two").find_newest() is None
    assert list(store.list_sizes()) == ["begun"]


def test_a_process_deletes_the_directories_of_ended_processes(tmp_path, monkeypatch):
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


def test_the_start_is_fetched_once_for_all_trials_of_a_process(tmp_path, monkeypatch):
    start = write_checkpoint(tmp_path / "made", 7, Cost(), write_weights).path
    stored = {f"trials/0/checkpoint-7/{path.name}": path for path in start.iterdir()}
    StoreDirectory(SWEEP).upload(stored)
    plain = build_trial(tmp_path, 2)
    seen_by_driver = tmp_path / "trials" / "0" / "checkpoint-7"
    config = replace(plain, trial=replace(plain.trial, start=seen_by_driver))
    here = attempt.download_start(config, print)
    assert here.is_relative_to(tmp_path / "cache")
    assert read_checkpoint(here).step == 7
    monkeypatch.setattr(attempt, "_download_policy", None)
    assert attempt.download_start(config, print) == here
    assert isinstance(unwrap_message(run_trial(wrap_for_ray(config))), Finished)
    assert read_checkpoint(here).step == 7
    assert attempt.download_start(plain, print) is None


def merge(config, *, resume, report):
    """Stand in for the training of a merge: report the steps and weights of its parts."""
    parts = {str(read_checkpoint(p.checkpoint).step): str(p.weight) for p in config.parts}
    return Outcome({}, {}, Cost(), None, environment=parts)


def test_the_parts_of_a_merge_are_fetched(tmp_path):
    for number in (0, 1):
        path = write_checkpoint(tmp_path / str(number), 4 + number, Cost(), write_weights).path
        files = {f"trials/{number}/{path.name}/{file.name}": file for file in path.iterdir()}
        StoreDirectory(SWEEP).upload(files)
    plain = build_trial(tmp_path)
    parts = tuple(  # as the driver sees them
        TrainedPart(tmp_path / "trials" / str(number) / f"checkpoint-{4 + number}", weight)
        for number, weight in ((0, 0.25), (1, 0.75))
    )
    trial = replace(plain.trial, train=False, parts=parts)
    setup = replace(plain.setup, train=f"{__name__}:merge")
    result = unwrap_message(run_trial(wrap_for_ray(replace(plain, trial=trial, setup=setup))))
    assert result.outcome.environment == {"4": "0.25", "5": "0.75"}
    assert list_left(tmp_path) == []
