"""Next action of a schedule, decided from its file, its state and the clock.

Every fire time after the last handled one is due. Each is handled once: started, skipped or queued.
If several are due at once, only the last one is started. Each action is recorded before it is done,
and backends are idempotent: after a kill between the two, the next tick repeats the action.

A method that decides something changes the state and returns the event, which `_record` writes.
`tick`, `run` and `stop` hold the lock of the state, so no two processes decide at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from gdpo_tune.clusters.backends.base import Backend, JobStatus, ScheduledJob, build_backend
from gdpo_tune.clusters.load_schedules import ScheduledSweep, list_overrides
from gdpo_tune.clusters.outcome import RunFigures, read_figures
from gdpo_tune.clusters.schedule_spec import format_period
from gdpo_tune.clusters.schedule_state import (
    ACTIVE,
    DAY,
    EndState,
    ScheduledRun,
    ScheduleEvent,
    ScheduleHistory,
    ScheduleState,
)
from gdpo_tune.core.errors import (
    BackendError,
    BackendUnreachableError,
    ExitCode,
    GdpoTuneError,
    UsageError,
)
from gdpo_tune.core.http import post_message

TICK_TOLERANCE = timedelta(minutes=10)
"""Delay allowed under `missed: skip`: `tick` may be called only every few minutes."""
REFUSAL_BACKOFF = timedelta(minutes=10)
"""Pause before the next attempt after a refusal: a server may answer again by then."""
EXIT_STATUS = {
    "finished": ExitCode.DONE,
    "failed": ExitCode.FAILED,
    "skipped": ExitCode.SKIPPED,
    "budget": ExitCode.BUDGET_SPENT,
    "stopped": ExitCode.STOPPED,
}
"""How a run ended, or why there is none -> exit status."""
STOP_REASON = "stopped with `schedule stop`"

Clock = Callable[[], datetime]
"""The time in UTC."""


@dataclass
class SweepScheduler:
    """One schedule: its file, its state, its backend and a clock."""

    sweep: ScheduledSweep
    history: ScheduleHistory
    clock: Clock
    build_backend: Callable[[ScheduledSweep], Backend] = build_backend
    read_figures: Callable[[ScheduledSweep, str, str | None], RunFigures] = read_figures
    events: list[ScheduleEvent] = field(default_factory=list[ScheduleEvent])
    """Changes that this process made."""
    backend_errors: list[GdpoTuneError] = field(default_factory=list[GdpoTuneError])
    """Why something could not be done now: a backend did not answer."""

    @classmethod
    def open(cls, sweep: ScheduledSweep, clock: Clock) -> SweepScheduler:
        """Read the state of a schedule."""
        scheduler = cls(sweep, ScheduleHistory(sweep.state_directory), clock)
        scheduler.history.read()
        return scheduler

    @property
    def state(self) -> ScheduleState:
        """The state as it was last read or written."""
        return self.history.state

    def name_run(self, due: datetime) -> str:
        """Return the name of the run for a time."""
        return f"{self.sweep.name}-{due.astimezone(UTC):%Y%m%dT%H%M%SZ}"

    # what a person or another scheduler calls

    def tick(self) -> None:
        """Do everything that is due now."""
        with self.history.hold():
            self._advance_active_run()
            try:
                while (event := self._next_event()) is not None:
                    self._record(event)
                    self._advance_active_run()
            except BackendUnreachableError as error:
                self.backend_errors.append(error)
            self._send_notices()

    def choose_due_time(self, at: datetime | None, *, now: bool) -> datetime:
        """Return the time of the run to start: a given one, this second, or the last one due.

        With the last one, a call that is repeated on another machine finds the same run.

        Raises:
            UsageError: the time lies in the future, or there is no schedule.
        """
        clock, schedule = self.clock(), self.sweep.settings.schedule
        if at is not None and at - clock > TICK_TOLERANCE:
            # the schedule would start no run for the times before it
            raise UsageError(
                f"--at {at.isoformat()}: that time has not come\n"
                "    fix: give a time in the past, or --now"
            )
        due = at or (clock if now else schedule and schedule.find_last_time(clock))
        if due is None:
            raise UsageError(
                f"{self.sweep.name} has no past time: it has no schedule, or a rare one\n"
                "    fix: give --now, or --at TIME, under which the run is found again"
            )
        return due.replace(microsecond=0)

    def run(
        self,
        due: datetime,
        *,
        wait: bool,
        every: float = 10.0,
        report: Callable[[SweepScheduler], None] = lambda _: None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> int:
        """Run the sweep for a time; return the exit status. Repeating the call changes nothing.

        With `wait` it polls every `every` seconds until the run has ended. `report` is called after
        each poll.

        Raises:
            BackendError, BackendUnreachableError: the backend would not take a job now, or another
                process keeps the state locked.
        """
        since: int | None = None
        once = False
        while True:
            why = ""
            try:
                with self.history.hold():
                    why = self._request_run(due, since, once=once)
                    self._send_notices()
            except (BackendError, BackendUnreachableError) as error:
                if since is None or self.state.active is None:
                    raise
                self.backend_errors.append(error)  # an active run continues nevertheless
            report(self)
            run = self.state.find_run(due)
            if why:
                return EXIT_STATUS.get(why, EXIT_STATUS["skipped"])
            if run is not None and run.state not in ACTIVE and self.state.queued != due:
                return EXIT_STATUS[run.state]
            if not wait:
                return 0
            sleep(every)
            since, once = self.state.number, True

    def stop(self) -> bool:
        """Ask the active run to stop and skip a queued one; return whether a run was active."""
        with self.history.hold():
            queued, run = self.state.queued, self.state.active
            if queued is not None:
                is_manual = self.state.is_queued_manually
                self._record(self._skip([queued], "stopped", STOP_REASON, is_manual=is_manual))
            if run is not None and not run.stop_reason:
                self._record(self._request_stop(run, STOP_REASON))
            self._advance_active_run()
        return run is not None

    def _advance_active_run(self) -> None:
        """Advance the active run as far as possible now."""
        try:
            while (run := self.state.active) is not None and self._take_next_step(run):
                pass
        except BackendUnreachableError as error:
            self.backend_errors.append(error)

    def _send_notices(self) -> None:
        """POST every wanted notice of the last 24 hours that was not sent yet; record the result.

        A process that is killed in between sends one again, which a receiver recognises by its
        `id`. After a failure the others wait for the next tick, so a webhook delays it only once.
        """
        settings, name = self.sweep.settings.notify, self.sweep.name
        if settings is None:
            return
        for notice in self.state.notices:
            now = self.clock()
            is_wanted = notice.occasion in settings.on and now - notice.at <= DAY
            if not is_wanted or notice.delivery == "sent":
                continue
            message = {
                "id": f"{name}/{notice.number}",
                "sweep": name,
                "occasion": notice.occasion,
                "at": notice.at.isoformat(),
                "text": notice.text,
                "storage": self.sweep.storage,
                **notice.details,
            }
            problem = post_message(os.environ.get(settings.webhook_env, ""), message)
            if problem and notice.delivery == "failed":
                return
            notice.delivery = "failed" if problem else "sent"
            text = f"{name}: {settings.webhook_env}: {problem}" if problem else ""
            self._record(ScheduleEvent("not_sent" if problem else "sent", now, text))
            if problem:
                return

    def _record(self, event: ScheduleEvent) -> None:
        self.history.save()
        self.events.append(event)

    # which run is next

    def _next_event(self) -> ScheduleEvent | None:
        sweep, state, now = self.sweep, self.state, self.clock()
        if (state.schedule or "") != sweep.active_schedule:
            state.schedule, state.since = sweep.active_schedule, now
            return ScheduleEvent("seen", now)
        if state.queued is not None:
            queued, is_manual = state.queued, state.is_queued_manually
            if not sweep.settings.enabled:
                reason = "the schedule was disabled"
                return self._skip([queued], "disabled", reason, is_manual=is_manual)
            if state.active is None:
                return self._begin(queued, is_manual=is_manual)
        schedule, policy, start = sweep.settings.schedule, sweep.settings.policy, state.due_after
        if schedule is None or not sweep.settings.enabled or start is None:
            return None
        due = schedule.list_times(start, now)
        named = {run.due for run in state.runs if run.is_manual} if due else set[datetime]()
        due = [time for time in due if time not in named]
        covered = [time for time in due if named and time < max(named)]
        if covered:
            return self._skip(covered, "missed", "a later run was started with `schedule run`")
        if not due:
            return None
        *earlier, latest = due
        runs_late = policy.missed == "run_once"
        grace = timedelta(seconds=policy.missed_grace) if runs_late else TICK_TOLERANCE
        if now - latest > grace:
            late, allowed = (format_period(d.total_seconds()) for d in (now - latest, grace))
            return self._skip(due, "missed", f"{late} late, {allowed} allowed")
        if earlier:
            reason = f"{self.name_run(latest)} replaces all of them"
            return self._skip(earlier, "missed", reason)
        if state.active is not None:
            return self._resolve_overlap(state.active, latest)
        return self._begin(latest)

    def _request_run(self, due: datetime, since: int | None, *, once: bool) -> str:
        """Make sure that the run of a time is active, queued or ended.

        Returns:
            Why it was skipped here, or by any process after change number `since`; empty if it was
            not.
        """
        while True:
            self._advance_active_run()
            newer = (n for n in self.state.notices if since is not None and n.number > since)
            skips = (n for n in newer if n.skipped and n.skipped[0] <= due <= n.skipped[1])
            if why := next((notice.why for notice in skips), ""):
                return why
            run, active, queued = self.state.find_run(due), self.state.active, self.state.queued
            has_ended = run is not None and (run.state == "finished" or once)
            if run is not None and (run is active or (has_ended and queued != due)):
                return ""
            if active is None:
                event = self._begin(due, is_manual=True)
            elif queued == due:
                return ""
            else:
                event = self._resolve_overlap(active, due, is_manual=True)
            self._record(event)
            since = self.state.number - 1
            once = once or event.kind in ("started", "retried")

    def _begin(self, due: datetime, *, is_manual: bool = False) -> ScheduleEvent:
        """Start or resume the run of a time; skip it if the 30 days' budget is spent.

        `is_manual`, here and below: `schedule run` starts it, not the schedule. No run is active. A
        backend that would not take a job now raises its error before anything is changed.
        """
        state, now, budget = self.state, self.clock(), self.sweep.settings.budget
        run, limit = state.find_run(due), budget.gpu_hours
        if budget.gpu_hours_per_30d is not None:
            spent = state.sum_gpu_hours(now)
            left = budget.gpu_hours_per_30d - spent
            if left <= 0:
                of = f"{spent:.4g} of {budget.gpu_hours_per_30d:.4g} GPU-hours of 30 days"
                return self._skip([due], "budget", f"{of} are spent", is_manual=is_manual)
            left += run.gpu_hours if run else 0.0  # a resumed run has spent these already
            limit = left if limit is None else min(limit, left)
        self.build_backend(self.sweep).check()
        if state.queued == due:
            state.queued = None
        if not is_manual:
            state.mark_handled(due)
        if run is not None:
            run.began, run.earlier_attempts, run.gpu_hours_limit = now, run.attempt, limit
            state.add_run(run)
            return self._retry(run)
        name, identity = self.name_run(due), self.sweep.spec.compute_identity()
        run = ScheduledRun(name=name, due=due, identity=identity, began=now, is_manual=is_manual)
        run.gpu_hours_limit = limit
        state.add_run(run)
        return ScheduleEvent("started", now, f"{name} is started.")

    def _resolve_overlap(
        self, active: ScheduledRun, due: datetime, *, is_manual: bool = False
    ) -> ScheduleEvent:
        state, policy = self.state, self.sweep.settings.policy.overlap
        if policy == "skip":
            return self._skip([due], "overlap", f"{active.name} is active", is_manual=is_manual)
        if state.queued is not None and policy == "queue":
            reason = f"{self.name_run(state.queued)} is queued already"
            return self._skip([due], "overlap", reason, is_manual=is_manual)
        if state.queued is not None:
            reason, is_manual = f"{self.name_run(due)} replaces it", state.is_queued_manually
            return self._skip([state.queued], "overlap", reason, is_manual=is_manual)
        state.queued, state.is_queued_manually = due, is_manual
        if not is_manual:
            state.mark_handled(due)
        return ScheduleEvent("queued", self.clock(), f"{self.name_run(due)} is queued.")

    def _skip(
        self, times: Sequence[datetime], why: str, reason: str, *, is_manual: bool = False
    ) -> ScheduleEvent:
        """Start no run for some times in order, and add a notice; `why` as `Notice.why`."""
        state, now, first, last = self.state, self.clock(), times[0], times[-1]
        if state.queued in times:
            state.queued = None
        if not is_manual:
            state.mark_handled(last)
        runs = self.name_run(first)
        if len(times) > 1:
            runs = f"{len(times)} runs from {runs} to {self.name_run(last)}"
        text = f"{runs} skipped ({why}): {reason}."
        details = {"first": first.isoformat(), "last": last.isoformat(), "count": len(times)}
        details |= {"why": why, "reason": reason}
        notice = state.add_notice(now, "budget" if why == "budget" else "skipped", text, details)
        notice.skipped, notice.why = (first, last), why
        return ScheduleEvent("skipped", now, text)

    # how the active run goes on

    def _take_next_step(self, run: ScheduledRun) -> bool:
        """Do the next thing for the active run; return whether anything changed."""
        policy, queued = self.sweep.settings.policy, self.state.queued
        longest, reason = policy.max_runtime, ""
        if longest and self.clock() - run.began >= timedelta(seconds=longest):
            reason = f"max_runtime = {format_period(longest)} is over"
        elif queued is not None and policy.overlap == "replace":
            reason = f"{self.name_run(queued)} replaces it"
        if reason and not run.stop_reason:
            self._record(self._request_stop(run, reason))
            return True
        if run.job is None:
            return self._start_attempt(run)
        backend = self.build_backend(self.sweep)
        if run.job.backend != backend.kind:
            raise BackendError(
                f"{run.name} was started by backend {run.job.backend}, which the file no longer "
                f"names\n    fix: write kind: {run.job.backend} until that run has ended"
            )
        status = backend.poll(run.job)
        if not status.running:
            self._record(self._end_attempt(run, status))
            return True
        now = self.clock()
        if run.stop_since is not None:
            backend.stop(run.job, (now - run.stop_since).total_seconds())
        if status.reason == run.state_problem:
            return False
        run.state_problem = status.reason
        text = f"{run.name}: {status.reason or 'it runs'}."
        self._record(ScheduleEvent("state_changed", now, text))
        return True

    def _request_stop(self, run: ScheduledRun, reason: str) -> ScheduleEvent:
        run.stop_reason, run.stop_since = reason, self.clock()
        return ScheduleEvent("stopping", run.stop_since, f"{run.name} is asked to stop: {reason}.")

    def _start_attempt(self, run: ScheduledRun) -> bool:
        now, attempt = self.clock(), run.attempt
        if run.not_before is not None and now < run.not_before:
            if run.stop_reason:  # otherwise it may have been submitted: found, it is stopped
                self._record(self._end(run, "stopped", run.stop_reason, None))
            return bool(run.stop_reason)
        backend = self.build_backend(self.sweep)
        try:
            job = backend.submit(build_scheduled_job(self.sweep, run))
        except BackendError as error:
            refusal = JobStatus(running=False, exit_status=ExitCode.REFUSED, reason=str(error))
            self._record(self._end_attempt(run, refusal))
            return True
        event = ScheduleEvent("submitted", now, f"{run.name} runs, attempt {attempt}.")
        run.state, run.job = "running", job
        self._record(event)
        return True

    def _end_attempt(self, run: ScheduledRun, status: JobStatus) -> ScheduleEvent:
        if status.exit_status == 0:
            return self._end(run, "finished", "", 0)
        if run.stop_reason:
            return self._end(run, "stopped", run.stop_reason, status.exit_status)
        if run.attempt - run.earlier_attempts < self.sweep.settings.policy.max_attempts:
            return self._retry(run, status.reason, refused=status.exit_status == ExitCode.REFUSED)
        return self._end(run, "failed", status.reason, status.exit_status)

    def _retry(
        self, run: ScheduledRun, reason: str = "", *, refused: bool = False
    ) -> ScheduleEvent:
        now = self.clock()
        run.attempt += 1
        run.state, run.job, run.stop_reason, run.stop_since = "starting", None, "", None
        run.state_problem = ""
        run.not_before = now + REFUSAL_BACKOFF if refused else None
        later = f", not before {run.not_before:%FT%TZ}" if run.not_before else ""
        because = f": {reason}" if reason else ""
        text = f"{run.name} gets attempt {run.attempt}{later}{because}."
        return ScheduleEvent("retried", now, text)

    def _end(
        self, run: ScheduledRun, end_state: EndState, reason: str, exit_status: int | None
    ) -> ScheduleEvent:
        """Note the end of the active run with its figures, and add a notice.

        `reason` is empty if it finished; `exit_status` is None if it is unknown.
        """
        figures = RunFigures()
        if run.job or run.attempt > 1:  # otherwise it has never run
            same = (each for each in reversed(self.state.runs) if each.identity == run.identity)
            earlier = next((each.name for each in same if each.state == "finished"), None)
            compared = earlier if end_state == "finished" else None
            figures = self.read_figures(self.sweep, run.name, compared)
        now, hours = self.clock(), figures.gpu_hours
        if hours is None:  # it counts with all that the run may have spent
            hours = run.gpu_hours_limit or 0.0
        run.spent.append((now, max(0.0, hours - run.gpu_hours)))
        run.state, run.state_problem = end_state, ""
        run.summary = ". ".join(filter(None, [reason, figures.description]))
        details: dict[str, Any] = {"run": run.name, "attempt": run.attempt, "state": end_state}
        details |= {"reason": reason} if reason else {}
        details |= {"status": exit_status} if exit_status is not None else {}
        because = f": {reason}" if reason else ""
        text = f"{run.name} {end_state}{because}. {figures.description}".rstrip()
        self.state.add_notice(now, end_state, text, {**details, **figures.details})
        return ScheduleEvent("ended", now, text)


def build_scheduled_job(sweep: ScheduledSweep, run: ScheduledRun) -> ScheduledJob:
    """Build the job of the newest attempt at a run."""
    changes = list(list_overrides(sweep.settings, sweep.root))
    if run.gpu_hours_limit is not None:
        changes.append(f"search.budget.gpu_hours={run.gpu_hours_limit}")
    if sweep.spec.tracking.experiment == sweep.spec.name:
        # without this each run would get an experiment of its own
        changes.append(f"tracking.experiment={sweep.name}")
    words = [word for change in changes for word in ("--set", change)]
    arguments = (sweep.settings.space, "--name", run.name, *words)
    return ScheduledJob(f"{run.name}-a{run.attempt}", run.name, arguments, sweep.root)
