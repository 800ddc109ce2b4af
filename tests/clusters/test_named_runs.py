"""Runs that are started, waited for, or stopped with `schedule stop`."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gdpo_tune.clusters.backends.base import JobStatus
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.clusters.scheduler import SweepScheduler
from gdpo_tune.core.errors import BackendError, BackendUnreachableError, UsageError
from tests.support.schedule import FIRST, NIGHTLY, START, Plan, Scene


def test_a_run_is_stopped_after_max_runtime_and_resumed_by_name(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {max_runtime: 3h}\n", a1=Plan(2, 1), a2=Plan(9))
    scene.tick_at(2)
    scene.tick_at(4)
    assert scene.tick_at(5) == ["stopping"]
    assert scene.tick_at(5.1) == ["ended"]
    assert (scene.run.state, scene.run.stop_reason) == ("stopped", "max_runtime = 3h is over")
    assert scene.context.run(FIRST, wait=False) == 0
    assert (scene.run.state, scene.run.attempt) == ("running", 3)
    assert scene.tick_at(6.2) == ["ended"]
    assert scene.run.state == "finished"


def test_repeated_requests_for_a_run_by_name_mean_the_same_run(tmp_path):
    scene = Scene(tmp_path)
    scene.clock.now = FIRST + timedelta(minutes=1)
    for _ in range(2):
        context = scene.open_scheduler()
        assert context.choose_due_time(None, now=False) == FIRST
        assert context.run(FIRST, wait=False) == 0
    assert scene.tick_at(2.1) == []  # and the schedule does not start it again
    assert scene.tick_at(4) == ["ended"]
    assert scene.context.run(FIRST, wait=True) == 0
    assert len(scene.backend.jobs) == 1


@pytest.mark.parametrize(
    ("plan", "status"), [(Plan(2, 0), 0), (Plan(0.4, 1), 1)], ids=["finished", "failed"]
)
def test_waiting_for_a_run_ends_with_its_status(tmp_path, plan, status):
    scene = Scene(tmp_path, a1=plan, a2=plan, a3=plan)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        scene.clock.advance(seconds=seconds)

    assert scene.context.run(FIRST, wait=True, every=600, sleep=sleep) == status
    assert len(slept) > 6


def test_a_run_is_stopped_while_a_process_waits_for_it(tmp_path):
    scene = Scene(tmp_path, a1=Plan(50))

    def sleep(seconds: float) -> None:
        scene.clock.advance(seconds=seconds)
        if scene.clock.now > START + timedelta(hours=2):
            scene.open_scheduler().stop()

    assert scene.context.run(FIRST, wait=True, every=600, sleep=sleep) == 5


def test_a_run_by_name_that_overlaps_is_skipped_or_queued(tmp_path):
    scene = Scene(tmp_path, a1=Plan(5))
    scene.tick_at(2)
    later = START + timedelta(hours=3)
    scene.clock.now = later
    assert scene.context.run(later, wait=True) == 3
    assert scene.run.due == FIRST

    queue = Scene(tmp_path / "queue", NIGHTLY + "policy: {overlap: queue}\n", a1=Plan(5))
    queue.tick_at(2)
    queue.clock.now = later
    assert queue.context.run(later, wait=False) == 0
    assert queue.context.state.queued == later
    assert queue.tick_at(7) == ["ended", "started", "submitted"]
    assert queue.run.due == later


def test_a_run_by_name_replaces_another(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {overlap: replace}\n", a1=Plan(5))
    scene.tick_at(2)
    later = START + timedelta(hours=3)
    scene.clock.now = later
    sleep = lambda seconds: scene.clock.advance(seconds=seconds)  # noqa: E731
    assert scene.context.run(later, wait=True, every=60, sleep=sleep) == 0
    assert [run.state for run in scene.context.state.runs] == ["stopped", "finished"]


def test_stop_ends_the_active_run_and_skips_the_queued_one(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {overlap: queue}\n", a1=Plan(100))
    scene.tick_at(2)
    assert scene.tick_at(26) == ["queued"]
    assert scene.context.stop()
    assert scene.tick_at(27) == ["ended"]
    assert scene.run.state == "stopped"
    assert scene.tick_at(28) == []
    assert not scene.context.stop()


def test_stop_ends_a_run_that_no_backend_has_yet(tmp_path):
    scene = Scene(tmp_path, a1=Plan(0, 2))
    scene.tick_at(2)
    assert scene.context.stop()
    assert scene.run.state == "stopped"


def test_a_schedule_without_a_past_time(tmp_path):
    scene = Scene(tmp_path, "space: search_spaces/code.yaml\n")
    with pytest.raises(UsageError, match="give --now, or --at TIME"):
        scene.context.choose_due_time(None, now=False)
    assert scene.context.choose_due_time(None, now=True) == START
    assert scene.context.run(START, wait=False) == 0


def test_a_run_by_name_is_refused_while_the_backend_does_not_answer(tmp_path):
    scene = Scene(tmp_path)
    scene.backend.down = True
    with pytest.raises(BackendUnreachableError):
        scene.context.run(FIRST, wait=True)
    assert not scene.context.state.runs


@pytest.mark.parametrize("how", ["stopped with `schedule stop`", "replaced by another"])
def test_waiting_for_a_queued_run_ends_when_it_is_skipped(tmp_path, how):
    policy = "queue" if how == "stopped with `schedule stop`" else "replace"
    scene = Scene(tmp_path, NIGHTLY + f"policy: {{overlap: {policy}}}\n", a1=Plan(50))
    scene.tick_at(2)
    scene.backend.takes_to_stop = timedelta(hours=5)
    later = START + timedelta(hours=3)
    scene.clock.now = later
    done: list[None] = []

    def sleep(seconds: float) -> None:
        scene.clock.advance(seconds=seconds)
        if not done:
            other = scene.open_scheduler()
            if policy == "queue":
                other.stop()
            else:
                assert other.run(later + timedelta(minutes=1), wait=False) == 0
        done.append(None)

    status = scene.context.run(later, wait=True, every=60, sleep=sleep)
    assert status == (5 if policy == "queue" else 3)
    assert len(done) == 1
    context = scene.open_scheduler()
    assert context.state.find_run(later) is None
    assert context.state.queued == (None if policy == "queue" else later + timedelta(minutes=1))


def test_a_time_in_the_future_is_refused(tmp_path):
    scene = Scene(tmp_path)
    soon, later = START + timedelta(minutes=9), START + timedelta(minutes=11)
    assert scene.context.choose_due_time(soon, now=False) == soon  # another clock's now
    with pytest.raises(UsageError, match="that time has not come"):
        scene.context.choose_due_time(later, now=False)


def test_an_active_run_is_waited_for_despite_errors_of_its_backend(tmp_path):
    scene = Scene(tmp_path, a1=Plan(2))
    poll, reported = scene.backend.poll, list[str]()

    def refuse(job: JobHandle) -> JobStatus:
        if scene.clock.now < START + timedelta(hours=1):
            raise BackendError("Internal error occurred: etcdserver: no leader")
        return poll(job)

    def sleep(seconds: float) -> None:
        scene.backend.poll = refuse
        scene.clock.advance(seconds=seconds)

    def report(context: SweepScheduler) -> None:
        reported.extend(map(str, context.backend_errors))
        context.backend_errors.clear()

    assert scene.context.run(FIRST, wait=True, every=600, report=report, sleep=sleep) == 0
    assert set(reported) == {"Internal error occurred: etcdserver: no leader"}
