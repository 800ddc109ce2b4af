"""Results of jobs, from a report about the candidate and the way in which its process ended."""

from __future__ import annotations

from itertools import repeat
from typing import cast

from .inside.candidate_report import CandidateReport
from .inside.frames import Ending
from .jobs import Limits, Result, Status, Verdict

_SIGKILL = 9
_OF_SIGNAL: dict[int, Status] = {_SIGKILL: "memory", 24: "timeout", 25: "output", 31: "violation"}
"""SIGKILL, SIGXCPU, SIGXFSZ and SIGSYS by Linux's numbers, because a service runs on Linux even
where this machine does not."""
_TEST_CLOCKS = (14, 27)
"""SIGALRM and SIGPROF, which end a test that has a time limit of its own."""
_OF_STOP: dict[str, Status] = {
    "output": "output",
    "malformed": "violation",
    "overload": "timeout",
    "ended": "crash",
}


class InfraFault(Exception):
    """A fault of the sandbox itself: there is no verdict, and the job is tried again."""


def conclude(report: CandidateReport, ending: Ending, tests: int, limits: Limits) -> Result:
    """Return the result of a job from the answers of judge and zygote.

    Raises:
        InfraFault: the candidate never started, or was killed from outside.
    """
    # NOTE: a clock that ran out before the start was set too low, for the job or for its tests.
    timed_out = ending.timed_out or report.stop == "overload"
    if not report.started and not timed_out:
        raise InfraFault(
            "the process of the candidate, or of its tests, ended before it was locked: no memory "
            f"on this machine, or too little in {limits}?"
        )
    answered = cast("list[Verdict]", report.verdicts)
    # NOTE: the first test without an answer is an error, and the rest did not run.
    unanswered: tuple[Verdict, ...] = ("error", *repeat("not_run", tests))
    verdicts = (*answered, *unanswered[: tests - len(answered)])
    status = _decide_status(report, ending, verdicts, limits)
    return Result(status, verdicts, ending.cpu_seconds, report.detail)


def _decide_status(
    report: CandidateReport, ending: Ending, verdicts: tuple[Verdict, ...], limits: Limits
) -> Status:
    if ending.timed_out:
        return "timeout"
    if ending.signal:
        # NOTE: a candidate cannot send signals: the kernel was short of memory, or an outsider did.
        if ending.signal == _SIGKILL and ending.peak_bytes < limits.memory_bytes // 2:
            raise InfraFault("the candidate's process was killed from outside")
        if ending.signal in _TEST_CLOCKS and limits.test_cpu_seconds < limits.cpu_seconds:
            return "timeout"
        return _OF_SIGNAL.get(ending.signal, "crash")
    if report.memory:
        return "memory"
    for verdict in verdicts:
        if verdict != "passed":
            first: Status = "failed" if verdict == "failed" else "error"
            return _OF_STOP.get(report.stop or "", first)
    return _OF_STOP.get(report.stop or "", "passed")
