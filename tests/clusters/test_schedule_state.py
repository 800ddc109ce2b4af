"""The history: one state after another, each written by one process, on disks and object stores."""

from __future__ import annotations

import json
import sys
import threading
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from gdpo_tune.clusters.backends.base import ScheduledJob
from gdpo_tune.clusters.schedule_state import (
    KEPT_STATES,
    JobHandle,
    ScheduleHistory,
    ScheduleStorage,
)
from gdpo_tune.clusters.scheduler import SweepScheduler
from gdpo_tune.core.errors import StoreError
from tests.support.schedule import (
    NIGHTLY,
    START,
    Clock,
    FakeBackend,
    MemoryStorage,
    Plan,
    Scene,
    build_context,
    load_scheduled_sweep,
)


@pytest.fixture(params=["directory", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ScheduleStorage:
    if request.param == "directory":
        return ScheduleStorage(str(tmp_path / "runs"))
    return ScheduleStorage(f"memory://{uuid.uuid4().hex}/sweeps")


def change(history: ScheduleHistory, schedule: str) -> bool:
    history.state.schedule = schedule
    return history.save()


def test_a_file_is_created_once(storage: ScheduleStorage):
    storage.create("a/b.json", b"first")
    with pytest.raises(FileExistsError):
        storage.create("a/b.json", b"second")
    assert storage.read("a/b.json") == b"first"
    assert storage.list_names("a") == ["b.json"]
    assert storage.list_names("nothing") == []
    storage.check()
    assert [name for name in storage.list_names(".schedule") if "probe" in name] == []
    storage.delete("a/b.json")
    storage.delete("a/b.json")
    assert storage.list_names("a") == []


def test_a_state_comes_back(storage: ScheduleStorage):
    first, second = (ScheduleHistory(storage, "nightly") for _ in range(2))
    assert change(first, "ü")
    second.refresh()
    assert second.state == first.state
    assert second.state.number == 1
    assert storage.list_names(".schedule/nightly") == ["00000001.json"]


def test_the_keys_of_a_stored_state_stay(storage: ScheduleStorage):
    run = {"name": "nightly-1", "due": "2026-01-01T02:00:00Z", "identity": "x"}
    run |= {"began": "2026-01-01T02:00:00Z", "by_name": True, "unknown": "slurm is away"}
    stored = {"number": 1, "queued_by_name": True, "runs": [run]}
    storage.create(".schedule/nightly/00000001.json", json.dumps(stored).encode())
    history = ScheduleHistory(storage, "nightly")
    history.refresh()
    assert history.state.is_queued_manually
    assert history.state.runs[0].is_manual
    assert history.state.runs[0].state_problem == "slurm is away"
    assert history.save()
    again = json.loads(storage.read(".schedule/nightly/00000002.json"))
    assert again == {**stored, "number": 2}


def test_the_second_of_two_changes_is_refused_and_sees_the_first(storage: ScheduleStorage):
    first, second = (ScheduleHistory(storage, "nightly") for _ in range(2))
    assert change(first, "first")
    assert not change(second, "second")
    assert second.state == first.state
    assert change(second, "second")
    first.refresh()
    assert first.state.schedule == "second"


def test_the_last_states_are_kept(storage: ScheduleStorage):
    history = ScheduleHistory(storage, "nightly")
    for number in range(KEPT_STATES + 5):
        assert change(history, str(number))
    names = storage.list_names(".schedule/nightly")
    assert names == [f"{number:08}.json" for number in range(6, KEPT_STATES + 6)]


def test_a_process_that_slept_through_all_kept_states_is_too_late(storage: ScheduleStorage):
    sleeper, other = (ScheduleHistory(storage, "nightly") for _ in range(2))
    for history in (sleeper, other):
        history.refresh()
    assert change(other, "before")
    sleeper.refresh()
    for number in range(KEPT_STATES + 5):
        assert change(other, str(number))
    assert not change(sleeper, "from a dream")
    assert sleeper.state == other.state
    assert change(sleeper, "awake")
    assert min(storage.list_names(".schedule/nightly")) > "00000002.json"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 10**5,
        "{}",
        '{"number": 1, "schedule": "of another number"}',
        '{"number": 2, "since": "yesterday"}',
        '{"number": 2, "since": "2026-01-01T00:00:00"}',
        '{"number": 2, "key": "of a later version"}',
        '{"number": 2, "runs": [{}]}',
    ],
)
def test_a_state_that_is_damaged_is_named(tmp_path, content):
    scene = Scene(tmp_path)
    scene.storage.files[".schedule/nightly/00000002.json"] = content.encode()
    with pytest.raises(StoreError, match=r"00000002\.json is damaged, or.*\n    fix: restore it"):
        scene.open_scheduler()


