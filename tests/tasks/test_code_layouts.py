"""Programs are judged as the data set's own judge does, in the real sandbox."""

import json
import math
import sys

import pytest

from gdpo_tune.core.errors import DataError
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.sandbox import Limits, Result
from gdpo_tune.tasks import execution
from gdpo_tune.tasks.columns import RowError
from gdpo_tune.tasks.dataset import check_data
from gdpo_tune.tasks.execution import (
    build_program_job,
    measure_slowness,
    open_sandbox,
    run_programs,
)
from tests.support.data import read_rows, read_solutions

pytestmark = pytest.mark.integration
SETTINGS = SandboxSettings(cpu_seconds=0.5)


@pytest.fixture(scope="module")
def sandbox():
    with open_sandbox(SETTINGS) as sandbox:
        yield sandbox


@pytest.fixture
def judge(sandbox):
    """Return a function of a problem and a program: the status, and None without a program."""

    def run(problem, program):
        text = f"```python\n{program}\n```"
        [result] = run_programs(sandbox, SETTINGS, [problem], [text])
        return result and result.status

    return run


@pytest.mark.parametrize("layout", ["mbpp", "mbpp_sanitized", "humaneval", "apps", "code_contests"])
def test_every_solution_passes(sandbox, layout):
    problems = [describe_layout(layout).convert(row) for row in read_rows(layout)[:3]]
    texts = [f"```python\n{program}\n```" for program in read_solutions(layout)[:3]]
    results = run_programs(sandbox, SETTINGS, problems, texts)
    assert [result.status for result in results] == ["passed"] * 3


CONTEST = [
    # expected, printed, right? `OutputsMatch` of CodeContests' execution/tester_sandboxer.cc
    ("YES", "Yes", True), ("2 4", "2\n4", True), ("2\n4", "2 4", True), ("1.5", "1.500005", True),
    ("1.5", "1.50002", False), ("1000000", "1000000.000001", True), ("1000000", "1000000.9", False),
    ("2", "2.0", True), ("2", "3", False), ("YES", "NO", False), ("1 2", "12", False),
    ("007", "7", True), ("9007199254740993", "9007199254740992", False), ("nan", "1", False),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "printed", "right"), CONTEST)
def test_printed_output_of_code_contests(judge, expected, printed, right):
    tests = {"input": ["1\n"], "output": [expected]}
    problem = describe_layout("code_contests").convert({"description": "q", "public_tests": tests})
    assert judge(problem, f"print({printed!r})") == ("passed" if right else "failed")


APPS_OUTPUT = [
    # `eval/testing_util.py` of APPS: lines are stripped, blank ones dropped, numbers `np.allclose`.
    ("0.333333333333", "0.333333", True), ("1.0", "1", True), ("2", "2.0", True),
    ("a\n\nb", " a\nb", True),
    ("0.5", "0.51", False), ("YES", "Yes", False), ("1 2", "1\n2", False),
    # It takes these too, which are wrong: words in another order, and nearly the number.
    ("1 2", "2 1", False), ("1000000", "1000001", False),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "printed", "right"), APPS_OUTPUT)
def test_printed_output_of_apps(judge, expected, printed, right):
    tests = json.dumps({"inputs": ["1\n"], "outputs": [expected]})
    problem = describe_layout("apps").convert({"question": "q", "input_output": tests})
    assert judge(problem, f"print({printed!r})") == ("passed" if right else "failed")


def convert_call(arguments, expected, starter=""):
    tests = json.dumps({"fn_name": "f", "inputs": [arguments], "outputs": [expected]})
    row = {"question": "Q", "starter_code": starter, "input_output": tests}
    return describe_layout("apps").convert(row)


