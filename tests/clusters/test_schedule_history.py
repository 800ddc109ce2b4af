"""The history: events that are appended once, whoever is first, on disks and on object stores."""

from __future__ import annotations

import json
import sys
import threading
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gdpo_tune.clusters import asking
from gdpo_tune.clusters.backends.base import Job
from gdpo_tune.clusters.backends.kuberay import KubeRay
from gdpo_tune.clusters.backends.local import Local
from gdpo_tune.clusters.backends.ray_jobs import RayJobs
from gdpo_tune.clusters.backends.slurm import Slurm
from gdpo_tune.clusters.log import SEGMENT, Event, EventLog, TooLate
from gdpo_tune.clusters.store import FolderStore, ObjectStore, Store, open_store
from gdpo_tune.clusters.tick import Desk, tick
from gdpo_tune.core.errors import StoreError
from tests.support.schedule import (
    START,
    Clock,
    FakeBackend,
    MemoryStore,
    Plan,
    Scene,
    desk_of,
    scheduled,
)

NIGHTLY = 'space: search_spaces/code.yaml\nschedule: {cron: "0 2 * * *"}\n'


@pytest.fixture(params=["folder", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "runs"))
    return open_store(f"memory://{uuid.uuid4().hex}/sweeps")


def seen(number: int) -> Event:
    return Event("seen", datetime(2026, 1, 1, tzinfo=UTC), {"schedule": f"ü {number}"})


def test_a_file_is_created_once(store: Store):
    store.create("a/b.json", b"first")
    with pytest.raises(FileExistsError):
        store.create("a/b.json", b"second")
    assert store.read(["a/b.json"]) == [b"first"]
    assert store.names("a") == ["b.json"]
    assert store.names("nothing") == []
    store.check()
    assert [name for name in store.names(".schedule") if "probe" in name] == []


def test_events_come_back_in_order_and_from_segments(store: Store):
    log = EventLog(store, "nightly")
    for number in range(2 * SEGMENT + 3):
        log.append(seen(number))
    again = EventLog(store, "nightly")
    assert again.refresh() == log.events
    assert again.refresh() == []
    names = store.names(".schedule/nightly")
    assert sum(name.endswith(".jsonl") for name in names) == 2
    log.append(seen(-1))
    assert again.refresh() == [seen(-1)]


def test_who_comes_second_is_told_and_sees_what_came_first(store: Store):
    first, second = EventLog(store, "nightly"), EventLog(store, "nightly")
    first.append(seen(1))
    with pytest.raises(TooLate):
        second.append(seen(2))
    assert second.events == []
    assert second.refresh() == [seen(1)]
    second.append(seen(2))
    assert first.refresh() == [seen(2)]


def test_a_segment_that_was_not_written_is_written_by_the_next_reader():
    store = MemoryStore()
    log = EventLog(store, "nightly")
    for number in range(SEGMENT + 1):
        log.append(seen(number))
    (segment,) = [name for name in store.files if name.endswith(".jsonl")]
    whole = store.files.pop(segment)
    assert EventLog(store, "nightly").refresh() == log.events
    assert store.files[segment] == whole


def test_a_missing_event_is_not_passed_over():
    store = MemoryStore()
    log = EventLog(store, "nightly")
    for number in range(3):
        log.append(seen(number))
    del store.files[".schedule/nightly/00000002.json"]
    with pytest.raises(StoreError, match=r"lacks \.schedule/nightly/00000002\.json"):
        EventLog(store, "nightly").refresh()