def forge(scene: Scene, key: str, value: object) -> None:
    """Change a key of the run in the newest state."""
    path = max(scene.storage.files)
    state = json.loads(scene.storage.files[path])
    state["runs"][0][key] = value
    scene.storage.files[path] = json.dumps(state).encode()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("began", "0001-01-01T00:00:00+14:00"),
        ("due", 0),
        ("attempt", "one"),
        ("attempt", 10**400),
        ("state", "lost"),
        ("gpu_hours_limit", -1.0),
        ("job", []),
        ("job", {}),
        ("job", {"id": 7, "backend": None}),
        ("job", {"id": "x", "backend": "local", "processes": [["one", 0.0]]}),
    ],
)
def test_a_run_with_one_wrong_value_is_named(tmp_path, key, value):
    scene = Scene(tmp_path)
    assert scene.tick_at(2) == ["started", "submitted"]
    forge(scene, key, value)
    with pytest.raises(StoreError, match=r"00000003\.json is damaged"):
        scene.open_scheduler()


def test_a_history_that_was_moved_away_under_a_reader():
    storage = MemoryStorage()
    history = ScheduleHistory(storage, "nightly")
    assert change(history, "x")
    storage.files.clear()
    with pytest.raises(StoreError, match="fewer changes than before"):
        history.refresh()


def test_a_reader_of_a_directory_sees_no_half_written_state(tmp_path: Path):
    (tmp_path / ".schedule" / "nightly").mkdir(parents=True)
    (tmp_path / ".schedule" / "nightly" / ".00000001.json.ab").write_bytes(b'{"number')
    history = ScheduleHistory(ScheduleStorage(str(tmp_path)), "nightly")
    history.refresh()
    assert history.state.number == 0


def test_a_change_that_could_not_be_written_is_forgotten():
    storage = MemoryStorage()
    history = ScheduleHistory(storage, "nightly")
    assert change(history, "kept")
    create = storage.create

    def fail(name: str, content: bytes) -> None:
        raise StoreError("no space left")

    storage.create = fail
    with pytest.raises(StoreError, match="no space left"):
        change(history, "lost")
    storage.create = create
    history.refresh()
    assert (history.state.schedule, history.state.number) == ("kept", 1)


def test_a_storage_that_creates_twice_is_refused():
    class Overwriting(MemoryStorage):
        def create(self, name: str, content: bytes) -> None:
            self.files[name] = content

    with pytest.raises(StoreError, match="can be created there twice"):
        Overwriting().check()


def test_a_directory_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/runs: Not a directory\n    fix: make it readable"):
        ScheduleStorage(str(tmp_path / "file" / "runs")).check()


def test_a_store_without_its_package_or_of_an_unknown_kind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(StoreError, match="pip install adlfs"):
        ScheduleStorage("az://bucket/sweeps")
    with pytest.raises(StoreError, match="nothing://bucket"):
        ScheduleStorage("nothing://bucket")


def test_the_error_of_an_object_store_is_shown(monkeypatch: pytest.MonkeyPatch):
    storage = ScheduleStorage("memory://bucket")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(storage._files, "pipe_file", fail)
    with pytest.raises(StoreError, match="storage memory://bucket: no credentials"):
        storage.create("a", b"")


def tick_at(barrier: threading.Barrier, context: SweepScheduler) -> None:
    barrier.wait()
    context.tick()


