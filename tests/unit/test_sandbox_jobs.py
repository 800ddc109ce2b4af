import math
import signal
import subprocess
import sys

import pytest

from gdpo_tune.sandbox import Call, Job, Limits
from gdpo_tune.sandbox.asserts import read_assert
from gdpo_tune.sandbox.inside.supervision import Allowance, Ending
from gdpo_tune.sandbox.verdicts import Infra, conclude
from gdpo_tune.sandbox.worker import prepare


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
        prepare(0, Job("def f(x): return x", asserts=(source,)))


def test_a_test_that_is_no_python_is_refused():
    with pytest.raises(ValueError, match="no Python"):
        prepare(0, Job("", asserts=("assert f(1 ==",)))


def test_a_job_without_tests_is_refused():
    with pytest.raises(ValueError, match="without a test"):
        Job("def f(): pass")


@pytest.mark.parametrize("name", ["cpu_seconds", "wall_seconds", "memory_bytes", "output_bytes"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_limits_are_positive_numbers(name, value):
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})


def test_a_value_that_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="object"):
        prepare(0, Job("", (Call("f", (object(),), 1),)))


def test_requests_survive_packing():
    allowance = Allowance(0.25, 4.0, 1 << 40)
    assert Allowance.unpack(allowance.pack()) == allowance
    ending = Ending(9, True, 1.5, 1 << 40)
    assert Ending.unpack(ending.pack()) == ending


REPORT = {"started": True, "stop": None, "verdicts": [], "memory": False, "detail": ""}
QUIET = Ending(0, False, 0.01, 1 << 24)


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
    result = conclude(
        {**REPORT, "verdicts": [], **report}, Ending(**{**vars(QUIET), **ending}), 2, Limits()
    )
    assert (result.status, result.verdicts) == (status, verdicts)
    assert result.passed is (status == "passed")


def test_the_sandboxs_own_failures_are_no_verdicts():
    with pytest.raises(Infra, match="locked"):
        conclude({**REPORT, "started": False}, QUIET, 1, Limits())
    with pytest.raises(Infra, match="outside"):
        conclude({**REPORT, "stop": "ended"}, Ending(9, False, 0.01, 1 << 24), 1, Limits())


def test_importing_the_room_loads_nothing_heavy():
    probe = (
        "import sys; from gdpo_tune.sandbox import CodeSandbox, Job, Call, Limits, Result, "
        "SandboxInfo; heavy = {'torch', 'ray', 'trl', 'numpy', 'optuna', 'pydantic'}; "
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