CLASS = "class Solution:\n    def f(self, a: List[int]) -> int:\n"
APPS_CALLS = [
    ([[1, 1, 2]], {"1": 2, "2": 1}, "", "def f(a): return {x: a.count(x) for x in a}", True),
    ([[1, 1]], [{"1": 2}], "", "def f(a): return {x: a.count(x) for x in a}", True),
    ([{"1": 2}], 2, "", "def f(d): return d[1]", True),
    ([["a"]], {"a": 1}, "", "def f(a): return {x: a.count(x) for x in a}", True),
    ([[1, 1, 2]], [1], CLASS, f"{CLASS}        return Counter(a).most_common(1)[0][0]", True),
    ([[1, 2]], [3], "def f(a):\n\t", "class Solution:\n    def f(self, a): return sum(a)", True),
    ([[1, 2]], [3], CLASS, "def f(a): return sum(a)", True),
    ([[1, 2]], [3], CLASS, "def f(a): return a", False),
    ([2], [0.1, 0.3], "", "def f(a): return [0.1, 0.1 + 0.2]", True),
    ([2], {"a": 0.3}, "", "def f(a): return {'a': 0.1 + 0.2}", True),
    ([2], 0.3, "", "def f(a): return 0.30001", False),
    ([2], [[1, 2], [3, 4]], "", "def f(a): return [(1, 2), (3, 4)]", True),
    ([2], [1, 2], "", "def f(a): return (1, 2)", True),
    ([2], [1, 2], "", "def f(a): return 1", True),
    ([2], [1, 2], "", "def f(a): return 2", False),
    ([2], "ab", "", "from __future__ import annotations\ndef f(a): return 'ab'", True),
    ([2], [[]], "", "def f(a): return []", True),
]


@pytest.mark.parametrize(("arguments", "expected", "starter", "program", "right"), APPS_CALLS)
def test_results_of_apps(judge, arguments, expected, starter, program, right):
    problem = convert_call(arguments, expected, starter)
    assert judge(problem, program) == ("passed" if right else "failed")


def test_numbers_of_any_length_and_names_that_the_judge_imports(judge):
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        big = str(math.factorial(2000))
    finally:
        sys.set_int_max_str_digits(limit)
    tests = json.dumps({"inputs": ["2000\n"], "outputs": [big]})
    problem = describe_layout("apps").convert({"question": "q", "input_output": tests})
    assert judge(problem, "print(math.factorial(int(input())))") == "passed"
    check = f"def check(candidate):\n    assert str(candidate(2000)) == {big!r}\n"
    row = {"prompt": "def f(n):\n    '''Doc.'''\n", "entry_point": "f", "test": check}
    problem = describe_layout("humaneval").convert(row)
    assert judge(problem, "    import math\n    return math.factorial(n)") == "passed"


METHOD = "from typing import List\n\n\nclass Solution:\n    def f(self, xs: List[int]) -> int:\n"
CHECK = (
    "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate(xs=[]) == 0\n"
)


@pytest.mark.parametrize(
    ("head", "entry"),
    [(METHOD, "f"), (METHOD, "Solution().f"), ("from typing import List\n", "Solution().f")],
)
def test_the_entry_of_humaneval_may_be_a_method(judge, head, entry):
    problem = describe_layout("humaneval").convert(
        {"prompt": head, "entry_point": entry, "test": CHECK}
    )
    assert judge(problem, f"{METHOD}        return sum(xs)") == "passed"
    assert judge(problem, f"{METHOD}        return len(xs)") == "failed"
    if head == METHOD:
        assert judge(problem, "        return sum(xs)") == "passed"


