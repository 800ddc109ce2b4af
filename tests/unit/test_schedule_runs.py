"""What a schedule does with runs: attempts, stops, runs by name, budgets, and what is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from schedule_support import START, Clock, FakeBackend, MemoryStore, Plan, desk_of, scheduled

from gdpo_tune.clusters import asking, notify
from gdpo_tune.clusters.tick import Desk, job_of, tick
from gdpo_tune.errors import BackendError, BackendUnreachableError, UsageError

NIGHTLY = 'space: search_spaces/code.yaml\nschedule: {cron: "0 2 * * *"}\n'
GPUS = 'space: search_spaces/gpu.yaml\nschedule: {cron: "0 2 * * *"}\n'
FIRST = datetime(2026, 1, 1, 2, tzinfo=UTC)


class Scene:
    """A schedule that was seen at midnight, and is called when the test says so."""

    def __init__(self, folder: Path, text: str = NIGHTLY, **plans: Plan) -> None:
        self.clock = Clock(START)
        self.plans = {name.replace("_", "-"): plan for name, plan in plans.items()}
        self.backend = FakeBackend(self.clock, self.plan)
        self.store = MemoryStore()
        self.folder = folder
        self.sweep = scheduled(folder, text)
        self.desk = self.open()
        tick(self.desk)

    def plan(self, job: str) -> Plan:
        return self.plans.get(job[-2:], Plan(1))

    def open(self) -> Desk:
        return desk_of(self.sweep, self.clock, self.backend, self.store)

    def at(self, hour: float) -> list[str]:
        """Call `tick` so many hours after the start; return what was appended."""
        self.clock.now = START + timedelta(hours=hour)
        self.desk.added.clear()
        tick(self.desk)
        return [event.kind for event in self.desk.added]

    @property
    def run(self):
        return list(self.desk.book.runs.values())[-1]


def test_a_run_that_fails_is_continued_as_often_as_allowed(tmp_path):
    scene = Scene(tmp_path, a1=Plan(1, -9), a2=Plan(1, None), a3=Plan(1, 1))
    assert scene.at(2) == ["started", "submitted"]
    assert scene.at(2.5) == []
    assert scene.at(3) == ["retried", "submitted"]
    assert scene.at(4) == ["retried", "submitted"]
    assert scene.at(5) == ["ended"]
    assert (scene.run.state, scene.run.attempt) == ("failed", 3)
    assert scene.backend.submissions == [f"nightly-20260101T020000Z-a{n}" for n in (1, 2, 3)]
    assert scene.at(26) == ["started", "submitted"]


def test_an_attempt_that_was_refused_waits_before_the_next(tmp_path):
    scene = Scene(tmp_path, a1=Plan(0, 2))
    assert scene.at(2) == ["started", "submitted", "retried"]
    assert scene.at(2.1) == []
    assert scene.at(2.2) == ["submitted"]
    assert scene.at(3.5) == ["ended"]
    assert scene.run.state == "finished"


def test_a_job_that_is_not_taken_counts_as_an_attempt(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {max_attempts: 1}\n")

    def refuse(_: object) -> None:
        raise BackendError("too large")

    scene.backend.submit = refuse
    assert scene.at(2) == ["started", "ended"]
    assert scene.run.end is not None
    assert scene.run.end.about["reason"] == "too large"


def test_a_backend_that_is_away_is_asked_again_until_the_grace_is_over(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {missed_grace: 2h}\n")
    scene.backend.down = True
    assert scene.at(2) == []
    assert "down" in str(scene.desk.trouble[-1])
    assert scene.at(4.1) == ["skipped"]
    scene.backend.down = False
    assert scene.at(5) == []
    scene.backend.down = True
    assert scene.at(26) == []
    scene.backend.down = False
    assert scene.at(27) == ["started", "submitted"]


def test_a_run_is_stopped_after_its_longest_time_and_goes_on_by_name(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {max_runtime: 3h}\n", a1=Plan(2, 1), a2=Plan(9))
    scene.at(2)
    scene.at(4)
    assert scene.at(5) == ["stopping"]
    assert scene.at(5.1) == ["ended"]
    assert (scene.run.state, scene.run.stopping) == ("stopped", "max_runtime = 3h is over")
    assert asking.run(scene.desk, FIRST, wait=False) == 0
    assert (scene.run.state, scene.run.attempt) == ("running", 3)
    assert scene.at(6.2) == ["ended"]
    assert scene.run.state == "finished"


def test_a_run_by_name_is_the_same_however_often_it_is_asked_for(tmp_path):
    scene = Scene(tmp_path)
    scene.clock.now = FIRST + timedelta(minutes=1)
    for _ in range(2):
        desk = scene.open()
        assert asking.time_asked_for(desk, None, now=False) == FIRST
        assert asking.run(desk, FIRST, wait=False) == 0
    scene.desk.refresh()
    assert scene.at(2.1) == []  # and the schedule does not start it again
    assert scene.at(4) == ["ended"]
    assert asking.run(scene.desk, FIRST, wait=True) == 0
    assert len(scene.backend.jobs) == 1


@pytest.mark.parametrize(
    ("plan", "status"), [(Plan(2, 0), 0), (Plan(0.4, 1), 1)], ids=["finished", "failed"]
)
def test_waiting_for_a_run_ends_with_its_status(tmp_path, plan, status):
    scene = Scene(tmp_path, a1=plan, a2=plan, a3=plan)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        scene.clock.pass_by(seconds=seconds)

    assert asking.run(scene.desk, FIRST, wait=True, every=600, sleep=sleep) == status
    assert len(slept) > 6


def test_a_run_that_is_stopped_while_somebody_waits(tmp_path):
    scene = Scene(tmp_path, a1=Plan(50))

    def sleep(seconds: float) -> None:
        scene.clock.pass_by(seconds=seconds)
        if scene.clock.now > START + timedelta(hours=2):
            asking.stop(scene.open())

    assert asking.run(scene.desk, FIRST, wait=True, every=600, sleep=sleep) == 5


def test_a_run_by_name_that_overlaps_is_skipped_or_waits(tmp_path):
    scene = Scene(tmp_path, a1=Plan(5))
    scene.at(2)
    later = START + timedelta(hours=3)
    scene.clock.now = later
    assert asking.run(scene.desk, later, wait=True) == 3
    assert scene.run.tick == FIRST

    queue = Scene(tmp_path, NIGHTLY + "policy: {overlap: queue}\n", a1=Plan(5))
    queue.at(2)
    queue.clock.now = later
    assert asking.run(queue.desk, later, wait=False) == 0
    assert queue.desk.book.queued == later
    assert queue.at(7) == ["ended", "started", "submitted"]
    assert queue.run.tick == later


def test_a_run_by_name_takes_the_place_of_another(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {overlap: replace}\n", a1=Plan(5))
    scene.at(2)
    later = START + timedelta(hours=3)
    scene.clock.now = later
    sleep = lambda seconds: scene.clock.pass_by(seconds=seconds)  # noqa: E731
    assert asking.run(scene.desk, later, wait=True, every=60, sleep=sleep) == 0
    assert [run.state for run in scene.desk.book.runs.values()] == ["stopped", "finished"]


def test_stop_ends_the_run_and_lets_none_that_waits_begin(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "policy: {overlap: queue}\n", a1=Plan(100))
    scene.at(2)
    assert scene.at(26) == ["queued"]
    assert asking.stop(scene.desk)
    assert scene.at(27) == ["ended"]
    assert scene.run.state == "stopped"
    assert scene.at(28) == []
    assert not asking.stop(scene.desk)


def test_stop_reaches_a_run_that_no_backend_has_yet(tmp_path):
    scene = Scene(tmp_path, a1=Plan(0, 2))
    scene.at(2)
    assert asking.stop(scene.desk)
    assert scene.run.state == "stopped"


def test_no_time_has_come(tmp_path):
    scene = Scene(tmp_path, "space: search_spaces/code.yaml\n")
    with pytest.raises(UsageError, match="give --now, or --at TIME"):
        asking.time_asked_for(scene.desk, None, now=False)
    assert asking.time_asked_for(scene.desk, None, now=True) == START
    assert asking.run(scene.desk, START, wait=False) == 0


def test_a_run_by_name_is_refused_while_no_backend_answers(tmp_path):
    scene = Scene(tmp_path)
    scene.backend.down = True
    with pytest.raises(BackendUnreachableError):
        asking.run(scene.desk, FIRST, wait=True)
    assert not scene.desk.book.runs


def test_a_month_of_gpu_hours(tmp_path):
    text = GPUS + "budget: {gpu_hours: 40, gpu_hours_per_30d: 100}\n"
    scene = Scene(tmp_path, text, a1=Plan(1, 0, 45))
    limits = []
    for day in range(3):
        assert scene.at(24 * day + 2) == ["started", "submitted"]
        limits.append(scene.run.gpu_hours_limit)
        overrides = job_of(scene.sweep, scene.run).arguments
        assert f"search.budget.gpu_hours={limits[-1]}" in overrides
        scene.at(24 * day + 4)
    assert limits == [40, 40, 10]
    assert scene.at(24 * 3 + 2) == ["skipped"]
    assert asking.run(scene.desk, scene.clock.now, wait=True) == 4
    assert "135 of 100 GPU-hours" in notify.words("nightly", scene.desk.added[-1])
    # the first run ended on day 0 at 04:00; 30 days later its hours do not count any more
    assert scene.at(24 * 30 + 2)[-1] == "skipped"
    assert scene.at(24 * 31 + 2)[-2:] == ["started", "submitted"]


def test_a_ledger_that_nobody_can_read_counts_with_all_that_it_may_have_cost(tmp_path):
    scene = Scene(tmp_path, GPUS + "budget: {gpu_hours: 40, gpu_hours_per_30d: 100}\n")
    scene.desk.figures = lambda *_: {"unknown": "out of reach"}
    for day in range(3):
        scene.at(24 * day + 2)
        scene.at(24 * day + 4)
    assert scene.desk.book.spent_until(scene.clock.now) == 40 + 40 + 20
    assert scene.at(24 * 3 + 2) == ["skipped"]


def test_a_schedule_that_changes_owes_nothing_for_the_time_before(tmp_path):
    scene = Scene(tmp_path)
    scene.at(2)
    scene.at(4)
    scene.desk.sweep = scheduled(tmp_path, NIGHTLY.replace("0 2", "0 10"))
    assert scene.at(12) == ["seen"]
    scene.desk.sweep = scheduled(tmp_path, NIGHTLY.replace("0 2", "0 10") + "enabled: false\n")
    assert scene.at(13) == ["seen"]
    assert scene.at(34.5) == []
    scene.desk.sweep = scheduled(tmp_path, NIGHTLY.replace("0 2", "0 10"))
    assert scene.at(34.6) == ["seen"]
    assert scene.at(58) == ["started", "submitted"]


def test_the_command_of_a_run(tmp_path):
    scene = Scene(tmp_path, NIGHTLY + "budget: {trials: 7}\ntracking: http://mlflow:5000\n")
    scene.at(2)
    job = job_of(scene.sweep, scene.run)
    storage = json.dumps(str(tmp_path / "runs"))
    assert job.arguments == (
        *("search_spaces/code.yaml", "--name", "nightly-20260101T020000Z"),
        *("--set", f"storage={storage}", "--set", 'tracking.uri="http://mlflow:5000"'),
        *("--set", "search.budget.trials=7"),
    )


def test_runs_without_an_experiment_of_their_own_share_one(tmp_path):
    scene = Scene(tmp_path)
    space = tmp_path / "search_spaces" / "code.yaml"
    space.write_text(space.read_text().replace(", experiment: code", ""))
    sweep = scheduled.__globals__["load_sweeps"](scene.sweep.file).sweeps[0]
    scene.at(2)
    assert job_of(sweep, scene.run).arguments[-1] == "tracking.experiment=nightly"


class Hook(BaseHTTPRequestHandler):
    """A webhook that keeps what it gets."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        server.got, server.answer = [], 200
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/x?key=secret")
        yield server
        server.shutdown()
        thread.join()


