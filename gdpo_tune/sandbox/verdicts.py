"""Joins the judge's report with how the process ended into one result."""

from __future__ import annotations

import signal
from itertools import repeat
from typing import Any

from .inside.supervision import Ending
from .jobs import Limits, Result, Status, Verdict


class Infra(Exception):
    """The sandbox itself failed, so that there is no verdict: to be tried again."""


def conclude(report: dict[str, Any], ending: Ending, tests: int, limits: Limits) -> Result:
    """Decide what became of a job.

    Args:
        report: the judge's answer, see `inside.judge`.
        ending: the zygote's answer.
        tests: how many tests the job has.
        limits: its limits.

    Raises:
        Infra: the candidate never started, or somebody outside killed it.
    """
    if not report["started"]:
        raise Infra("the candidate's process ended before it was locked")
    verdicts: list[Verdict] = report["verdicts"]
    unanswered: tuple[Verdict, ...] = ("error", *repeat("not_run", tests))
    verdicts.extend(unanswered[: tests - len(verdicts)])
    status = _status(report, ending, tuple(verdicts), limits)
    return Result(status, tuple(verdicts), ending.cpu_seconds, report["detail"])


def _status(
    report: dict[str, Any], ending: Ending, verdicts: tuple[Verdict, ...], limits: Limits
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
    if report["memory"]:
        return "memory"
    if report["stop"] in stopped:
        return stopped[report["stop"]]
    for verdict in verdicts:
        if verdict != "passed":
            return "failed" if verdict == "failed" else "error"
    return "passed"


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
