"""Runs of a schedule: attempts, budgets, clocks, requests by name, and what the webhook hears."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.outcome import RunFigures, describe_ratio, read_figures
from gdpo_tune.clusters.scheduler import build_scheduled_job
from gdpo_tune.core.errors import BackendError, BackendUnreachableError, UsageError
from gdpo_tune.ledger import Ledger
from tests.support.schedule import FIRST, NIGHTLY, START, Plan, Scene, load_scheduled_sweep
from tests.support.tuning import build_outcome, load_code_spec

GPUS = 'space: search_spaces/gpu.yaml\nschedule: {cron: "0 2 * * *"}\n'
TOLD = NIGHTLY + "notify: {webhook_env: HOOK}\n"
LATER = START + timedelta(hours=3)
BEGUN, AGAIN = "started submitted", "retried submitted"


def play(scene, ticks):
    """Tick at these hours: each has exactly these events."""
    for hour, kinds in ticks.items():
        assert scene.tick_at(hour) == kinds.split(), hour


def wait_for_run(scene, due, during=lambda: None, every=600, **more):
    """Run a due time to its end, with something that happens during every pause."""

    def sleep(seconds):
        scene.clock.advance(seconds=seconds)
        during()

    return scene.context.run(due, wait=True, every=every, sleep=sleep, **more)


def test_a_run_that_fails_is_continued_as_often_as_allowed(tmp_path):
    scene = Scene(tmp_path, a1=Plan(1, -9), a2=Plan(1, None), a3=Plan(1, 1))
    play(scene, {2: BEGUN, 2.5: "", 3: AGAIN, 4: AGAIN, 5: "ended"})
    assert (scene.run.state, scene.run.attempt) == ("failed", 3)
    assert scene.backend.submissions == [f"nightly-20260101T020000Z-a{n}" for n in (1, 2, 3)]
    play(scene, {26: BEGUN})


def test_an_attempt_that_was_refused_waits_before_the_next(tmp_path):
    scene = Scene(tmp_path, a1=Plan(0, 2))
    play(scene, {2: f"{BEGUN} retried", 2.1: "", 2.2: "submitted", 3.5: "ended"})
    assert scene.run.state == "finished"


def test_a_refused_job_counts_as_an_attempt(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {max_attempts: 1}\n")

    def refuse(_):
        raise BackendError("too large")

    scene.backend.submit = refuse
    play(scene, {2: "started ended"})
    assert scene.run.summary == "too large"


def test_a_backend_that_does_not_answer_is_asked_again_within_the_grace(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {missed_grace: 2h}\n")
    scene.backend.down = True
    play(scene, {2: ""})
    assert "down" in str(scene.context.backend_errors[-1])
    play(scene, {4.1: "skipped"})
    for down, ticks in ((False, {5: ""}), (True, {26: ""}), (False, {27: BEGUN})):
        scene.backend.down = down
        play(scene, ticks)


def test_a_month_of_gpu_hours(tmp_path):
    text = GPUS + "budget: {gpu_hours: 40, gpu_hours_per_30d: 100}\n"
    scene, limits = Scene(tmp_path, text, a1=Plan(1, 0, 45)), []
    for day in range(3):
        play(scene, {24 * day + 2: BEGUN})
        limits.append(scene.run.gpu_hours_limit)
        arguments = build_scheduled_job(scene.sweep, scene.run).arguments
        assert f"search.budget.gpu_hours={limits[-1]}" in arguments
        scene.tick_at(24 * day + 4)
    assert limits == [40, 40, 10]
    play(scene, {24 * 3 + 2: "skipped"})
    assert scene.context.run(scene.clock.now, wait=True) == 4
    assert "135 of 100 GPU-hours" in scene.context.events[-1].text
    # the first run ended on day 0 at 04:00; 30 days later its hours do not count any more
    assert scene.tick_at(24 * 30 + 2)[-1] == "skipped"
    assert scene.tick_at(24 * 31 + 2)[-2:] == BEGUN.split()


def test_an_unreadable_ledger_counts_with_all_that_the_run_may_have_spent(tmp_path):
    scene = Scene(tmp_path, GPUS + "budget: {gpu_hours: 40, gpu_hours_per_30d: 100}\n")
    scene.context.read_figures = lambda *_: RunFigures(None, "out of reach")
    for day in range(3):
        scene.tick_at(24 * day + 2)
        scene.tick_at(24 * day + 4)
    assert scene.context.state.sum_gpu_hours(scene.clock.now) == 40 + 40 + 20
    play(scene, {24 * 3 + 2: "skipped"})


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
    play(scene, {2.6: ""})  # and nothing is started twice


def test_a_clock_that_goes_back_starts_no_run_twice(tmp_path):
    scene = Scene(tmp_path)
    play(scene, {2: BEGUN, 4: "ended"})
    play(scene, {1.9: "", 2: "", 2.1: "", 0.5: "", 3: "", 26: BEGUN})
    assert len(scene.backend.jobs) == 2


def test_a_changed_schedule_makes_up_for_no_earlier_time(tmp_path):
    scene, moved = Scene(tmp_path), NIGHTLY.replace("0 2", "0 10")
    play(scene, {2: BEGUN, 4: "ended"})
    for text, ticks in (
        (moved, {12: "seen"}),
        (moved + "enabled: false\n", {13: "seen", 34.5: ""}),
        (moved, {34.6: "seen", 58: BEGUN}),
    ):
        scene.context.sweep = load_scheduled_sweep(tmp_path, text)
        play(scene, ticks)


def test_the_command_of_a_run(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "budget: {trials: 7}\ntracking: http://mlflow:5000\n")
    scene.tick_at(2)
    storage = json.dumps(str(tmp_path / "runs"))
    assert build_scheduled_job(scene.sweep, scene.run).arguments == (
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


# Runs that are started by name, waited for, or stopped with `schedule stop`


def test_a_run_is_stopped_after_max_runtime_and_resumed_by_name(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {max_runtime: 3h}\n", a1=Plan(2, 1), a2=Plan(9))
    play(scene, {2: BEGUN, 4: AGAIN, 5: "stopping", 5.1: "ended"})
    assert (scene.run.state, scene.run.stop_reason) == ("stopped", "max_runtime = 3h is over")
    assert scene.context.run(FIRST, wait=False) == 0
    assert (scene.run.state, scene.run.attempt) == ("running", 3)
    play(scene, {6.2: "ended"})
    assert scene.run.state == "finished"


def test_repeated_requests_for_a_run_by_name_mean_the_same_run(tmp_path):
    scene = Scene(tmp_path)
    scene.clock.now = FIRST + timedelta(minutes=1)
    for _ in range(2):
        context = scene.open_scheduler()
        assert context.choose_due_time(None, now=False) == FIRST
        assert context.run(FIRST, wait=False) == 0
    play(scene, {2.1: "", 4: "ended"})  # and the schedule does not start it again
    assert scene.context.run(FIRST, wait=True) == 0
    assert len(scene.backend.jobs) == 1


@pytest.mark.parametrize(
    ("plan", "status"), [(Plan(2, 0), 0), (Plan(0.4, 1), 1)], ids=["finished", "failed"]
)
def test_waiting_for_a_run_ends_with_its_status(tmp_path, plan, status):
    scene, pauses = Scene(tmp_path, a1=plan, a2=plan, a3=plan), []
    assert wait_for_run(scene, FIRST, lambda: pauses.append(scene.clock.now)) == status
    assert len(pauses) > 6


def test_a_run_is_stopped_while_a_process_waits_for_it(tmp_path):
    scene = Scene(tmp_path, a1=Plan(50))

    def stop_later():
        if scene.clock.now > START + timedelta(hours=2):
            scene.open_scheduler().stop()

    assert wait_for_run(scene, FIRST, stop_later) == 5


def test_a_run_by_name_that_overlaps_is_skipped_or_queued(tmp_path):
    scene = Scene(tmp_path, a1=Plan(5))
    scene.tick_at(2)
    scene.clock.now = LATER
    assert scene.context.run(LATER, wait=True) == 3
    assert scene.run.due == FIRST

    queue = Scene(tmp_path / "queue", NIGHTLY + "policy: {overlap: queue}\n", a1=Plan(5))
    queue.tick_at(2)
    queue.clock.now = LATER
    assert queue.context.run(LATER, wait=False) == 0
    assert queue.context.state.queued == LATER
    play(queue, {7: f"ended {BEGUN}"})
    assert queue.run.due == LATER


def test_a_run_by_name_replaces_another(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {overlap: replace}\n", a1=Plan(5))
    scene.tick_at(2)
    scene.clock.now = LATER
    assert wait_for_run(scene, LATER, every=60) == 0
    assert [run.state for run in scene.context.state.runs] == ["stopped", "finished"]


def test_stop_ends_the_active_run_and_skips_the_queued_one(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {overlap: queue}\n", a1=Plan(100))
    play(scene, {2: BEGUN, 26: "queued"})
    assert scene.context.stop()
    play(scene, {27: "ended"})
    assert scene.run.state == "stopped"
    play(scene, {28: ""})
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


@pytest.mark.parametrize(("policy", "status"), [("queue", 5), ("replace", 3)])
def test_waiting_for_a_queued_run_ends_when_it_is_stopped_or_replaced(tmp_path, policy, status):
    scene = Scene(tmp_path, NIGHTLY + f"policy: {{overlap: {policy}}}\n", a1=Plan(50))
    scene.tick_at(2)
    scene.backend.takes_to_stop = timedelta(hours=5)
    scene.clock.now = LATER
    other, pauses = LATER + timedelta(minutes=1), []

    def skip():
        if not pauses and policy == "queue":
            scene.open_scheduler().stop()
        elif not pauses:
            assert scene.open_scheduler().run(other, wait=False) == 0
        pauses.append(None)

    assert wait_for_run(scene, LATER, skip, every=60) == status
    assert len(pauses) == 1
    context = scene.open_scheduler()
    assert context.state.find_run(LATER) is None
    assert context.state.queued == (None if policy == "queue" else other)


def test_a_time_in_the_future_is_refused(tmp_path):
    scene = Scene(tmp_path)
    soon, later = START + timedelta(minutes=9), START + timedelta(minutes=11)
    assert scene.context.choose_due_time(soon, now=False) == soon  # another clock's now
    with pytest.raises(UsageError, match="that time has not come"):
        scene.context.choose_due_time(later, now=False)


def test_an_active_run_is_waited_for_despite_errors_of_its_backend(tmp_path):
    scene = Scene(tmp_path, a1=Plan(2))
    poll, reported = scene.backend.poll, set()

    def refuse(job):
        if scene.clock.now < START + timedelta(hours=1):
            raise BackendError("Internal error occurred: etcdserver: no leader")
        return poll(job)

    def report(context):
        reported.update(map(str, context.backend_errors))
        context.backend_errors.clear()

    fail = lambda: setattr(scene.backend, "poll", refuse)  # noqa: E731
    assert wait_for_run(scene, FIRST, fail, report=report) == 0
    assert reported == {"Internal error occurred: etcdserver: no leader"}


# The webhook


def test_a_webhook_hears_how_runs_end(tmp_path, hook):
    scene = Scene(tmp_path, TOLD)
    play(scene, {2: BEGUN, 4: "ended sent", 5: ""})
    scene.tick_at(24 * 3 + 12)
    first, skipped = hook.got
    assert first["id"] == "nightly/4"
    assert (first["occasion"], first["run"]) == ("finished", "nightly-20260101T020000Z")
    assert first["text"].startswith("nightly-20260101T020000Z finished. 3 trials, 2 on the front")
    assert (skipped["occasion"], skipped["count"]) == ("skipped", 3)
    assert "3 runs from nightly-20260102T020000Z to nightly-20260104T020000Z" in skipped["text"]


def test_only_wanted_notices_are_sent(tmp_path, hook):
    text = NIGHTLY + "notify: {webhook_env: HOOK, on: [failed, stopped]}\n"
    play(Scene(tmp_path, text), {2: BEGUN, 4: "ended"})
    assert hook.got == []


def test_a_webhook_that_fails_is_tried_again_and_delays_nothing(tmp_path, hook):
    hook.answer = 500
    scene = Scene(tmp_path, TOLD)
    play(scene, {2: BEGUN, 4: "ended not_sent"})
    assert scene.context.events[-1].text == "nightly: HOOK: the webhook answered 500"
    play(scene, {5: ""})  # tried, and known to fail already
    assert len(hook.got) == 2
    hook.answer = 200
    play(scene, {6: "sent"})
    assert {got["id"] for got in hook.got} == {"nightly/4"}


def test_old_notices_are_not_sent(tmp_path, hook):
    hook.answer = 500
    scene = Scene(tmp_path, TOLD)
    play(scene, {2: BEGUN, 4: "ended not_sent"})
    hook.answer = 200
    hook.got.clear()
    scene.tick_at(24 + 4.5)
    assert all(got["id"] != "nightly/4" for got in hook.got)


# The figures of a run from its ledger, and its comparison with the last run

TEXT = 'space: search_spaces/code.yaml\nschedule: {cron: "0 2 * * *"}\n'


@pytest.fixture
def sweep(tmp_path):
    return load_scheduled_sweep(tmp_path, TEXT)


def search(folder, name, shift=0.0, trials=14):
    """Record a run of some trials along a trade-off."""
    spec = load_code_spec(folder, ["search.trials=14"])
    spec = spec.model_copy(update={"name": name, "storage": str(folder / "runs")})
    with Ledger.open(spec) as ledger:
        for number in range(trials):
            weight = {"reward_weights.format": 0.05 + 0.1 * number}
            ledger.start(spec.space.complete_baseline(weight), "search", "startup", seed=number)
            gain = 0.5 * number / trials
            ledger.complete(number, build_outcome(0.2 + gain + shift, 0.7 - gain + shift, 0.5))


def test_figures_of_a_run(tmp_path, sweep):
    search(tmp_path, "nightly-1", trials=5)
    found = read_figures(sweep, "nightly-1", None)
    values = found.details
    assert (values["trials"], values["failed_trials"], values["front"]) == (5, 0, 5)
    assert values["gpu_hours"] == 0.0
    low, high = values["hypervolume_interval"]
    assert 0 < low <= high
    assert "comparison" not in values
    assert found.description.startswith("5 trials, 5 on the front, hypervolume 0.")


@pytest.mark.parametrize(("shift", "verdict"), [(0.25, "better"), (-0.15, "worse"), (0.0, "equal")])
def test_a_run_against_the_last_one(tmp_path, sweep, shift, verdict):
    search(tmp_path, "nightly-1")
    search(tmp_path, "nightly-2", shift)
    figures = read_figures(sweep, "nightly-2", "nightly-1")
    found = figures.details["comparison"]
    assert found["headline"]
    assert (found["with"], found["verdict"]) == ("nightly-1", verdict)
    low, high = found["interval"]
    assert low < found["hypervolume_ratio"] < high
    assert (low > 1) == (verdict == "better")
    assert (high < 1) == (verdict == "worse")
    text = f"Against nightly-1: {verdict}. {found['hypervolume_ratio']:.2f} times its"
    assert text in figures.description


def test_a_run_that_never_began_has_cost_nothing(sweep):
    found = read_figures(sweep, "nightly-1", None)
    assert (found.details, found.description) == ({"gpu_hours": 0.0}, "")


def test_a_ledger_that_cannot_be_read_from_here(tmp_path):
    elsewhere = "backend: {kind: ray-job, address: http://head:8265}\n"
    sweep = load_scheduled_sweep(tmp_path, TEXT + elsewhere)
    found = read_figures(sweep, "nightly-1", None)
    assert list(found.details) == ["unknown"]
    assert "Its result is unknown here: nightly-1: there is no sweep" in found.description
    search(tmp_path, "nightly-2", trials=2)
    found = read_figures(sweep, "nightly-2", "nightly-1")
    assert "there is no sweep" in found.details["comparison"]["unknown"]
    assert "Not compared with nightly-1" in found.description


def test_a_run_that_found_nothing(tmp_path, sweep):
    search(tmp_path, "nightly-1", trials=0)
    search(tmp_path, "nightly-2", trials=3)
    found = read_figures(sweep, "nightly-1", "nightly-2")
    values = found.details
    assert values["front"] == 0
    assert "hypervolume" not in values
    assert found.description.startswith(
        "0 trials, 0 on the front. Not compared with nightly-2: nightly-1 cannot be compared: "
        "no configuration of it has ended yet."
    )


def test_a_ratio_without_a_finite_interval_is_json():
    text, found = describe_ratio(1.5, 1.1, float("inf"))
    assert (found["hypervolume_ratio"], found["interval"]) == (1.5, [1.1, None])
    assert text == " 1.50 times its hypervolume (95 %: 1.10 to any)."
