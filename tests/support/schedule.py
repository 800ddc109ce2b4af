"""A clock and a backend under the control of a test, and sweeps to schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

from gdpo_tune.clusters.backends.base import JobStatus, ScheduledJob
from gdpo_tune.clusters.load_schedules import ScheduledSweep, load_sweeps
from gdpo_tune.clusters.outcome import RunFigures
from gdpo_tune.clusters.schedule_state import JobHandle, ScheduledRun, ScheduleHistory
from gdpo_tune.clusters.scheduler import SweepScheduler
from gdpo_tune.core.errors import BackendUnreachableError
from tests.support.paths import ROOT

START = datetime(2026, 1, 1, tzinfo=UTC)


def load_scheduled_sweep(directory: Path, text: str, name: str = "nightly") -> ScheduledSweep:
    """Write a schedule file in a project with the code search space; load its sweep."""
    (directory / "sweeps").mkdir(parents=True, exist_ok=True)
    (directory / "search_spaces").mkdir(exist_ok=True)
    space = (ROOT / "search_spaces" / "code.yaml").read_text()
    (directory / "search_spaces" / "code.yaml").write_text(space)
    (directory / "search_spaces" / "gpu.yaml").write_text(space.replace("gpus: 0", "gpus: 1"))
    path = directory / "sweeps" / f"{name}.yaml"
    path.write_text(text)
    loaded = load_sweeps(path)
    assert loaded.error is None, loaded.error
    return loaded.sweeps[0]


class Clock:
    """A clock that the test sets."""

    def __init__(self, now: datetime = START) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now

    def advance(self, **span: float) -> None:
        self.now += timedelta(**span)


@dataclass
class Plan:
    """Duration, exit status and cost of an attempt."""

    hours: float
    status: int | None = 0
    gpu_hours: float = 0.0


@dataclass
class FakeBackend:
    """Jobs that take as long as planned, by the test's clock."""

    kind: ClassVar[str] = "fake"
    clock: Clock
    plan: Callable[[str], Plan]
    jobs: dict[str, tuple[datetime, Plan]] = field(default_factory=dict[str, Any])
    """Id -> start time and plan."""
    stops: dict[str, datetime] = field(default_factory=dict[str, Any])
    down: bool = False
    submissions: list[str] = field(default_factory=list[str])
    """Every call of `submit`."""
    takes_to_stop: timedelta = timedelta(0)

    def check(self) -> None:
        if self.down:
            raise BackendUnreachableError("the fake backend is down")

    def submit(self, job: ScheduledJob) -> JobHandle:
        self.check()
        self.submissions.append(job.id)
        self.jobs.setdefault(job.id, (self.clock(), self.plan(job.id)))
        return JobHandle(backend=self.kind, id=job.id)

    def compute_end(self, name: str) -> datetime:
        began, plan = self.jobs[name]
        end = began + timedelta(hours=plan.hours)
        return min(end, self.stops[name] + self.takes_to_stop) if name in self.stops else end

    def poll(self, job: JobHandle) -> JobStatus:
        self.check()
        began, plan = self.jobs[job.id]
        if self.clock() < self.compute_end(job.id):
            return JobStatus(running=True)
        if self.compute_end(job.id) < began + timedelta(hours=plan.hours):
            return JobStatus(running=False, exit_status=130, reason="stopped")
        return JobStatus(False, plan.status, "" if plan.status == 0 else "it broke")

    def stop(self, job: JobHandle, waited: float) -> None:
        self.check()
        self.stops.setdefault(job.id, self.clock())

    def sum_gpu_hours(self, run: str) -> float:
        """Return what was spent on a run, over all its attempts."""
        attempts = [
            (name, plan) for name, (_, plan) in self.jobs.items() if name.startswith(f"{run}-a")
        ]
        return sum(plan.gpu_hours for _, plan in attempts)


def build_context(
    sweep: ScheduledSweep,
    clock: Clock,
    backend: FakeBackend,
    history: ScheduleHistory | None = None,
) -> SweepScheduler:
    def figures(sweep: ScheduledSweep, run: str, earlier: str | None) -> RunFigures:
        details = {"trials": 3, "front": 2, "earlier": earlier}
        return RunFigures(backend.sum_gpu_hours(run), "3 trials, 2 on the front.", details)

    context = SweepScheduler(
        sweep,
        history or ScheduleHistory(sweep.state_directory),
        clock,
        build_backend=lambda _: backend,
        read_figures=figures,
    )
    context.history.read()
    return context


NIGHTLY = 'space: search_spaces/code.yaml\nschedule: {cron: "0 2 * * *"}\n'
FIRST = datetime(2026, 1, 1, 2, tzinfo=UTC)
"""The first time of that schedule."""


class Scene:
    """A schedule whose first tick was at midnight; the test calls further ticks."""

    def __init__(self, directory: Path, text: str = NIGHTLY, **plans: Plan) -> None:
        self.clock = Clock(START)
        self.plans = {name.replace("_", "-"): plan for name, plan in plans.items()}
        self.backend = FakeBackend(self.clock, self.get_plan)
        self.directory = directory
        self.sweep = load_scheduled_sweep(directory, text)
        self.context = self.open_scheduler()
        self.context.tick()

    def get_plan(self, job: str) -> Plan:
        return self.plans.get(job[-2:], Plan(1))

    def open_scheduler(self) -> SweepScheduler:
        return build_context(self.sweep, self.clock, self.backend)

    def tick_at(self, hour: float) -> list[str]:
        self.clock.now = START + timedelta(hours=hour)
        self.context.events.clear()
        self.context.tick()
        return [event.kind for event in self.context.events]

    @property
    def run(self) -> ScheduledRun:
        return self.context.state.runs[-1]
