"""Tests that are Python: what they see of a candidate, and what they must not see."""

import pytest

from gdpo_tune.sandbox import Call, Limits
from tests.support.tables import read_named, read_table

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("code", "test", "status"), read_named("sandbox_jobs", "verdicts"))
def test_a_test_has_its_verdict(run, code, test, status):
    assert run(code, test).status == status


@pytest.mark.parametrize(("code", "test"), read_named("sandbox_jobs", "in_place"))
def test_what_is_changed_in_place_is_seen_by_the_next_statement(run, code, test):
    test = f"x = [3, 1, 2]\n{test}"
    assert run(code, f"from __future__ import annotations\n{test}").passed
    assert not run("def f(x): pass", test).passed


def test_a_change_is_seen_by_the_next_test(run):
    assert run("def f(x): x.sort()", "x = [2, 1]\nassert f(x) is None", "assert x == [1, 2]").passed


@pytest.mark.parametrize("test", read_table("sandbox_jobs")["objects"])
def test_an_object_is_nothing(run, test):
    assert run("def f(x): return object()", f"assert {test}").status in ("failed", "error")


@pytest.mark.parametrize(("name", "body"), read_named("sandbox_jobs", "raising"))
def test_an_exception_is_caught_as_what_it_is(run, name, body):
    code = f"def raise_(error): raise error\ndef f(): {body}"
    test = f"try:\n    f()\nexcept {name} as e:\n    assert str(e)\nelse:\n    assert False"
    assert run(code, test).passed
    other = test.replace(f"except {name}", "except ZeroDivisionError")
    assert run(code, other).status == "error"


def test_an_exception_of_the_candidates_own_is_named(run):
    code = "class Mine(ValueError): pass\ndef f(): raise Mine('too small')"
    assert run(code, "assert f() > 1").untrusted_detail == "Mine: too small"
    assert "asyncio" in run("", "assert asyncio.run(1)").untrusted_detail


@pytest.mark.parametrize(
    "kind", ["'nothing'", "'int'", "'SystemExit'", "'open'", "7", "None", "'CandidateGone'"]
)
def test_a_forged_exception_is_a_violation(run, kind):
    code = f"""
import json, os
frame = json.dumps(["raise", "Mine", "x", {kind}]).encode()
def f(x):
    os.write(3, len(frame).to_bytes(4, "little") + frame)
"""
    assert run(code, "assert f(1) > 1").status == "violation"


@pytest.mark.parametrize("test", read_table("sandbox_jobs")["loops"])
def test_an_exception_of_a_call_ends_no_loop_of_a_test(run, test):
    code = "def f(x): raise StopIteration\nclass A:\n    n = property(f)\n    __iter__ = f"
    assert run(code, test).status == "error"


@pytest.mark.parametrize("body", read_named("sandbox_jobs", "items"))
def test_what_can_be_gone_through_is_gone_through(run, body):
    code = f"def f(n):\n    {body}"
    assert run(code, "assert list(f(3)) == [0, 1, 2] and set(f(0)) == set()").passed
    assert run(code, "assert list(f(3)) == [0, 1]").status == "failed"
    assert run(code, "assert f(3) == [0, 1, 2] or False").status == "failed"
    assert run(code, calls=(Call("f", (3,), [0, 1, 2]),)).status == "failed"


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.system)])
@pytest.mark.parametrize("test", ["while True:\n    assert f(1)", "assert f(1)\nwhile True: pass"])
def test_tests_that_do_not_end_are_a_timeout(run, test, times):
    # The candidate only waits, and sees its partner die.
    limits = Limits(cpu_seconds=0.3, wall_seconds=60)
    for _ in range(times):
        result = run("def f(x): return x", "assert f(1) > 0", test, limits=limits)
        assert (result.status, result.verdicts) == ("timeout", ("passed", "error"))


@pytest.mark.parametrize(
    "tests", [{"asserts": ("assert f(1) > 0",)}, {"calls": (Call("f", (1,), 1),)}]
)
def test_the_least_memory_is_enough_for_a_verdict(run, tests):
    asserts, calls = tests.get("asserts", ()), tests.get("calls", ())
    codes = ("def f(x): return x", "x = [0] * 10**8\ndef f(x): return x")
    limits = Limits(memory_bytes=64 << 20)
    results = [run(code, *asserts, calls=calls, limits=limits) for code in codes]
    assert [result.status for result in results] == ["passed", "memory"]


FORGED = """
import os
frame = b'["value",' + {!r}.encode() + b',[1]]'
def F(x):
    os.write(3, len(frame).to_bytes(4, "little") + frame)
    {}
f = F
"""


@pytest.mark.parametrize("answer", read_table("sandbox_jobs")["forged"])
def test_a_forged_object_is_a_violation(run, answer):
    for name in "fF":
        assert run(FORGED.format(answer, ""), f"assert {name}(1) in [3]").status == "violation"


def test_an_object_that_claims_another_name_is_used_there_alone(run):
    code = FORGED.format('{"object":["type","eval"]}', "os.read(3, 1 << 16)\n    os._exit(3)")
    test = "import os\nr = F(1)\nr('__import__(\"os\")._exit(0)')\nassert False"
    assert run(code, test).status in ("crash", "failed", "error")


def test_a_candidate_that_names_a_variable_like_a_built_in_is_read_as_ever(run):
    code = "next = iter = getattr = setattr = None\nclass A: n = 1\ndef f(x): yield x\n"
    assert run(code, "assert list(f(2)) == [2]", "a = A()\na.n += 1\nassert a.n == 2").passed
