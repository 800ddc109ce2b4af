import math
import signal
import subprocess
import sys

import pytest

from gdpo_tune.sandbox import Call, Job, Limits, Result, Stream
from gdpo_tune.sandbox.guest.grading import CandidateReport
from gdpo_tune.sandbox.guest.protocol import ExitStatus
from gdpo_tune.sandbox.jobs import InfraFault, conclude, read_assert
from gdpo_tune.sandbox.local_sandbox import encode_job


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("assert f(1, 'a') == [2]", Call("f", (1, "a"), [2])),
        ("assert {1: -2} == g()", Call("g", (), {1: -2})),
        ("assert f((1, {2}), None) == 1.5, 'message'", Call("f", ((1, {2}), None), 1.5)),
    ],
)
def test_a_literal_assert_becomes_a_call(source, call):
    assert read_assert(source) == call


@pytest.mark.parametrize(
    "source",
    [
        "assert f(1) is True", "assert not f(1)", "assert f(x) == 1", "assert f(k=1) == 1",
        "assert f(1) == g(1)", "assert f(1) == 1 == 1", "x = 1\nassert f(1) == 1",
        "assert abs(f(1) - 2) < 1e-6", "assert m.f(1) == 1", "assert f(*[1]) == 1",
        "assert f(...) == 1", "if f(1) != 2: raise AssertionError",
    ],
)  # fmt: skip
def test_any_other_assert_needs_the_checker(source):
    assert read_assert(source) is None


@pytest.mark.parametrize("source", ["", "pass", "f(1)", "f(1) == 2", "print('PASSED')"])
def test_a_test_that_cannot_fail_is_refused(source):
    with pytest.raises(ValueError, match="can fail"):
        encode_job(0, Job("def f(x): return x", asserts=(source,)))


def test_a_test_that_is_no_python_is_refused():
    with pytest.raises(ValueError, match="not Python"):
        encode_job(0, Job("", asserts=("assert f(1 ==",)))


CLOCKS = ("cpu_seconds", "wall_seconds")
BYTES = ("memory_bytes", "output_bytes")