START_OF = '{"event": "started", "at": "2026-01-01T00:00:00+00:00"'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 10**5,
        "{}",
        '{"event": "seen", "at": "yesterday"}',
        '{"event": "seen", "at": "2026-01-01T00:00:00", "schedule": ""}',
        '{"event": "of a later version", "at": "2026-01-01T00:00:00+00:00"}',
        START_OF + "}",
        START_OF.replace("started", "submitted") + ', "run": "of nobody", "attempt": 1, "job": {}}',
    ],
)
@pytest.mark.parametrize("where", ["00000002.json", "00000001-00000100.jsonl"])
def test_a_history_that_is_damaged_is_named(tmp_path, content, where):
    sweep, store = scheduled(tmp_path, NIGHTLY), MemoryStore()
    clock = Clock(START)
    backend = FakeBackend(clock, lambda _: Plan(1))
    desk = desk_of(sweep, clock, backend, store)
    for number in range(SEGMENT):
        desk.log.append(seen(number))
    if where.endswith(".json"):
        del store.files[".schedule/nightly/00000001-00000100.jsonl"]
    store.files[f".schedule/nightly/{where}"] = content.encode()
    with pytest.raises(StoreError, match=r"0000000\d.*json.* is not what was written there"):
        desk_of(sweep, clock, backend, store)


UNDER_WAY = "00000003.json"
"""The event that says what the first run of a `Scene` is known by."""


def forge(scene: Scene, key: str, value: object) -> None:
    path = f".schedule/nightly/{UNDER_WAY}"
    event = json.loads(scene.store.files[path])
    scene.store.files[path] = json.dumps({**event, key: value}).encode()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("at", "0001-01-01T00:00:00+14:00"),
        ("at", 0),
        ("attempt", "one"),
        ("attempt", 10**400),
        ("run", "of nobody"),
        ("job", None),
        ("job", []),
    ],
)
def test_an_event_with_one_wrong_value_is_named(tmp_path, key, value):
    scene = Scene(tmp_path)
    assert scene.at(2) == ["started", "submitted"]
    path = f".schedule/nightly/{UNDER_WAY}"
    scene.store.files[path] = json.dumps(
        {**json.loads(scene.store.files[path]), key: value}
    ).encode()
    with pytest.raises(StoreError, match=f"{UNDER_WAY} is not what was written there"):
        scene.open()


@pytest.mark.parametrize("backend", [Local, RayJobs, KubeRay, Slurm])
@pytest.mark.parametrize("job", [{}, {"id": 7, "folder": None}, {"folder": "/x", "processes": []}])
def test_a_job_that_its_backend_did_not_write_is_not_looked_for(
    tmp_path, monkeypatch, backend, job
):
    scene = Scene(tmp_path)
    scene.at(2)
    path = f".schedule/nightly/{UNDER_WAY}"
    scene.store.files[path] = json.dumps(
        {**json.loads(scene.store.files[path]), "job": job}
    ).encode()
    monkeypatch.setattr(scene.backend, "job_shape", backend.job_shape, raising=False)
    scene.desk = scene.open()
    with pytest.raises(StoreError, match=f"{UNDER_WAY} is not what was written there"):
        scene.at(2.1)


def test_a_history_that_was_moved_away_under_a_reader():
    store = MemoryStore()
    log = EventLog(store, "nightly")
    log.append(seen(1))
    store.files.clear()
    with pytest.raises(StoreError, match="fewer events than before"):
        log.refresh()


def test_a_reader_of_a_folder_sees_no_half_written_event(tmp_path: Path):
    store = FolderStore(str(tmp_path))
    (tmp_path / ".schedule" / "nightly").mkdir(parents=True)
    (tmp_path / ".schedule" / "nightly" / ".00000001.json.ab").write_bytes(b'{"event": "se')
    assert EventLog(store, "nightly").refresh() == []


def test_a_store_that_creates_twice_is_refused():
    class Overwriting(MemoryStore):
        def create(self, name: str, content: bytes) -> None:
            self.files[name] = content

    with pytest.raises(StoreError, match="can be created there twice"):
        Overwriting().check()


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/runs: Not a directory\n    fix: make it readable"):
        open_store(str(tmp_path / "file" / "runs")).check()


def test_a_store_without_its_package_or_of_an_unknown_kind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(StoreError, match="pip install adlfs"):
        open_store("az://bucket/sweeps")
    with pytest.raises(StoreError, match="nothing://bucket"):
        open_store("nothing://bucket")


