"""Runs on machines that another scheduler provides, and jobs of other backends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdpo_tune import cli, schedule
from gdpo_tune.clusters import scheduler
from gdpo_tune.clusters.backends import local_jobs, supervise
from gdpo_tune.clusters.backends.local_jobs import Local
from gdpo_tune.clusters.outcome import RunFigures
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.clusters.scheduler import SweepScheduler
from gdpo_tune.core.errors import BackendError, BackendUnreachableError
from tests.support.paths import ROOT
from tests.support.render import KUBERAY, LOCAL
from tests.support.schedule import (
    Clock,
    FakeBackend,
    Plan,
    Waiting,
    build_context,
    load_scheduled_sweep,
)


def elsewhere(directory: Path) -> JobHandle:
    processes = [(1, 0.0), (2, 0.0)]
    return JobHandle(
        backend="local", id="x", directory=str(directory), machine="another", processes=processes
    )


def test_a_machine_that_was_lost_with_its_disk(tmp_path):
    job = elsewhere(tmp_path / "gone")
    with pytest.raises(BackendUnreachableError, match=r"runs on another, and .* is not shared"):
        Local(tmp_path).poll(job)
    status = Local(tmp_path, assume_other_hosts_dead=True).poll(job)
    assert not status.running
    assert status.reason == "its machine another is gone"


def test_a_machine_with_a_recent_heartbeat_is_not_lost(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "beat").touch()
    job = elsewhere(tmp_path / "jobs")
    assert Local(tmp_path, assume_other_hosts_dead=True).poll(job).running


def test_the_directory_of_jobs_on_a_given_machine(tmp_path):
    backend = local_jobs.build_local_here(load_scheduled_sweep(tmp_path, LOCAL))
    assert backend.directory == tmp_path / "runs" / ".schedule" / "nightly" / "jobs"
    sweep = load_scheduled_sweep(tmp_path, LOCAL)
    settings = sweep.settings.model_copy(update={"storage": "s3://bucket/sweeps"})
    backend = local_jobs.build_local_here(replace(sweep, settings=settings))
    assert backend.directory.parts[-2:] == ("gdpo-tune", "nightly")
    assert backend.assume_other_hosts_dead


def test_here_runs_on_this_machine_for_every_backend(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = KUBERAY.replace("/mnt/sweeps", str(tmp_path / "sweeps.d"))
    load_scheduled_sweep(tmp_path, text)
    words = [str(tmp_path / "sweeps"), "run", "nightly"]
    plain, here = (
        schedule.build_parser().parse_args([*words, *more]) for more in ((), ("--here",))
    )
    assert schedule.open_named(here).build_backend is local_jobs.build_local_here
    assert schedule.open_named(plain).build_backend is not local_jobs.build_local_here


def test_once_leaves_a_run_that_failed_as_it_is(tmp_path):
    clock = Clock()
    backend = FakeBackend(clock, lambda _: Plan(1, status=1))
    sweep = load_scheduled_sweep(tmp_path, LOCAL.replace("max_runtime: 10h", "max_attempts: 1"))
    context = build_context(sweep, clock, backend)
    at = clock()

    def run(*, once: bool) -> int:
        return context.run(
            at, wait=True, once=once, preempted=Waiting(lambda _: clock.advance(minutes=30))
        )

    assert run(once=True) == 1
    assert run(once=True) == 1
    assert len(backend.submissions) == 1
    assert run(once=False) == 1
    assert len(backend.submissions) == 2


def test_a_job_of_another_backend_is_left_alone(tmp_path):
    clock = Clock()
    backend = FakeBackend(clock, lambda _: Plan(1))
    context = build_context(load_scheduled_sweep(tmp_path, LOCAL), clock, backend)
    context.run(clock(), wait=False)
    (run,) = context.state.runs
    assert run.job.backend == "fake"
    context.build_backend = lambda _: Local(tmp_path)
    with pytest.raises(BackendError, match="was started by backend fake"):
        context.tick()


class Taken(FakeBackend):
    """Jobs of a machine that is taken away at the third poll of one."""

    polls = 0

    def poll(self, job):
        self.polls += 1
        if self.polls == 3:
            signal.raise_signal(signal.SIGTERM)
        return super().poll(job)


def test_a_machine_that_is_taken_away(tmp_path, monkeypatch):
    clock = Clock()
    backend = Taken(clock, lambda _: Plan(5), takes_to_stop=timedelta(seconds=1))
    sweep = load_scheduled_sweep(tmp_path, LOCAL)
    monkeypatch.setattr(schedule, "read_clock", clock)
    monkeypatch.setattr(local_jobs, "build_local_here", lambda _: backend)
    sleep = SimpleNamespace(sleep=lambda seconds: clock.advance(seconds=seconds))
    monkeypatch.setattr(scheduler, "time", sleep)
    words = [str(sweep.file), "run", "nightly", "--now", "--wait", "--every", "0.1"]
    with pytest.raises(SystemExit) as caught:
        cli.run_command(schedule.main, [*words, "--here"])
    assert caught.value.code == 128 + signal.SIGTERM
    (job,) = backend.stops
    assert not backend.poll(JobHandle(backend="fake", id=job)).running
    context = SweepScheduler.open(sweep, clock)
    assert context.state.active is not None
    assert not context.state.active.stop_reason
    context.build_backend, context.read_figures = lambda _: backend, lambda *_: RunFigures()
    context.tick()  # the next call
    assert context.state.active.attempt == 2


def test_a_machine_that_is_taken_away_before_anything_runs(tmp_path):
    clock, preempted = Clock(), threading.Event()
    backend = FakeBackend(clock, lambda _: Plan(0, status=2))  # refused: the next attempt waits
    context = build_context(load_scheduled_sweep(tmp_path, LOCAL), clock, backend)
    preempted.set()
    with pytest.raises(KeyboardInterrupt):
        context.run(clock(), wait=True, preempted=preempted)
    assert not backend.stops


def test_a_second_supervisor_waits_until_the_first_has_begun(tmp_path):
    """Otherwise its caller would see a job that did not start, and begin the next attempt."""
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
            assert supervise._take_lock(second, state)
            state.touch()
            assert not supervise._take_lock(second, state)