POLYNOMIAL = """import math


def poly(xs: list, x: float):
    return sum([c * math.pow(x, i) for i, c in enumerate(xs)])


def find_zero(xs: list):
    ''' Find x where poly(xs, x) is 0. '''
"""
CHECK_ZERO = """
def check(candidate):
    for xs in ([1, 2], [-6, 3]):
        assert math.fabs(poly(xs, candidate(xs))) < 1e-4
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("    return -xs[0] / xs[1]", "passed"),
        (f"{POLYNOMIAL}    return -xs[0] / xs[1]", "passed"),
        ("    return 1.0", "failed"),
        ("def poly(*a): return 0\ndef find_zero(xs): return 1.0", "failed"),
        ("    poly.__code__ = (lambda *a: 0).__code__\n    return 1.0", "failed"),
    ],
)
def test_a_program_cannot_replace_what_the_prompt_gives_to_its_test(judge, program, status):
    """HumanEval 32, 38 and 50 judge a result by a function of the prompt."""
    row = {"prompt": POLYNOMIAL, "entry_point": "find_zero", "test": CHECK_ZERO}
    assert judge(describe_layout("humaneval").convert(row), program) == status


LINKED = """
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def link(values): return Node(values[0], link(values[1:])) if values else None
def is_same(a, b): return a == b or (a.value == b.value and is_same(a.next, b.next))
"""
LENGTH = "class Solution:\n    def f(self, node): return 1 + self.f(node.next) if node else 0"


def test_a_function_with_a_class_makes_arguments_alone(judge):
    convert = describe_layout("humaneval").convert
    row = {"prompt": LINKED, "entry_point": "Solution().f"}
    test = "def check(candidate):\n    assert candidate(node=link([1, 2])) == 2"
    assert judge(convert({**row, "test": test}), LENGTH) == "passed"
    assert judge(convert({**row, "test": test}), LENGTH.replace("1 +", "2 +")) == "failed"
    test = "def check(candidate):\n    assert is_same(candidate(link([1, 2])), link([2, 1]))"
    with pytest.raises(RowError, match="could replace link, which decides this test"):
        convert({**row, "test": test})
    head = "from math import *\ndef size(x, y): return sqrt(x * x + y * y)\n"
    test = "def check(candidate):\n    assert size(*candidate(5)) == 5"
    with pytest.raises(RowError, match="could replace size"):
        convert({"prompt": head, "entry_point": "Solution().f", "test": test})


def test_a_test_calls_the_function_of_the_program():
    layout = describe_layout("humaneval")
    row = {"prompt": "def pow(x, n):\n    ' p '\n", "entry_point": "pow", "test": CHECK}
    with pytest.raises(RowError, match="pow is the test's or Python's"):
        layout.convert(row)
    row = {"prompt": "def f(x):\n    ' p '\n", "entry_point": "f", "test": f"{CHECK}def f(x): pass"}
    with pytest.raises(RowError, match="f is the test's or Python's"):
        layout.convert(row)


TREE = "class Node:\n    def __init__(self, value):\n        self.value, self.left = value, None\n"
MBPP = [
    (TREE + "def f(n): return 1 + f(n.left) if n else 0", "", "assert f(root) == 2", True),
    (TREE + "def f(n): return 1", "", "assert f(root) == 2", False),
    (TREE + "def f(n): return 2", "", "assert f([Node(1), Node(2)]) == 2 == root.value * 2", True),
    ("def f(x, t): return [e for e in x if not isinstance(e, t)]",
     "-", "assert f((4, 'a'), int) == ['a']", True),
    ("def f(x, g): return g(x)", "-", "assert f([2, 1], sorted) == [1, 2]", True),
    ("class Solution:\n    def f(self, x): return 2 * x", "-", "assert Solution().f(2) == 4", True),
    ("class Solution:\n    def f(self, x): return x", "-", "assert Solution().f(2) == 4", False),
    ("class A:\n    def __init__(self): self.n = 0\n    def up(self): self.n += 1",
     "-", "a = A()\na.up()\na.up()\nassert a.n == 2", True),
    ("class A:\n    def __init__(self): self.is_open, self.label, self.candidate = 1, 2, 3",
     "-", "assert (A().is_open, A().label, A().candidate) == (1, 2, 3)", True),
]  # fmt: skip


@pytest.mark.parametrize(("code", "setup", "test", "right"), MBPP)
def test_tests_of_mbpp_reach_the_classes_of_a_program(judge, code, setup, test, right):
    """MBPP 367 and 927 (setup), 601 (objects as arguments), 533 (types as arguments)."""
    setup = "" if setup else "root = Node(1)\nroot.left = Node(2)"
    row = {"text": "q", "code": code, "test_list": [test], "test_setup_code": setup}
    assert judge(describe_layout("mbpp").convert(row), code) == ("passed" if right else "failed")


ANYTHING = """
class Any(str):
    __slots__ = ()
class Yes:
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a, **k): return True
    def __eq__(self, other): return True
    def __iter__(self): return iter([1])
def f(x): return Yes()
class Solution:
    def f(self, x): return Yes()