def test_an_object_store_that_fails_is_told(monkeypatch: pytest.MonkeyPatch):
    store = open_store("memory://bucket")
    assert isinstance(store, ObjectStore)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(store._files, "pipe_file", fail)
    with pytest.raises(StoreError, match="storage memory://bucket: no credentials"):
        store.create("a", b"")


def at_once(barrier: threading.Barrier, desk: Desk) -> None:
    barrier.wait()
    tick(desk)


@pytest.mark.parametrize("kind", ["folder", "object store"])
def test_many_ticks_at_once_start_one_run(tmp_path: Path, kind: str):
    place = str(tmp_path / "runs") if kind == "folder" else f"memory://{uuid.uuid4().hex}"
    clock = Clock(START.replace(hour=3))
    backend = FakeBackend(clock, lambda _: Plan(5))
    sweep = scheduled(tmp_path, NIGHTLY)
    tick(desk_of(sweep, clock, backend, open_store(place)))
    for _ in range(10):
        clock.pass_by(hours=24)
        desks = [desk_of(sweep, clock, backend, open_store(place)) for _ in range(8)]
        barrier = threading.Barrier(len(desks))
        threads = [threading.Thread(target=at_once, args=(barrier, desk)) for desk in desks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = desk_of(sweep, clock, backend, open_store(place)).log.events
    kinds = [event.kind for event in events]
    assert kinds.count("started") == 10
    assert kinds.count("submitted") == 10
    assert kinds.count("ended") == 9
    assert len(backend.jobs) == 10


def test_killed_between_claim_and_submission_the_next_tick_submits(tmp_path: Path):
    clock, store = Clock(), MemoryStore()
    backend = FakeBackend(clock, lambda _: Plan(1))
    sweep = scheduled(tmp_path, NIGHTLY)
    tick(desk_of(sweep, clock, backend, store))
    clock.pass_by(hours=3)

    def killed(_: object) -> None:
        raise KeyboardInterrupt

    dying = desk_of(sweep, clock, backend, store)
    real, backend.submit = backend.submit, killed
    with pytest.raises(KeyboardInterrupt):
        tick(dying)
    backend.submit = real
    tick(desk_of(sweep, clock, backend, store))
    assert backend.submissions == ["nightly-20260101T020000Z-a1"]


def test_killed_between_submission_and_its_record_the_next_tick_submits_the_same(tmp_path: Path):
    clock, store = Clock(START), MemoryStore()
    backend = FakeBackend(clock, lambda _: Plan(1))
    sweep = scheduled(tmp_path, NIGHTLY)
    tick(desk_of(sweep, clock, backend, store))
    clock.pass_by(hours=3)
    tick(desk_of(sweep, clock, backend, store))
    last = max(name for name in store.files if name.endswith(".json"))
    assert b"submitted" in store.files.pop(last)
    clock.pass_by(hours=2)
    tick(desk_of(sweep, clock, backend, store))
    assert len(backend.submissions) == 2
    assert list(backend.jobs) == ["nightly-20260101T020000Z-a1"]
    (run,) = desk_of(sweep, clock, backend, store).book.runs.values()
    assert run.state == "finished"


def test_a_run_that_is_stopped_while_it_is_submitted_leaves_no_job(tmp_path: Path):
    scene = Scene(tmp_path)
    submit = scene.backend.submit

    def stopped_meanwhile(job: Job) -> dict[str, object]:
        taken = submit(job)
        assert asking.stop(scene.open())
        return taken

    scene.backend.submit = stopped_meanwhile
    scene.at(2)
    assert list(scene.backend.stops) == ["nightly-20260101T020000Z-a1"]
    (run,) = scene.open().book.runs.values()
    assert (run.state, scene.open().book.active) == ("stopped", None)


def test_two_that_submit_one_attempt_do_not_stop_it(tmp_path: Path):
    scene = Scene(tmp_path)
    submit = scene.backend.submit

    def submitted_twice(job: Job) -> dict[str, object]:
        scene.backend.submit = submit
        tick(scene.open())
        return submit(job)

    scene.backend.submit = submitted_twice
    scene.at(2)
    assert scene.backend.stops == {}
    assert [event.kind for event in scene.open().log.events].count("submitted") == 1
