"""The state: one file, which one process at a time changes; ticks that are doubled or killed."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack
from datetime import timedelta

import pytest

from gdpo_tune.clusters import schedule_state
from gdpo_tune.clusters.schedule_state import ScheduleHistory
from gdpo_tune.core.errors import BackendUnreachableError, StoreError
from tests.support.schedule import Plan, Scene

BEGUN = ["started", "submitted"]


def change(history, schedule):
    with history.hold():
        history.state.schedule = schedule
        history.save()


def test_a_state_comes_back(tmp_path):
    first, second = (ScheduleHistory(tmp_path / "nightly") for _ in range(2))
    change(first, "ü")
    second.read()
    assert second.state == first.state
    assert second.state.number == 1
    assert sorted(os.listdir(tmp_path / "nightly")) == ["lock", "schedule.json"]


def test_the_keys_of_a_stored_state_stay(tmp_path):
    run = {"name": "nightly-1", "due": "2026-01-01T02:00:00Z", "identity": "x"}
    run |= {"began": "2026-01-01T02:00:00Z", "is_manual": True, "state_problem": "slurm is away"}
    stored = {"number": 1, "is_queued_manually": True, "runs": [run]}
    history = ScheduleHistory(tmp_path)
    history.file.write_text(json.dumps(stored))
    with history.hold():
        assert history.state.is_queued_manually
        assert history.state.runs[0].is_manual
        assert history.state.runs[0].state_problem == "slurm is away"
        history.save()
    assert json.loads(history.file.read_text()) == {**stored, "number": 2}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "[" * 10**5),
        '{"number": 2, "since": "yesterday"}',
        '{"number": 2, "since": "2026-01-01T00:00:00"}',
        '{"number": 2, "key": "of a later version"}',
        '{"number": 2, "runs": [{}]}',
    ],
)
def test_a_state_that_is_damaged_is_named(tmp_path, content):
    scene = Scene(tmp_path)
    scene.context.history.file.write_text(content)
    with pytest.raises(StoreError, match=r"schedule\.json is damaged, or.*\n    fix: restore it"):
        scene.tick_at(2)
    assert not scene.backend.jobs


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
    assert scene.tick_at(2) == BEGUN
    file = scene.context.history.file
    state = json.loads(file.read_text())
    state["runs"][0][key] = value
    file.write_text(json.dumps(state))
    with pytest.raises(StoreError, match=r"schedule\.json is damaged"):
        scene.open_scheduler()


def test_a_change_that_could_not_be_written_is_forgotten(tmp_path, monkeypatch):
    history = ScheduleHistory(tmp_path)
    change(history, "kept")

    def fail(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(schedule_state, "write_atomically", fail)
        with pytest.raises(StoreError, match="no space left"):
            change(history, "lost")
    with history.hold():
        assert (history.state.schedule, history.state.number) == ("kept", 1)


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    history = ScheduleHistory(tmp_path / "file" / "nightly")
    with pytest.raises(StoreError, match=r"nightly: .*\n    fix: make it readable"), history.hold():
        pass


def test_a_second_tick_waits_and_then_names_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule_state, "LOCK_SECONDS", 0.2)
    scene = Scene(tmp_path)
    with scene.open_scheduler().history.hold():
        named = rf"being written by process {os.getpid()} on .*\n    fix: wait until it has ended"
        with pytest.raises(BackendUnreachableError, match=named):
            scene.tick_at(2)
    assert scene.tick_at(2) == BEGUN


def test_an_active_run_is_waited_for_while_a_tick_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule_state, "LOCK_SECONDS", 0.2)
    scene = Scene(tmp_path, a1=Plan(1))
    scene.clock.advance(hours=2)
    other, held = scene.open_scheduler().history, list[str]()

    def report(context):
        held.extend(map(str, context.backend_errors))
        context.backend_errors.clear()

    def sleep(seconds):
        scene.clock.advance(seconds=seconds)
        if held:
            lock.close()
        else:
            lock.enter_context(other.hold())

    with ExitStack() as lock:
        due = scene.clock.now
        assert scene.context.run(due, wait=True, every=60, report=report, sleep=sleep) == 0
    assert len(held) == 1


def tick_at(barrier, context):
    barrier.wait()
    context.tick()


def test_many_ticks_at_once_start_one_run(tmp_path):
    scene, events = Scene(tmp_path, a1=Plan(5)), []
    scene.clock.advance(hours=3)
    scene.open_scheduler().tick()
    for _ in range(10):
        scene.clock.advance(hours=24)
        contexts = [scene.open_scheduler() for _ in range(8)]
        barrier = threading.Barrier(len(contexts))
        threads = [threading.Thread(target=tick_at, args=(barrier, each)) for each in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        events += [event.kind for context in contexts for event in context.events]
    assert [events.count(kind) for kind in ("started", "submitted", "ended")] == [10, 10, 10]
    assert len(scene.backend.jobs) == 11


def test_killed_between_claim_and_submission_the_next_tick_submits(tmp_path):
    scene = Scene(tmp_path)
    submit = scene.backend.submit

    def kill(_):
        raise KeyboardInterrupt

    scene.backend.submit = kill
    with pytest.raises(KeyboardInterrupt):
        scene.tick_at(3)
    scene.backend.submit = submit
    assert scene.tick_at(3) == ["submitted"]
    assert scene.backend.submissions == ["nightly-20260101T020000Z-a1"]


def tick_and_forget_the_submission(scene, hour):
    """As if the process was killed between the submission and its record."""
    save, file = scene.context.history.save, scene.context.history.file
    states: list[str] = []

    def keep():
        save()
        states.append(file.read_text())

    scene.context.history.save = keep
    assert scene.tick_at(hour) == BEGUN
    scene.context.history.save = save
    file.write_text(states[-2])


def test_killed_between_submission_and_its_record_the_next_tick_submits_the_same(tmp_path):
    scene = Scene(tmp_path)
    tick_and_forget_the_submission(scene, 3)
    scene.tick_at(5)
    assert len(scene.backend.submissions) == 2
    assert list(scene.backend.jobs) == ["nightly-20260101T020000Z-a1"]
    (run,) = scene.open_scheduler().state.runs
    assert run.state == "finished"


def test_a_run_that_may_have_been_submitted_is_stopped_only_when_its_job_is(tmp_path):
    """The caller was killed between submission and record: POSIX gives SIGKILL no last word."""
    scene = Scene(tmp_path)
    scene.backend.takes_to_stop = timedelta(minutes=1)
    tick_and_forget_the_submission(scene, 2)
    other = scene.open_scheduler()
    assert other.stop()
    assert list(scene.backend.stops) == ["nightly-20260101T020000Z-a1"]
    assert [event.kind for event in other.events] == ["stopping", "submitted"]
    scene.clock.advance(minutes=2)
    other.tick()
    assert other.state.runs[-1].state == "stopped"
