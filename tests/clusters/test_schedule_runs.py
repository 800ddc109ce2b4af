"""Runs of a schedule: attempts, budgets, clocks, and their commands."""

from __future__ import annotations

import json
from datetime import timedelta

from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.outcome import RunFigures
from gdpo_tune.clusters.scheduler import build_scheduled_job
from gdpo_tune.core.errors import BackendError
from tests.support.schedule import FIRST, NIGHTLY, START, Plan, Scene, load_scheduled_sweep

GPUS = 'space: search_spaces/gpu.yaml\nschedule: {cron: "0 2 * * *"}\n'


def test_a_run_that_fails_is_continued_as_often_as_allowed(tmp_path):
    scene = Scene(tmp_path, a1=Plan(1, -9), a2=Plan(1, None), a3=Plan(1, 1))
    assert scene.tick_at(2) == ["started", "submitted"]
    assert scene.tick_at(2.5) == []
    assert scene.tick_at(3) == ["retried", "submitted"]
    assert scene.tick_at(4) == ["retried", "submitted"]
    assert scene.tick_at(5) == ["ended"]
    assert (scene.run.state, scene.run.attempt) == ("failed", 3)
    assert scene.backend.submissions == [f"nightly-20260101T020000Z-a{n}" for n in (1, 2, 3)]
    assert scene.tick_at(26) == ["started", "submitted"]


def test_an_attempt_that_was_refused_waits_before_the_next(tmp_path):
    scene = Scene(tmp_path, a1=Plan(0, 2))
    assert scene.tick_at(2) == ["started", "submitted", "retried"]
    assert scene.tick_at(2.1) == []
    assert scene.tick_at(2.2) == ["submitted"]
    assert scene.tick_at(3.5) == ["ended"]
    assert scene.run.state == "finished"