@pytest.mark.parametrize("kind", ["directory", "object store"])
def test_many_ticks_at_once_start_one_run(tmp_path: Path, kind: str):
    address = str(tmp_path / "runs") if kind == "directory" else f"memory://{uuid.uuid4().hex}"
    clock = Clock(START.replace(hour=3))
    backend = FakeBackend(clock, lambda _: Plan(5))
    sweep = load_scheduled_sweep(tmp_path, NIGHTLY)
    kinds: list[str] = []
    build_context(sweep, clock, backend, ScheduleStorage(address)).tick()
    for _ in range(10):
        clock.advance(hours=24)
        contexts = [
            build_context(sweep, clock, backend, ScheduleStorage(address)) for _ in range(8)
        ]
        barrier = threading.Barrier(len(contexts))
        threads = [threading.Thread(target=tick_at, args=(barrier, each)) for each in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kinds += [event.kind for context in contexts for event in context.events]
    assert kinds.count("started") == 10
    assert kinds.count("submitted") == 10
    assert kinds.count("ended") == 9
    assert len(backend.jobs) == 10


def test_killed_between_claim_and_submission_the_next_tick_submits(tmp_path: Path):
    scene = Scene(tmp_path)
    submit = scene.backend.submit

    def kill(_: object) -> None:
        raise KeyboardInterrupt

    scene.backend.submit = kill
    with pytest.raises(KeyboardInterrupt):
        scene.tick_at(3)
    scene.backend.submit = submit
    scene.context = scene.open_scheduler()
    assert scene.tick_at(3) == ["submitted"]
    assert scene.backend.submissions == ["nightly-20260101T020000Z-a1"]


def test_killed_between_submission_and_its_record_the_next_tick_submits_the_same(tmp_path: Path):
    scene = Scene(tmp_path)
    assert scene.tick_at(3) == ["started", "submitted"]
    del scene.storage.files[max(scene.storage.files)]
    scene.context = scene.open_scheduler()
    scene.tick_at(5)
    assert len(scene.backend.submissions) == 2
    assert list(scene.backend.jobs) == ["nightly-20260101T020000Z-a1"]
    (run,) = scene.open_scheduler().state.runs
    assert run.state == "finished"


def test_a_run_that_is_stopped_while_it_is_submitted_leaves_no_job(tmp_path: Path):
    scene = Scene(tmp_path)
    submit = scene.backend.submit

    def stopped_meanwhile(job: ScheduledJob) -> JobHandle:
        scene.backend.submit = submit
        handle = submit(job)
        assert scene.open_scheduler().stop()
        return handle

    scene.backend.submit = stopped_meanwhile
    scene.tick_at(2)
    assert list(scene.backend.stops) == ["nightly-20260101T020000Z-a1"]
    (run,) = scene.open_scheduler().state.runs
    assert (run.state, scene.open_scheduler().state.active) == ("stopped", None)


def test_a_run_that_may_have_been_submitted_is_stopped_only_when_its_job_is(tmp_path: Path):
    """The caller was killed between submission and record: POSIX gives SIGKILL no last word."""
    scene = Scene(tmp_path)
    scene.backend.takes_to_stop = timedelta(minutes=1)
    assert scene.tick_at(2) == ["started", "submitted"]
    del scene.storage.files[max(scene.storage.files)]
    other = scene.open_scheduler()
    assert other.stop()
    assert list(scene.backend.stops) == ["nightly-20260101T020000Z-a1"]
    assert [event.kind for event in other.events] == ["stopping", "submitted"]
    scene.clock.advance(minutes=2)
    other.tick()
    assert other.state.runs[-1].state == "stopped"


def test_two_that_submit_one_attempt_do_not_stop_it(tmp_path: Path):
    scene = Scene(tmp_path)
    submit = scene.backend.submit
    other = scene.open_scheduler()

    def submitted_twice(job: ScheduledJob) -> JobHandle:
        scene.backend.submit = submit
        other.history.refresh()
        other.tick()
        return submit(job)

    scene.backend.submit = submitted_twice
    kinds = scene.tick_at(2) + [event.kind for event in other.events]
    assert scene.backend.stops == {}
    assert kinds.count("submitted") == 1
