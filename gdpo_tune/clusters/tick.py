"""One tick of a schedule: advance the active run, start what is due, send notices.

Each action is recorded before it is done, and backends are idempotent: if the process is killed
between the two, the next tick repeats the action under the same name.
"""

from __future__ import annotations

from gdpo_tune.clusters import schedule_decisions as decisions
from gdpo_tune.clusters.backends.base import JobStatus, ScheduledJob
from gdpo_tune.clusters.load_schedules import ScheduledSweep, list_overrides
from gdpo_tune.clusters.notify import send_notices
from gdpo_tune.clusters.schedule_decisions import ScheduleContext
from gdpo_tune.clusters.schedule_state import ScheduledRun, ScheduleEvent
from gdpo_tune.core.errors import BackendError, BackendUnreachableError

REFUSED = 2
"""Exit status of a sweep that did not start: the next attempt would be refused as well."""


def tick(context: ScheduleContext) -> None:
    """Do everything that is due now."""
    advance_active_run(context)
    try:
        while (event := decisions.next_schedule_event(context)) is not None:
            context.record(event)
            advance_active_run(context)
    except BackendUnreachableError as error:
        context.backend_errors.append(error)
    send_notices(context)


def advance_active_run(context: ScheduleContext) -> None:
    """Advance the active run as far as possible now."""
    try:
        while (run := context.state.active) is not None and _take_next_step(context, run):
            pass
    except BackendUnreachableError as error:
        context.backend_errors.append(error)


def build_job(sweep: ScheduledSweep, run: ScheduledRun) -> ScheduledJob:
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


def _take_next_step(context: ScheduleContext, run: ScheduledRun) -> bool:
    """Do the next thing for the active run; return whether anything changed."""
    now, event = context.clock(), decisions.stop_if_needed(context, run)
    if event is None:
        if run.job is None:
            return _start_attempt(context, run)
        backend = context.backend
        if run.job.backend != backend.kind:
            raise BackendError(
                f"{run.name} was started by backend {run.job.backend}, which the file no longer "
                f"names\n    fix: write kind: {run.job.backend} until that run has ended; "
                "`render --to slurm` and `rayjob` start runs as local ones: call those with --here"
            )
        status = backend.poll(run.job)
        if status.running:
            if run.stop_since is not None:
                backend.stop(run.job, (now - run.stop_since).total_seconds())
            if status.reason == run.unknown:
                return False
            run.unknown = status.reason
            event = ScheduleEvent("asked", now, f"{run.name}: {status.reason or 'it runs'}.")
        else:
            event = _end_attempt(context, run, status)
    context.record(event)
    return True


def _start_attempt(context: ScheduleContext, run: ScheduledRun) -> bool:
    now, attempt = context.clock(), run.attempt
    if run.not_before is not None and now < run.not_before:
        if run.stop_reason:  # otherwise it may have been submitted: found, it is stopped
            context.record(decisions.end_run(context, run, "stopped", run.stop_reason, None))
        return bool(run.stop_reason)
    backend = context.backend
    try:
        job = backend.submit(build_job(context.sweep, run))
    except BackendError as error:
        refusal = JobStatus(running=False, exit_status=REFUSED, reason=str(error))
        context.record(_end_attempt(context, run, refusal))
        return True
    event = ScheduleEvent("submitted", now, f"{run.name} runs, attempt {attempt}.")
    while (run.attempt, run.state) == (attempt, "starting"):
        run.state, run.job = "running", job
        if context.record(event):
            return True
        # another process was first; the job exists, whatever that process has written
        run = context.state.find_run(run.due) or run
    if (run.attempt, run.state) != (attempt, "running"):
        backend.stop(job, 0.0)  # the run has ended meanwhile: no tick polls this job
    return True


def _end_attempt(context: ScheduleContext, run: ScheduledRun, status: JobStatus) -> ScheduleEvent:
    """Decide what follows the end of an attempt: the next one, or the end of the run."""
    if status.exit_status == 0:
        return decisions.end_run(context, run, "finished", "", 0)
    if run.stop_reason:
        return decisions.end_run(context, run, "stopped", run.stop_reason, status.exit_status)
    if run.attempt - run.earlier_attempts < context.sweep.settings.policy.max_attempts:
        refused = status.exit_status == REFUSED
        return decisions.retry_run(run, context.clock(), status.reason, refused=refused)
    return decisions.end_run(context, run, "failed", status.reason, status.exit_status)
