"""Runs on machines that another scheduler gave to them, and jobs of backends that are strangers."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta

import pytest

from gdpo_tune import schedule
from gdpo_tune.clusters import asking
from gdpo_tune.clusters.backends import local, supervise
from gdpo_tune.clusters.backends.local import Local
from gdpo_tune.clusters.tick import open_desk, tick
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from tests.support.render import KUBERAY, LOCAL
from tests.support.schedule import ROOT, Clock, FakeBackend, Plan, desk_of, scheduled


def elsewhere(folder: str) -> dict[str, object]:
    return {"folder": folder, "machine": "another", "processes": [(1, 0.0), (2, 0.0)]}


def test_a_machine_that_was_lost_with_its_disk(tmp_path):
    job = elsewhere(str(tmp_path / "gone"))
    with pytest.raises(BackendUnreachableError, match=r"runs on another, and .* is not shared"):
        Local(tmp_path).look(job)
    look = Local(tmp_path, others_are_gone=True).look(job)
    assert not look.running
    assert look.reason == "another, on which it ran, is gone"


def test_a_machine_that_still_beats_is_not_lost(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "beat").touch()
    job = elsewhere(str(tmp_path / "jobs"))
    assert Local(tmp_path, others_are_gone=True).look(job).running


def test_where_jobs_of_a_given_machine_lie(tmp_path):
    found = local.here(scheduled(tmp_path, LOCAL))
    assert found.folder == tmp_path / "runs" / ".schedule" / "nightly" / "jobs"
    sweep = scheduled(tmp_path, LOCAL)
    settings = sweep.settings.model_copy(update={"storage": "s3://bucket/sweeps"})
    found = local.here(replace(sweep, settings=settings))
    assert found.folder.parts[-2:] == ("gdpo-tune", "nightly")
    assert found.others_are_gone


def test_the_command_takes_the_machine_whatever_the_backend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = KUBERAY.replace("/mnt/sweeps", str(tmp_path / "sweeps.d"))
    scheduled(tmp_path, text)
    words = [str(tmp_path / "sweeps"), "run", "nightly"]
    plain, here = (schedule.parser().parse_args([*words, *more]) for more in ((), ("--here",)))
    assert schedule.desk_of(here).make_backend is local.here
    assert schedule.desk_of(plain).make_backend is not local.here


def test_once_leaves_a_run_that_failed_as_it_is(tmp_path):
    clock = Clock()
    backend = FakeBackend(clock, lambda _: Plan(1, status=1))
    sweep = scheduled(tmp_path, LOCAL.replace("max_runtime: 10h", "max_attempts: 1"))
    desk = desk_of(sweep, clock, backend)
    at = clock()

    def run(*, once: bool) -> int:
        return asking.run(desk, at, wait=True, once=once, sleep=lambda _: clock.pass_by(minutes=30))

    assert run(once=True) == 1
    assert run(once=True) == 1
    assert len(backend.submissions) == 1
    assert run(once=False) == 1
    assert len(backend.submissions) == 2


def test_a_job_of_another_backend_is_left_alone(tmp_path):
    clock = Clock()
    backend = FakeBackend(clock, lambda _: Plan(1))
    desk = desk_of(scheduled(tmp_path, LOCAL), clock, backend)
    asking.run(desk, clock(), wait=False)
    (run,) = desk.book.runs.values()
    assert run.job["backend"] == "fake"
    desk.make_backend = lambda _: Local(tmp_path)
    with pytest.raises(BackendError, match="was begun by backend fake"):
        tick(desk)


class Taken(FakeBackend):
    """Jobs of a machine that is taken away at the third look at one."""

    looks = 0

    def look(self, job):
        self.looks += 1
        if self.looks == 3:
            signal.raise_signal(signal.SIGTERM)
        return super().look(job)


def test_a_machine_that_is_taken_away(tmp_path, monkeypatch):
    clock = Clock()
    backend = Taken(clock, lambda _: Plan(5), takes_to_stop=timedelta(seconds=1))
    sweep = scheduled(tmp_path, LOCAL)
    monkeypatch.setattr(schedule, "clock", clock)
    monkeypatch.setattr(local, "here", lambda _: backend)
    monkeypatch.setattr(asking.hand_back, "__defaults__", (lambda s: clock.pass_by(seconds=s),))
    words = [str(sweep.file), "run", "nightly", "--now", "--wait", "--every", "0.1"]
    with pytest.raises(KeyboardInterrupt):
        schedule.main([*words, "--here"])
    (job,) = backend.stops
    assert not backend.look({"id": job}).running
    desk = open_desk(sweep, clock)
    assert desk.book.active is not None
    assert not desk.book.active.stopping
    desk.make_backend, desk.figures = lambda _: backend, lambda *_: {}
    tick(desk)  # the next call
    assert desk.book.active.attempt == 2


def test_a_machine_that_is_taken_away_before_anything_runs(tmp_path):
    clock = Clock()
    asking.hand_back(
        desk_of(scheduled(tmp_path, LOCAL), clock, FakeBackend(clock, lambda _: Plan(1)))
    )


def test_a_second_supervisor_tells_nothing_before_the_first_has_begun(tmp_path):
    """Else its caller would take the job for one that did not start, and begin the next attempt."""
    command = [sys.executable, "-m", "gdpo_tune.clusters.backends.supervise", str(tmp_path)]
    with (tmp_path / supervise.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as second:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1.0)
            (tmp_path / supervise.STATE).write_text("{}")
            assert second.wait(30) == 0
    assert not (tmp_path / supervise.END).exists()


def test_a_supervisor_that_failed_leaves_the_job_to_the_next(tmp_path):
    state = tmp_path / supervise.STATE
    with (tmp_path / supervise.LOCK).open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with (tmp_path / supervise.LOCK).open("w") as second:
            threading.Timer(0.2, first.close).start()
            assert supervise.taken(second, state)
            state.touch()
            assert not supervise.taken(second, state)
