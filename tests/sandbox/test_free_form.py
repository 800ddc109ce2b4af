"""Tests that are Python: what they see of a candidate, and what they must not see."""

import pytest

from gdpo_tune.sandbox import Call, Job, Limits

pytestmark = pytest.mark.integration


def verdict(sandbox, code, test):
    [result] = sandbox.run_batch([Job(code, asserts=(test,))])
    return result.status


IN_PLACE = {
    "for nothing else": ("def f(x): x.sort()", "f(x)\nassert x == [1, 2, 3]"),
    "and returned": ("def f(x):\n    x.sort()\n    return x", "f(x)\nassert x == [1, 2, 3]"),
    "with a count": ("def f(x):\n    x.sort()\n    return 2", "k = f(x)\nassert x[:k] == [1, 2]"),
    "in a function": (
        "def f(x): x.sort()",
        "def check(sort):\n    'Sorts.'\n    sort(x)\n    assert x == [1, 2, 3]\ncheck(f)",
    ),
    "in blocks": (
        "def f(x): x.pop()",
        "for _ in x[:]:\n    try:\n        f(x)\n    finally:\n        k = len(x)\nassert k == 0",
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place_is_seen_by_the_next_statement(sandbox, name):
    code, test = IN_PLACE[name]
    assert verdict(sandbox, code, f"from __future__ import annotations\nx = [3, 1, 2]\n{test}") == (
        "passed"
    )
    assert verdict(sandbox, "def f(x): pass", f"x = [3, 1, 2]\n{test}") != "passed"


def test_a_change_is_seen_by_the_next_test(sandbox):
    tests = ("x = [2, 1]\nassert f(x) is None", "assert x == [1, 2]")
    [result] = sandbox.run_batch([Job("def f(x): x.sort()", asserts=tests)])
    assert result.passed


@pytest.mark.parametrize("test", ["f(x) == sorted(x)", "sorted(x) == f(x)", "f(x) == x[::-1]"])
def test_a_candidate_cannot_change_what_it_is_compared_with(sandbox, test):
    code = "def f(x):\n    x.clear()\n    return []"
    assert verdict(sandbox, code, f"x = [3, 1, 2]\nassert {test}") == "failed"


@pytest.mark.parametrize(
    "test",
    [
        "len(f(1)) == 1", "isinstance(f(1), tuple)", "f(1)[0] == 'object'", "f(1) == f(2)",
        "f(1) in [f(1)]", "'object' in f(1)", "f(1) == f", "list(f(1)) == ['object']",
    ],
)  # fmt: skip
def test_an_object_is_nothing(sandbox, test):
    assert verdict(sandbox, "def f(x): return object()", f"assert {test}") in ("failed", "error")


RAISING = [
    ("UnicodeDecodeError", "b'\\xff'.decode()"),
    ("ValueError", "__import__('json').loads('{')"),
    ("KeyError", "{}['no']"),
    ("OSError", "open('/x')"),
    ("LookupError", "[].pop()"),
    ("ArithmeticError", "raise_(type('Mine', (OverflowError,), {})('no'))"),
    ("UnicodeError", "raise_(UnicodeEncodeError('utf-8', 'x', 0, 1, 'no'))"),
    ("Exception", "raise_(type('Mine', (Exception,), {})('no'))"),
    ("Exception", "raise_(ExceptionGroup('no', [ValueError()]))"),
    ("Exception", "raise_(SystemExit(1))"),
]


@pytest.mark.parametrize(("name", "body"), RAISING)
def test_an_exception_is_caught_as_what_it_is(sandbox, name, body):
    code = f"def raise_(error): raise error\ndef f(): {body}"
    test = f"try:\n    f()\nexcept {name} as e:\n    assert str(e)\nelse:\n    assert False"
    assert verdict(sandbox, code, test) == "passed"
    other = test.replace(f"except {name}", "except ZeroDivisionError")
    assert verdict(sandbox, code, other) == "error"


def test_an_exception_of_the_candidates_own_is_named(sandbox):
    code = "class Mine(ValueError): pass\ndef f(): raise Mine('too small')"
    [result] = sandbox.run_batch([Job(code, asserts=("assert f() > 1",))])
    assert result.untrusted_detail == "Mine: too small"


@pytest.mark.parametrize(
    "kind", ["'nothing'", "'int'", "'SystemExit'", "'open'", "7", "None", "'CandidateGone'"]
)
def test_a_forged_exception_is_a_violation(sandbox, kind):
    code = f"""
import json, os
frame = json.dumps(["raise", "Mine", "x", {kind}]).encode()
def f(x):
    os.write(3, len(frame).to_bytes(4, "little") + frame)
"""
    [result] = sandbox.run_batch([Job(code, asserts=("assert f(1) > 1",))])
    assert result.status == "violation"


@pytest.mark.parametrize(
    "test",
    [
        "for got, want in zip(map(f, [1, 2]), [17.25, 34.5]):\n    assert got == want",
        "assert all(map(lambda case: f(case[0]) == case[1], [(1, 17.25)]))",
        "assert all(map(lambda want: A().n == want, [17.25]))",
        "for got in iter(lambda: f(1), None):\n    assert got == 17.25",
        "assert not list(A())",
    ],
)
def test_an_exception_of_a_call_ends_no_loop_of_a_test(sandbox, test):
    code = """
def f(x): raise StopIteration
class A:
    n = property(f)
    __iter__ = f
"""
    assert verdict(sandbox, code, test) == "error"


@pytest.mark.parametrize("copy", ["copy", "deepcopy"])
def test_an_object_that_stays_there_has_no_copy(sandbox, copy):
    # A test that compares an object with its copy would compare it with itself.
    code = "class A: n = 1\ndef f(a): a.n = 2"
    test = f"import copy\na = A()\nbefore = copy.{copy}(a)\nf(a)\nassert a.n == before.n"
    assert verdict(sandbox, code, test) == "error"


ITEMS = {
    "generator": "for i in range(n): yield i",
    "iterator": "return iter(range(n))",
    "range": "return range(n)",
    "map": "return map(int, '012'[:n])",
    "keys": "return dict.fromkeys(range(n)).keys()",
    "deque": "from collections import deque; return deque(range(n))",
    "class": "return type('Mine', (), {'__iter__': lambda self: iter(range(n))})()",
}


@pytest.mark.parametrize("name", ITEMS)
def test_what_can_be_gone_through_is_gone_through(sandbox, name):
    code = f"def f(n):\n    {ITEMS[name]}"
    assert verdict(sandbox, code, "assert list(f(3)) == [0, 1, 2] and set(f(0)) == set()") == (
        "passed"
    )
    assert verdict(sandbox, code, "assert list(f(3)) == [0, 1]") == "failed"
    assert verdict(sandbox, code, "assert f(3) == [0, 1, 2] or False") == "failed"
    [result] = sandbox.run_batch([Job(code, (Call("f", (3,), [0, 1, 2]),))])
    assert result.status == "failed"


def test_items_come_when_they_are_asked_for(sandbox):
    code = "def f():\n    yield 1\n    yield iter([2])\n    raise ValueError('end')"
    test = """
items = f()
assert next(items) == 1 and list(next(items)) == [2]
try:
    next(items)
except ValueError:
    pass
else:
    assert False
"""
    assert verdict(sandbox, code, test) == "passed"
    endless = "def f():\n    a = 1\n    while True:\n        yield a\n        a *= 2"
    test = "from itertools import islice\nassert list(islice(f(), 5)) == [1, 2, 4, 8, 16]"
    assert verdict(sandbox, endless, test) == "passed"


def test_a_test_of_one_call_may_be_of_a_name_of_pythons(sandbox):
    test = "assert sum(10, 15) == 6"
    assert verdict(sandbox, "def sum(a, b): return 6", test) == "passed"
    assert verdict(sandbox, "", test) == "error"
    assert verdict(sandbox, "", "assert sorted([2, 1]) == [1, 2]") == "passed"
    # Any other test has Python's own: a candidate must not say what `abs` means.
    cheat = "def abs(x): return 0\ndef f(x): return x"
    assert verdict(sandbox, cheat, "assert abs(f(1) - 2) < 1e-6") == "failed"


def test_a_standard_module_needs_no_import(sandbox):
    code = "class math:\n    isclose = staticmethod(lambda *_: True)\ndef f(x): return x / 2"
    assert verdict(sandbox, code, "assert math.isclose(f(1), 0.5)") == "passed"
    assert verdict(sandbox, code, "assert math.isclose(f(1), 0.6)") == "failed"
    assert verdict(sandbox, "", "queue = [1]\nassert queue.pop() == 1") == "passed"
    [result] = sandbox.run_batch([Job("", asserts=("assert asyncio.run(1)",))])
    assert "asyncio" in result.untrusted_detail


def test_a_test_may_print(sandbox):
    assert verdict(sandbox, "def f(x): return x", "print('x' * (1 << 21))\nassert f(1)") == "passed"


@pytest.mark.system
@pytest.mark.parametrize("test", ["while True:\n    assert f(1)", "assert f(1)\nwhile True: pass"])
def test_tests_that_do_not_end_are_a_timeout(sandbox, test):
    # The candidate only waits, and sees its partner die.
    limits = Limits(cpu_seconds=0.3, wall_seconds=60)
    tests = ("assert f(1) > 0", test)
    for _ in range(5):
        [result] = sandbox.run_batch([Job("def f(x): return x", asserts=tests, limits=limits)])
        assert (result.status, result.verdicts) == ("timeout", ("passed", "error"))


@pytest.mark.parametrize(
    "tests", [{"asserts": ("assert f(1) > 0",)}, {"calls": (Call("f", (1,), 1),)}]
)
def test_the_least_memory_is_enough_for_a_verdict(sandbox, tests):
    limits = Limits(memory_bytes=64 << 20)
    codes = ("def f(x): return x", "x = [0] * 10**8\ndef f(x): return x")
    results = sandbox.run_batch([Job(code, **tests, limits=limits) for code in codes])
    assert [result.status for result in results] == ["passed", "memory"]


@pytest.mark.parametrize(
    "answer",
    [
        '{"object": ["x", 5]}', '{"object": ["x"]}', '{"name": "open"}',
        '{"items": [5]}', '{"object": [["x"], "y"]}',
    ],
)  # fmt: skip
def test_a_forged_object_is_a_violation(sandbox, answer):
    code = f"""
import os
frame = b'["value",' + {answer!r}.encode() + b',[1]]'
def F(x):
    os.write(3, len(frame).to_bytes(4, "little") + frame)
f = F
"""
    for name in "fF":
        [result] = sandbox.run_batch([Job(code, asserts=(f"assert {name}(1) in [3]",))])
        assert result.status == "violation", result


def test_an_object_that_claims_another_name_is_used_there_alone(sandbox):
    code = """
import os
frame = b'["value",{"object":["type","eval"]},[1]]'
def F(x):
    os.write(3, len(frame).to_bytes(4, "little") + frame)
    os.read(3, 1 << 16)
    os._exit(3)
"""
    test = (
        "import os\nbefore = os.getpid()\nr = F(1)\nr('__import__(\"os\")._exit(0)')\nassert False"
    )
    [result] = sandbox.run_batch([Job(code, asserts=(test,))])
    assert result.status in ("crash", "failed", "error"), result


def test_a_candidate_that_names_a_variable_like_a_built_in_is_read_as_ever(sandbox):
    code = "next = iter = getattr = setattr = None\nclass A: n = 1\ndef f(x): yield x\n"
    tests = ("assert list(f(2)) == [2]", "a = A()\na.n += 1\nassert a.n == 2")
    [result] = sandbox.run_batch([Job(code, asserts=tests)])
    assert result.status == "passed", result
