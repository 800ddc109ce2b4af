"""Copies of a trial's directory on an object store: downloads, uploads and deletions."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.object_store import CACHE, StoreDirectory
from gdpo_tune.core.trial_files import iterate_whole_checkpoints
from gdpo_tune.core.trials import Cost
from gdpo_tune.training.checkpoints import find_checkpoint, write_checkpoint
from gdpo_tune.tuning.ray.attempt import (
    download_trial,
    make_attempt_directory,
    upload_trial,
)

ADDRESS = "memory://bucket/night/trials/3"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> StoreDirectory:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return StoreDirectory(ADDRESS, patience=0.0)


def write_weights(directory: Path) -> None:
    (directory / "weights").write_bytes(b"w" * 10)
    (directory / "state").mkdir()
    (directory / "state" / "rng").write_bytes(directory.name.encode())


def write_checkpoints(directory: Path, *steps: int) -> None:
    for step in steps:
        write_checkpoint(directory, step, Cost(step), write_weights)
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
        "below": f"{socket.gethostname()}_1_{_read_creation_time(1):.2f}_3",
    }
    for name in names.values():
        (attempts / name).mkdir(parents=True)
    own = make_attempt_directory("3")
    (own / "left").touch()
    assert make_attempt_directory("3") == own
    assert list(own.iterdir()) == []
    left = {path.name for path in attempts.iterdir()}
    assert left == {own.name, names["elsewhere"], names["below"]}


def _read_creation_time(pid: int) -> float:
    import psutil

    return psutil.Process(pid).create_time()