"""


@pytest.mark.parametrize(
    "test",
    [
        "f(1) == 2", "f(1).startswith('a')", "f(1).same(2)", "Solution().f(1) == 2",
        "Solution().f(1).startswith('a')", "f(f(1)) == 2", "list(f(1)) == [2]", "not f(1) != 2",
    ],
)  # fmt: skip
def test_what_a_function_returns_answers_no_question_about_itself(judge, test):
    row = {"text": "q", "code": ANYTHING, "test_list": [f"assert {test}"]}
    assert judge(describe_layout("mbpp").convert(row), ANYTHING) in ("failed", "error")


def convert_limited(seconds, count):
    tests = {"input": ["1\n"] * count, "output": ["1"] * count}
    limit = {"seconds": int(seconds), "nanos": int(seconds % 1 * 1e9)}
    row = {"description": "q", "public_tests": tests, "time_limit": limit}
    return describe_layout("code_contests").convert(row)


def test_every_test_has_the_time_that_the_data_set_states(judge, monkeypatch):
    monkeypatch.setattr(execution, "measure_slowness", lambda sandbox: 1.0)
    busy = "import time\nend = time.process_time() + .3\nwhile time.process_time() < end: pass\n"
    assert judge(convert_limited(0, 3), f"{busy}print(1)") == "timeout"
    assert judge(convert_limited(0.6, 3), f"{busy}print(1)") == "passed"
    for endless in ("while True: pass", "import time\ntime.sleep(99)"):
        settings = SandboxSettings(cpu_seconds=0.05, wall_seconds=0.2)
        with open_sandbox(settings) as sandbox:
            text = f"```python\n{endless}\n```"
            [result] = run_programs(sandbox, settings, [convert_limited(0.1, 20)], [text])
        assert result.status == "timeout"
        assert result.cpu_seconds < 20 * 0.1 / 2  # the other tests are not run


def test_limits_are_scaled_and_never_lower_than_the_configured():
    limits = Limits(cpu_seconds=1.0, wall_seconds=4.0)
    slow = build_program_job(convert_limited(2.5, 4), "pass", limits, 2.0).limits
    assert (slow.test_cpu_seconds, slow.cpu_seconds, slow.wall_seconds) == (5.0, 20.0, 80.0)
    fast = build_program_job(convert_limited(0.5, 4), "pass", limits, 1.0).limits
    assert (fast.test_cpu_seconds, fast.cpu_seconds) == (1.0, 4.0)
    assert build_program_job(convert_limited(0, 4), "pass", limits).limits == limits


@pytest.mark.parametrize("time_limit", [{"seconds": "2"}, {"seconds": -1}, "2", {"nanos": 1e99}])
def test_a_time_limit_that_is_none_is_refused(time_limit):
    row = {"description": "q", "public_tests": {"input": ["1"], "output": ["1"]}}
    with pytest.raises(RowError, match="time_limit"):
        describe_layout("code_contests").convert({**row, "time_limit": time_limit})


def test_the_machine_is_measured_once_a_sandbox_against_the_reference():
    class Measured:
        jobs = 0

        def run_batch(self, jobs):
            self.jobs += len(jobs)
            seconds = 3 * execution._REFERENCE_SECONDS
            return [Result("passed", ("passed",), seconds, "")] * len(jobs)

    sandbox = Measured()
    assert measure_slowness(sandbox) == measure_slowness(sandbox) == pytest.approx(3)
    assert sandbox.jobs == 3


PLUS = """import numpy as np

def same(out, exp, atol):
    if out != exp and atol:
        np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp

def check(candidate):
    for inp, exp in zip([[[1.0, 2.0]], [[3.0]]], [1.5000001, 3.0]):
        same(candidate(*inp), exp, 1e-6)
"""


def test_tests_may_import_the_modules_of_the_sandbox():
    """EvalPlus writes rows in HumanEval's columns whose tests import numpy."""
    pytest.importorskip("numpy")
    row = {"prompt": "def f(xs):\n    ''' Mean. '''\n", "entry_point": "f", "test": PLUS}
    problem = describe_layout("humaneval").convert(row)
    assert problem.data["modules"] == ["numpy"]
    settings = SandboxSettings(modules=("numpy",), cpu_seconds=5)
    texts = ["    return sum(xs) / len(xs)", "    return sum(xs)"]
    with open_sandbox(settings) as sandbox:
        results = run_programs(sandbox, settings, [problem] * 2, texts)
    assert [result.status for result in results] == ["passed", "failed"]


@pytest.mark.parametrize(
    ("test", "modules", "fix"),
    [
        (PLUS, (), r"tests import numpy, .* write sandbox: \{modules: \[numpy\]\}$"),
        (PLUS, ("sympy",), r"modules: \[sympy, numpy\]"),
        (
            PLUS.replace("numpy", "no_such.part"),
            (),
            r"\[no_such.part\]\}, and install no_such.part",
        ),
        (PLUS, ("numpy",), None),
        (PLUS.replace("import numpy", "import math"), (), None),
    ],
)
def test_modules_that_tests_need_are_asked_for_before_the_sweep(tmp_path, test, modules, fix):
    head = "def f(xs):\n    ''' Mean {}. '''\n"
    rows = [{"prompt": head.format(n), "entry_point": "f", "test": test} for n in range(60)]
    file = tmp_path / "plus.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = DataSettings(source=str(file), layout="humaneval")
    training = TrainingSettings(train_prompts=2, validation_prompts=2, test_prompts=2)
    if fix is None:
        check_data(data, training, modules)
        return
    with pytest.raises(DataError, match=fix):
        check_data(data, training, modules)
