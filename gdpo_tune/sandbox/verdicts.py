"""Joins the judge's report with how the process ended into one result."""

from __future__ import annotations

import signal
from itertools import repeat
from typing import TYPE_CHECKING, cast

from .inside.report import Report
from .jobs import Limits, Result, Status, Verdict

if TYPE_CHECKING:
    # What a service answers is concluded on machines that have no processes like ours.
    from .inside.supervision import Ending


class Infra(Exception):
    """The sandbox itself failed, so that there is no verdict: to be tried again."""


def complete(report: Report, tests: int) -> tuple[Verdict, ...]:
    """A verdict a test: the first without an answer is an error, and the rest did not run."""
    verdicts = cast("list[Verdict]", report.verdicts)
    unanswered: tuple[Verdict, ...] = ("error", *repeat("not_run", tests))
    return (*verdicts, *unanswered[: tests - len(verdicts)])


def first_reason(verdicts: tuple[Verdict, ...]) -> Status:
    """Status of a job whose process came to its end by itself."""
    for verdict in verdicts:
        if verdict != "passed":
            return "failed" if verdict == "failed" else "error"
    return "passed"


def conclude(report: Report, ending: Ending, tests: int, limits: Limits) -> Result:
    """Decide what became of a job.

    Args:
        report: the judge's answer, see `inside.judge`.
        ending: the zygote's answer.
        tests: how many tests the job has.
        limits: its limits.

    Raises:
        Infra: the candidate never started, or somebody outside killed it.
    """
    # NOTE: a clock that ran out before is one that was set too low, for its job or for its tests.
    timed_out = ending.timed_out or report.stop == "overload"
    if not report.started and not timed_out:
        raise Infra(
            "the process of the candidate, or of its tests, ended before it was locked: no memory "
            f"on this machine, or too little in {limits}?"
        )
    verdicts = complete(report, tests)
    status = _status(report, ending, verdicts, limits)
    return Result(status, verdicts, ending.cpu_seconds, report.detail)


def _status(
    report: Report, ending: Ending, verdicts: tuple[Verdict, ...], limits: Limits
) -> Status:
    if ending.timed_out:
        return "timeout"
    if ending.signal:
        return _status_of_signal(ending, limits)
    stopped: dict[str | None, Status] = {
        "output": "output",
        "malformed": "violation",
        "overload": "timeout",
        "ended": "crash",
    }
    if report.memory:
        return "memory"
    return stopped.get(report.stop) or first_reason(verdicts)


def _status_of_signal(ending: Ending, limits: Limits) -> Status:
    if ending.signal == signal.SIGSYS:
        return "violation"
    if ending.signal == signal.SIGXFSZ:
        return "output"
    if ending.signal == signal.SIGKILL:
        # A candidate cannot send signals: this was the kernel short of memory, or an outsider.
        if ending.peak_bytes < limits.memory_bytes // 2:
            raise Infra("the candidate's process was killed from outside")
        return "memory"
    return "crash"
