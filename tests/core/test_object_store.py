"""Files on an object store: what is asked again, what is told, and where copies are kept."""

import errno
import pickle

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gdpo_tune.core.errors import StoreError, StoreUnreachableError
from gdpo_tune.core.object_store import (
    CACHE,
    StoreDirectory,
    find_address,
    find_local_copy,
    is_url,
    join_address,
    open_filesystem,
)
from gdpo_tune.ledger.sweep_store import check_store_writable
from tests.support.clock import count_pauses_as_time

PLACE = "memory://bucket/night"
NO_ROUTE = OSError("no route")


@pytest.fixture(autouse=True)
def empty_store(monkeypatch):
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])


@pytest.fixture
def clock(monkeypatch):
    """The pauses that were made."""
    return count_pauses_as_time(monkeypatch)


@pytest.fixture
def fail(monkeypatch):
    """A function that lets a method of the store fail so many times."""

    def fail(method, error, times=99):
        works, left = getattr(MemoryFileSystem, method), [error] * times

        def call(*args, **kwargs):
            if left:
                raise left.pop()
            return works(*args, **kwargs)

        monkeypatch.setattr(MemoryFileSystem, method, call)

    return fail


def test_files_go_there_and_come_back(tmp_path):
    files = StoreDirectory(PLACE)
    assert files.list_sizes() == {}
    assert files.read("a") is None
    (tmp_path / "one").write_bytes(b"1")
    files.upload({"a/one": tmp_path / "one", "b/two": tmp_path / "one"})
    files.write("a/three", b"333")
    files.copy({"a/three": "c/three"})
    StoreDirectory(f"{PLACE}-2").write("a", b"")  # the name of another one
    assert files.list_sizes() == {"a/one": 1, "a/three": 3, "b/two": 1, "c/three": 3}
    assert files.list_sizes("a") == {"a/one": 1, "a/three": 3}
    files.download({"c/three": tmp_path / "new" / "three"})
    assert (tmp_path / "new" / "three").read_bytes() == b"333"
    files.delete(["a/one", "a/none", "b/two"])  # as in a repetition, one is gone already
    assert files.list_sizes() == {"a/three": 3, "c/three": 3}


def test_a_store_that_is_away_for_a_moment_is_asked_again(fail, clock):
    said = []
    fail("pipe_file", NO_ROUTE, 3)
    StoreDirectory(PLACE, say=said.append).write("a", b"1")
    assert clock == [1, 2, 4]
    assert said == [f"waits for {PLACE}: no route", f"continues: {PLACE} answers again after 7 s"]
    assert StoreDirectory(PLACE).read("a") == b"1"


def test_a_store_that_stays_away_is_given_up(fail, clock):
    fail("find", NO_ROUTE)
    with pytest.raises(StoreUnreachableError) as caught:
        StoreDirectory(PLACE, patience=60).list_sizes()
    assert clock == [1, 2, 4, 8, 16]
    assert str(caught.value).startswith(f"{PLACE} has not answered for 31 s (no route);")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_who_does_not_wait_says_nothing_of_waiting(fail, clock):
    said = []
    fail("find", NO_ROUTE)
    with pytest.raises(StoreUnreachableError):
        StoreDirectory(PLACE, patience=0, say=said.append).list_sizes()
    assert (said, clock) == ([], [])


def test_a_full_disk_here_is_not_the_stores_fault(tmp_path, fail, clock):
    fail("get", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        StoreDirectory(PLACE).download({"a": tmp_path / "a"})
    assert clock == []


class Status(Exception):
    """An error of a package that tells its HTTP status."""

    def __init__(self, code):
        super().__init__(f"status {code}")
        self.code = code


class NoCredentialsError(Exception):
    """What botocore calls it."""


@pytest.mark.parametrize(
    "refusal",
    [
        PermissionError("Access Denied"),
        FileNotFoundError("The specified bucket does not exist"),
        Status(403),
        NoCredentialsError("Unable to locate credentials"),
    ],
)
def test_a_refusal_is_no_outage_and_is_told_before_a_sweep(fail, clock, refusal):
    said = []
    check_store_writable(PLACE)
    assert StoreDirectory(PLACE).list_sizes() == {}
    fail("pipe_file", refusal)
    write = StoreDirectory(PLACE, say=said.append).write
    for ask in (lambda: write("a", b"1"), lambda: check_store_writable(PLACE)):
        with pytest.raises(StoreError, match=f"storage {PLACE}: {refusal}\n    fix: ") as caught:
            ask()
        assert caught.value.exit_status == 2
    assert (said, clock) == ([], [])


@pytest.mark.parametrize("outage", [NO_ROUTE, TimeoutError(), Status(503)])
def test_an_outage_is_no_refusal(fail, clock, outage):
    fail("pipe_file", outage, 2)
    StoreDirectory(PLACE).write("a", b"1")
    assert clock == [1, 2]


def test_a_marker_is_written_last_and_deleted_first(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    names = ["checkpoint-2/complete.json", "checkpoint-2/weights", "steps.jsonl"]
    calls = []

    def record(*arguments):
        calls.append([path.removeprefix("/bucket/night/") for path in arguments[-1]])

    for method in ("put", "copy", "rm"):
        monkeypatch.setattr(MemoryFileSystem, method, record)
    files = StoreDirectory(PLACE)
    files.upload(dict.fromkeys(names, tmp_path / "file"))
    files.copy({name: name for name in names})
    files.delete(names)
    marker, others = names[:1], names[1:]
    assert calls == [others, marker, others, marker, marker, others]


def test_addresses_that_nothing_reads_are_refused(monkeypatch):
    def refuse(*_, **__):
        raise ImportError("Install s3fs to access S3")

    with pytest.raises(StoreError, match="Protocol not known"):
        open_filesystem("nowhere://bucket")
    with pytest.raises(StoreError, match=r"storage reference://x: .*argument.*\n    fix: "):
        open_filesystem("reference://x")
    monkeypatch.setattr(fsspec, "url_to_fs", refuse)
    with pytest.raises(StoreError, match="fix: pip install s3fs"):
        open_filesystem("s3://bucket/night")


@pytest.mark.parametrize(
    ("address", "folder"),
    [
        ("s3://bucket/sweeps/night", "s3/bucket/sweeps/night"),
        ("S3://bucket", "s3/bucket"),
        ("file:///mnt/sweeps", "file/mnt/sweeps"),
    ],
)
def test_copies_are_in_the_cache_and_tell_of_what(address, folder, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path))
    assert find_local_copy(address) == tmp_path / folder
    assert find_address(tmp_path / folder).lower() == address.lower()
    assert find_address(tmp_path.parent / "runs") == ""
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert find_local_copy(address) == tmp_path / "own" / "gdpo_tune" / folder


def test_addresses_below_others():
    assert join_address("s3://bucket/", "a", "b") == "s3://bucket/a/b"
    assert is_url("memory://x")
    assert not is_url("C:/runs")
