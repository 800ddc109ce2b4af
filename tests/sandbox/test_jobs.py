import ast
import copy
import math
import subprocess
import sys

import pytest

from gdpo_tune.sandbox import Call, Job, Limits, Result, Stream
from gdpo_tune.sandbox.guest.grading import CandidateReport
from gdpo_tune.sandbox.guest.protocol import ExitStatus
from gdpo_tune.sandbox.jobs import InfraFault, conclude, read_assert
from gdpo_tune.sandbox.local_sandbox import encode_job
from tests.support.tables import read_named, read_table

CALL = Call("f", (), 1)
NAMES = {"CALL": CALL, **{each.__name__: each for each in (Call, Job, Stream, encode_job, math)}}
TABLE = read_table("sandbox_jobs")


@pytest.mark.parametrize("source", TABLE["asserts"])
def test_a_literal_assert_becomes_a_call_and_any_other_needs_the_checker(source):
    function, *values = TABLE["asserts"][source] or [None]
    call = function and Call(function, *map(ast.literal_eval, values))
    assert read_assert(source) == call


@pytest.mark.parametrize("source", TABLE["refused"])
def test_what_is_no_job_is_refused_by_name(source):
    kind, reason = TABLE["refused"][source]
    with pytest.raises({"TypeError": TypeError, "ValueError": ValueError}[kind], match=reason):
        eval(source, NAMES)


CLOCKS = ("cpu_seconds", "wall_seconds", "test_cpu_seconds")
BYTES = ("memory_bytes", "output_bytes")


@pytest.mark.parametrize(
    ("name", "least", "most", "wrong"),
    [
        *((n, 0.01, 86_400, [0, -1, 0.0099, 86_401, 10**400, math.nan, math.inf]) for n in CLOCKS),
        ("memory_bytes", 1 << 26, 1 << 40, [0, -1, (1 << 26) - 1, (1 << 40) + 1, 10**400]),
        ("output_bytes", 1, 1 << 40, [0, -1, (1 << 40) + 1, 10**400]),
    ],
)
def test_limits_have_bounds_and_types(name, least, most, wrong):
    assert Limits(**{name: least})
    assert Limits(**{name: most})
    for value in wrong:
        with pytest.raises(ValueError, match=name):
            Limits(**{name: value})
    for value in (True, "1", None, *([1e9, math.inf] if name in BYTES else [])):
        message = rf"Limits\.{name} must be .*, not {type(value).__name__}"
        with pytest.raises(TypeError, match=message):
            Limits(**{name: value})


def test_jobs_and_results_are_values():
    assert Limits() == Limits(1.0, 4.0, 512 << 20, 1 << 20, 86_400.0)
    made = [Call("f", (1,), 2), Stream("1", "2"), Limits(), Job("", (CALL,))]
    for value in (*made, Result("passed", ("passed",), 0.0, "")):
        assert {value, copy.copy(value)} == {value}


def test_less_memory_than_python_needs_is_refused():
    with pytest.raises(ValueError, match="memory_bytes is 67108863; Python itself needs 67108864"):
        Limits(memory_bytes=(64 << 20) - 1)


def test_tests_may_come_from_whatever_can_be_gone_through():
    calls = [CALL, Call("f", [1], 2)]
    job = Job("", (call for call in calls), asserts=["assert f() == 1"])
    assert job.calls == (CALL, Call("f", (1,), 2))
    assert job.asserts == ("assert f() == 1",)
    calls.clear()
    assert encode_job(0, job).tests == 3


QUIET = ExitStatus(0, False, 0.01, 1 << 24)


@pytest.mark.parametrize(
    ("reported", "more", "ending", "status", "verdicts"), read_named("sandbox_jobs", "endings")
)
def test_report_and_ending_make_a_status(reported, more, ending, status, verdicts):
    report = CandidateReport(started=True, verdicts=reported.split(), **more)
    result = conclude(report, QUIET._replace(**ending), 2, Limits())
    assert (result.status, " ".join(result.verdicts)) == (status, verdicts)
    assert result.passed is (status == "passed")


def test_the_clock_of_a_test_ends_it_where_it_has_one():
    for number in (14, 27):
        ending = QUIET._replace(signal=number)
        report = CandidateReport(started=True, stop="ended")
        assert conclude(report, ending, 1, Limits(test_cpu_seconds=0.5)).status == "timeout"
        assert conclude(report, ending, 1, Limits(test_cpu_seconds=1.0)).status == "crash"


def test_the_sandboxs_own_failures_are_no_verdicts():
    with pytest.raises(InfraFault, match=r"locked.*memory_bytes=536870912"):
        conclude(CandidateReport(started=False), QUIET, 1, Limits())
    ended = CandidateReport(started=True, stop="ended")
    for peak in (1 << 24, (1 << 28) - 1):  # half of the limit says that the kernel did it
        with pytest.raises(InfraFault, match="outside"):
            conclude(ended, ExitStatus(9, False, 0.01, peak), 1, Limits())


@pytest.mark.parametrize(
    ("report", "ending"),
    [({}, {"timed_out": True, "signal": 9}), ({"stop": "overload"}, {})],
    ids=["candidate", "tests"],
)
def test_a_clock_that_ran_out_before_the_start_is_a_timeout(report, ending):
    report = CandidateReport(started=False, **report)
    assert conclude(report, QUIET._replace(**ending), 1, Limits()).status == "timeout"


def test_importing_the_room_loads_nothing_heavy():
    probe = (
        "import sys; from gdpo_tune.sandbox import CodeSandbox, Job, Call, Limits, Result; "
        "heavy = {'torch', 'ray', 'trl', 'numpy', 'optuna', 'pydantic'}; "
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.parametrize(
    ("status", "verdicts", "share", "bug"), read_named("sandbox_jobs", "shares")
)
def test_the_share_of_the_tests_and_what_is_a_bug(status, verdicts, share, bug):
    result = Result(status, tuple(verdicts.split()), 0.0, "")
    assert (result.share, result.has_bug) == (share, bug)