def test_a_refused_job_counts_as_an_attempt(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {max_attempts: 1}\n")

    def refuse(_: object) -> None:
        raise BackendError("too large")

    scene.backend.submit = refuse
    assert scene.tick_at(2) == ["started", "ended"]
    assert scene.run.summary == "too large"


def test_a_backend_that_does_not_answer_is_asked_again_within_the_grace(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {missed_grace: 2h}\n")
    scene.backend.down = True
    assert scene.tick_at(2) == []
    assert "down" in str(scene.context.backend_errors[-1])
    assert scene.tick_at(4.1) == ["skipped"]
    scene.backend.down = False
    assert scene.tick_at(5) == []
    scene.backend.down = True
    assert scene.tick_at(26) == []
    scene.backend.down = False
    assert scene.tick_at(27) == ["started", "submitted"]


def test_a_month_of_gpu_hours(tmp_path):
    text = GPUS + "budget: {gpu_hours: 40, gpu_hours_per_30d: 100}\n"
    scene = Scene(tmp_path, text, a1=Plan(1, 0, 45))
    limits = []
    for day in range(3):
        assert scene.tick_at(24 * day + 2) == ["started", "submitted"]
        limits.append(scene.run.gpu_hours_limit)
        arguments = build_scheduled_job(scene.sweep, scene.run).arguments
        assert f"search.budget.gpu_hours={limits[-1]}" in arguments
        scene.tick_at(24 * day + 4)
    assert limits == [40, 40, 10]
    assert scene.tick_at(24 * 3 + 2) == ["skipped"]
    assert scene.context.run(scene.clock.now, wait=True) == 4
    assert "135 of 100 GPU-hours" in scene.context.events[-1].text
    # the first run ended on day 0 at 04:00; 30 days later its hours do not count any more
    assert scene.tick_at(24 * 30 + 2)[-1] == "skipped"
    assert scene.tick_at(24 * 31 + 2)[-2:] == ["started", "submitted"]


def test_an_unreadable_ledger_counts_with_all_that_the_run_may_have_spent(tmp_path):
    scene = Scene(tmp_path, GPUS + "budget: {gpu_hours: 40, gpu_hours_per_30d: 100}\n")
    scene.context.read_figures = lambda *_: RunFigures(None, "out of reach")
    for day in range(3):
        scene.tick_at(24 * day + 2)
        scene.tick_at(24 * day + 4)
    assert scene.context.state.sum_gpu_hours(scene.clock.now) == 40 + 40 + 20
    assert scene.tick_at(24 * 3 + 2) == ["skipped"]


def test_a_changed_schedule_makes_up_for_no_earlier_time(tmp_path):
    scene = Scene(tmp_path)
    scene.tick_at(2)
    scene.tick_at(4)
    scene.context.sweep = load_scheduled_sweep(tmp_path, NIGHTLY.replace("0 2", "0 10"))
    assert scene.tick_at(12) == ["seen"]
    scene.context.sweep = load_scheduled_sweep(
        tmp_path, NIGHTLY.replace("0 2", "0 10") + "enabled: false\n"
    )
    assert scene.tick_at(13) == ["seen"]
    assert scene.tick_at(34.5) == []
    scene.context.sweep = load_scheduled_sweep(tmp_path, NIGHTLY.replace("0 2", "0 10"))
    assert scene.tick_at(34.6) == ["seen"]
    assert scene.tick_at(58) == ["started", "submitted"]


def test_the_command_of_a_run(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "budget: {trials: 7}\ntracking: http://mlflow:5000\n")
    scene.tick_at(2)
    job = build_scheduled_job(scene.sweep, scene.run)
    storage = json.dumps(str(tmp_path / "runs"))
    assert job.arguments == (
        *("search_spaces/code.yaml", "--name", "nightly-20260101T020000Z"),
        *("--set", f"storage={storage}", "--set", 'tracking.uri="http://mlflow:5000"'),
        *("--set", "search.budget.trials=7"),
    )


def test_runs_without_an_experiment_share_one(tmp_path):
    scene = Scene(tmp_path)
    space = tmp_path / "search_spaces" / "code.yaml"
    space.write_text(space.read_text().replace(", experiment: code", ""))
    sweep = load_sweeps(scene.sweep.file).sweeps[0]
    scene.tick_at(2)
    assert build_scheduled_job(sweep, scene.run).arguments[-1] == "tracking.experiment=nightly"


def test_a_resumed_run_gets_the_rest_of_the_budget(tmp_path):
    text = GPUS + "budget: {gpu_hours: 60, gpu_hours_per_30d: 100}\npolicy: {max_attempts: 1}\n"
    scene = Scene(tmp_path, text, a1=Plan(1, 1, 20))
    for day in range(4):
        scene.tick_at(24 * day + 2)
        scene.tick_at(24 * day + 4)
    assert scene.run.gpu_hours_limit == 40  # 60 were spent before it
    assert scene.context.run(FIRST, wait=False) == 0
    first = scene.run
    assert first.gpu_hours_limit == 20 + 20  # what it has spent, and what is left
    assert "search.budget.gpu_hours=40.0" in build_scheduled_job(scene.sweep, first).arguments


def test_hours_recorded_by_a_clock_that_was_ahead_are_spent(tmp_path):
    scene = Scene(tmp_path, GPUS + "budget: {gpu_hours_per_30d: 100}\n", a1=Plan(1, 0, 150))
    scene.tick_at(2)
    scene.tick_at(5)
    assert scene.context.state.sum_gpu_hours(START) == 150
    scene.clock.now = FIRST + timedelta(minutes=30)  # set back
    assert scene.context.run(scene.clock.now, wait=False) == 4
    assert scene.tick_at(2.6) == []  # and nothing is started twice


def test_a_clock_that_goes_back_starts_no_run_twice(tmp_path):
    scene = Scene(tmp_path)
    scene.tick_at(2)
    scene.tick_at(4)
    for hour in (1.9, 2, 2.1, 0.5, 3):
        assert scene.tick_at(hour) == []
    assert scene.tick_at(26) == ["started", "submitted"]
    assert len(scene.backend.jobs) == 2
