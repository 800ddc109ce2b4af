"""A trial's directory on an object store: what is fetched, sent, kept and dropped."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.checkpoint_names import iterate_whole_checkpoints
from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.object_store import CACHE, StoreDirectory
from gdpo_tune.core.trials import Cost
from gdpo_tune.training.checkpoints import find_checkpoint, write_checkpoint
from gdpo_tune.tuning.ray.remote_attempts import (
    download_trial,
    make_attempt_directory,
    upload_trial,
)

PLACE = "memory://bucket/night/trials/3"


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> StoreDirectory:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return StoreDirectory(PLACE, patience=0.0)


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 10)
    (folder / "state").mkdir()
    (folder / "state" / "rng").write_bytes(folder.name.encode())


def train(folder: Path, *steps: int) -> None:
    for step in steps:
        write_checkpoint(folder, step, Cost(step), fill)
        with (folder / "steps.jsonl").open("a") as file:
            file.write(f"{step}\n")


def begin(folder: Path, trial: str = "this") -> Callable[[], None]:
    """Fetch the trial; return what sends it."""
    files = StoreDirectory(PLACE, patience=0.0)
    download_trial(files, folder, trial)
    return partial(upload_trial, files, folder)


def checkpoints(files: StoreDirectory) -> list[str]:
    return list(iterate_whole_checkpoints(files.sizes(), files.read))


def test_another_node_goes_on_where_the_first_one_was(tmp_path: Path, store: StoreDirectory):
    upload = begin(tmp_path / "one")
    train(tmp_path / "one", 2, 4)
    upload()
    begin(tmp_path / "two")
    found = find_checkpoint(tmp_path / "two")
    assert found.newest == tmp_path / "two" / "checkpoint-4"
    assert not found.damaged
    assert (tmp_path / "two" / "steps.jsonl").read_text() == "2\n4\n"
    assert not (tmp_path / "two" / "checkpoint-2").exists()  # the newest is enough


def test_two_checkpoints_stay_in_the_store(tmp_path: Path, store: StoreDirectory):
    upload = begin(tmp_path / "one")
    for step in (2, 4, 6):
        train(tmp_path / "one", step)
        upload()
    assert checkpoints(store) == ["checkpoint-6", "checkpoint-4"]
    upload_again = begin(tmp_path / "two")
    train(tmp_path / "two", 8)
    upload_again()
    assert checkpoints(store) == ["checkpoint-8", "checkpoint-6"]
    assert not any(name.startswith(("checkpoint-2/", "checkpoint-4/")) for name in store.sizes())


def test_what_is_there_already_is_not_sent_again(
    tmp_path: Path, store: StoreDirectory, monkeypatch: pytest.MonkeyPatch
):
    upload = begin(tmp_path / "one")
    train(tmp_path / "one", 2)
    upload()
    sent: list[str] = []
    monkeypatch.setattr(StoreDirectory, "upload", lambda _, files: sent.extend(files))
    upload()
    assert sent == []
    (tmp_path / "one" / "completions.jsonl").write_text("{}\n")
    (tmp_path / "one" / ".unfinished").write_text("")
    upload()
    assert sent == ["completions.jsonl"]


def test_a_checkpoint_that_was_cut_short_is_none(
    tmp_path: Path, store: StoreDirectory, monkeypatch: pytest.MonkeyPatch
):
    upload = begin(tmp_path / "one")
    train(tmp_path / "one", 2)
    upload()
    train(tmp_path / "one", 4)
    put = MemoryFileSystem.put

    def cut(self: MemoryFileSystem, sources: list[str], targets: list[str]) -> None:
        if any(target.endswith("complete.json") for target in targets):
            raise OSError("no route")
        put(self, sources, targets)

    monkeypatch.setattr(MemoryFileSystem, "put", cut)
    with pytest.raises(StoreUnreachableError):
        upload()
    assert "checkpoint-4/weights" in store.sizes()
    monkeypatch.setattr(MemoryFileSystem, "put", put)
    assert checkpoints(store) == ["checkpoint-2"]
    begin(tmp_path / "two")
    assert find_checkpoint(tmp_path / "two").newest == tmp_path / "two" / "checkpoint-2"


@pytest.mark.parametrize("harm", ["a file is missing", "other content"])
def test_of_a_damaged_checkpoint_the_one_before_serves(
    harm: str, tmp_path: Path, store: StoreDirectory
):
    upload = begin(tmp_path / "one")
    train(tmp_path / "one", 2, 4)
    upload()
    if harm == "other content":
        store.write("checkpoint-4/weights", b"x" * 10)
    else:
        store.delete(["checkpoint-4/weights"])
    begin(tmp_path / "two")
    assert find_checkpoint(tmp_path / "two").newest == tmp_path / "two" / "checkpoint-2"


def test_a_torn_marker_is_none(store: StoreDirectory):
    store.write("checkpoint-4/complete.json", b'{"files": {')
    store.write("checkpoint-2/complete.json", json.dumps({"files": {}}).encode())
    assert checkpoints(store) == ["checkpoint-2"]


def test_what_another_trial_of_that_number_left_is_not_gone_on_from(
    tmp_path: Path, store: StoreDirectory
):
    upload = begin(tmp_path / "one", "of a ledger that is gone")
    train(tmp_path / "one", 2)
    upload()
    begin(tmp_path / "two")
    assert find_checkpoint(tmp_path / "two").newest is None
    assert list(store.sizes()) == ["begun"]


def test_a_process_deletes_what_those_that_are_gone_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CACHE, str(tmp_path))
    attempts = tmp_path / "attempts"
    names = {
        "gone": f"{socket.gethostname()}_{2**22 + 1}_5.00",
        "elsewhere": f"another-host_{os.getpid()}_5.00",
        "below": f"{socket.gethostname()}_1_{_created(1):.2f}",
    }
    for name in names.values():
        (attempts / name).mkdir(parents=True)
    own = make_attempt_directory()
    (own / "left").touch()
    assert make_attempt_directory() == own
    assert list(own.iterdir()) == []
    left = {path.name for path in attempts.iterdir()}
    assert left == {own.name, names["elsewhere"], names["below"]}


def _created(pid: int) -> float:
    import psutil

    return psutil.Process(pid).create_time()