TOLD = NIGHTLY + "notify: {webhook_env: HOOK}\n"


def test_a_webhook_hears_how_runs_end(tmp_path, hook):
    scene = Scene(tmp_path, TOLD)
    scene.at(2)
    assert scene.at(4) == ["ended", "told"]
    assert scene.at(5) == []
    scene.at(24 * 3 + 12)
    first, skipped = hook.got
    assert first["id"] == "nightly/4"
    assert (first["occasion"], first["run"]) == ("finished", "nightly-20260101T020000Z")
    assert first["text"].startswith("nightly-20260101T020000Z finished. 3 trials, 2 on the front")
    assert (skipped["occasion"], skipped["count"]) == ("skipped", 3)
    assert "3 runs from nightly-20260102T020000Z to nightly-20260104T020000Z" in skipped["text"]


def test_only_what_was_asked_for_is_told(tmp_path, hook):
    scene = Scene(tmp_path, NIGHTLY + "notify: {webhook_env: HOOK, on: [failed, stopped]}\n")
    scene.at(2)
    assert scene.at(4) == ["ended"]
    assert hook.got == []


def test_a_webhook_that_fails_is_tried_again_and_holds_nothing_up(tmp_path, hook):
    hook.answer = 500
    scene = Scene(tmp_path, TOLD)
    scene.at(2)
    assert scene.at(4) == ["ended", "untold"]
    assert scene.desk.added[-1].about["why"] == "HOOK: the webhook answered 500"
    assert scene.at(5) == []  # tried, and known to fail already
    assert len(hook.got) == 2
    hook.answer = 200
    assert scene.at(6) == ["told"]
    assert {got["id"] for got in hook.got} == {"nightly/4"}


def test_old_news_are_not_told(tmp_path, hook):
    hook.answer = 500
    scene = Scene(tmp_path, TOLD)
    scene.at(2)
    scene.at(4)
    hook.answer = 200
    hook.got.clear()
    scene.at(24 + 4.5)
    assert all(got["id"] != "nightly/4" for got in hook.got)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "not set"),
        ("http://127.0.0.1:9/x?key=secret", "does not answer"),
        ("secret", "not an address"),
        ("http://[secret", "not an address"),
    ],
)
def test_why_a_webhook_cannot_be_reached(address, problem):
    said = notify.send(address, {})
    assert problem in said
    assert "secret" not in said


def test_a_webhook_that_hangs_is_left_alone(monkeypatch):
    monkeypatch.setattr(notify, "SECONDS", 0.2)
    with HTTPServer(("127.0.0.1", 0), Hook) as server:  # nobody serves
        said = notify.send(f"http://127.0.0.1:{server.server_port}", {})
    assert "does not answer" in said