@pytest.mark.parametrize(
    ("name", "least", "most", "wrong"),
    [
        *(
            (name, 0.01, 86_400, [0, -1, 0.0099, 86_401, 10**400, math.nan, math.inf])
            for name in CLOCKS
        ),
        *((name, 1 << 26, 1 << 40, [0, -1, (1 << 40) + 1, 10**400]) for name in BYTES),
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


CALL = Call("f", (), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Call(len, (), 1), r"Call\.function must be str, not builtin_function"),
        (lambda: Call("f", "ab", 1), r"Call\.args must be tuple or list, not str"),
        (lambda: Stream(b"1", "1"), r"Stream\.stdin must be str, not bytes"),
        (lambda: Stream("1", 1), r"Stream\.expected must be str, not int"),
        (lambda: Stream("1", "1", "0"), r"Stream\.tolerance must be float or int, not str"),
        (lambda: Job(None, (CALL,)), r"Job\.code must be str, not NoneType"),
        (lambda: Job("", (CALL,), seed=True), r"Job\.seed must be int, not bool"),
        (lambda: Job("", (CALL,), limits={}), r"Job\.limits must be Limits, not dict"),
        (lambda: Job("", (CALL, ("f", (), 1))), r"Job\.calls\[1\] must be Call, not tuple"),
        (lambda: Job("", asserts="assert f() == 1"), r"Job\.asserts must hold tests, not be one"),
        (lambda: Job("", asserts=(CALL,)), r"Job\.asserts\[0\] must be str, not Call"),
        (lambda: Job("", streams=(("1", "1"),)), r"Job\.streams\[0\] must be Stream, not tuple"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_tests_may_come_from_whatever_can_be_gone_through():
    calls = [CALL, Call("f", [1], 2)]
    job = Job("", (call for call in calls), asserts=["assert f() == 1"])
    assert job.calls == (CALL, Call("f", (1,), 2))
    assert job.asserts == ("assert f() == 1",)
    calls.clear()
    assert encode_job(0, job).tests == 3


@pytest.mark.parametrize("name", ["calls", "asserts", "streams"])
def test_no_tests_are_none_however_they_are_given(name):
    with pytest.raises(ValueError, match="without a test"):
        Job("", **{name: (test for test in ())})


def test_a_refusal_names_the_test():
    job = Job("", (CALL, Call("f", (object(),), 1)))
    with pytest.raises(TypeError, match=r"test 1: .*object"):
        encode_job(7, job)
    with pytest.raises(ValueError, match=r"test 1: .*not Python"):
        encode_job(7, Job("", (CALL,), ("assert f(",)))


def test_less_memory_than_python_needs_is_refused():
    assert Limits(memory_bytes=64 << 20)
    with pytest.raises(ValueError, match="memory_bytes is 67108863; Python itself needs 67108864"):
        Limits(memory_bytes=(64 << 20) - 1)


QUIET = ExitStatus(0, False, 0.01, 1 << 24)


@pytest.mark.parametrize(
    ("report", "ending", "status", "verdicts"),
    [
        ({"verdicts": ["passed", "passed"]}, {}, "passed", ("passed", "passed")),
        ({"verdicts": ["passed", "failed"]}, {}, "failed", ("passed", "failed")),
        ({"verdicts": ["error", "failed"]}, {}, "error", ("error", "failed")),
        ({"verdicts": ["passed"]}, {"timed_out": True, "signal": 9}, "timeout",
         ("passed", "error")),
        ({"verdicts": ["passed", "passed"]}, {"signal": 9, "timed_out": True}, "timeout",
         ("passed", "passed")),
        ({"stop": "ended"}, {"signal": signal.SIGSYS}, "violation", ("error", "not_run")),
        ({"stop": "ended"}, {"signal": signal.SIGSEGV}, "crash", ("error", "not_run")),
        ({"stop": "ended"}, {"signal": signal.SIGXFSZ}, "output", ("error", "not_run")),
        ({"stop": "ended"}, {"signal": 9, "peak_bytes": 400 << 20}, "memory", ("error", "not_run")),
        ({"stop": "ended"}, {}, "crash", ("error", "not_run")),
        ({"stop": "load"}, {}, "error", ("error", "not_run")),
        ({"stop": "load", "memory": True}, {}, "memory", ("error", "not_run")),
        ({"stop": "output"}, {}, "output", ("error", "not_run")),
        ({"stop": "malformed"}, {}, "violation", ("error", "not_run")),
        ({"stop": "overload"}, {}, "timeout", ("error", "not_run")),
        ({"verdicts": ["passed", "error"], "memory": True}, {}, "memory", ("passed", "error")),
        # A death after the last answer is a death all the same.
        ({"verdicts": ["passed", "passed"]}, {"signal": signal.SIGSYS}, "violation",
         ("passed", "passed")),
    ],
)  # fmt: skip
def test_report_and_ending_make_a_status(report, ending, status, verdicts):
    report = CandidateReport(started=True, **report)
    result = conclude(report, QUIET._replace(**ending), 2, Limits())
    assert (result.status, result.verdicts) == (status, verdicts)
    assert result.passed is (status == "passed")


def test_the_sandboxs_own_failures_are_no_verdicts():
    with pytest.raises(InfraFault, match=r"locked.*memory_bytes=536870912"):
        conclude(CandidateReport(started=False), QUIET, 1, Limits())
    with pytest.raises(InfraFault, match="outside"):
        conclude(
            CandidateReport(started=True, stop="ended"),
            ExitStatus(9, False, 0.01, 1 << 24),
            1,
            Limits(),
        )


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


PASSED, FAILED, ERROR = "passed", "failed", "error"


@pytest.mark.parametrize(
    ("status", "verdicts", "share", "bug"),
    [
        ("passed", (PASSED, PASSED), 1, False),
        ("failed", (PASSED, FAILED, PASSED, PASSED), 0.75, False),
        ("failed", (FAILED, ERROR, PASSED, FAILED), 0.25, True),
        ("error", (ERROR, PASSED), 0.5, True),
        ("timeout", (PASSED, ERROR, "not_run", "not_run"), 0.25, True),
        ("crash", (PASSED, PASSED, PASSED, PASSED), 0.75, True),
        ("violation", (PASSED, PASSED, PASSED, ERROR), 0, True),
    ],
)
def test_the_share_of_the_tests_and_what_is_a_bug(status, verdicts, share, bug):
    result = Result(status, verdicts, 0.0, "")
    assert (result.share, result.has_bug) == (share, bug)
