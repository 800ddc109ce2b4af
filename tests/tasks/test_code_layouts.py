"""Programs are judged as the data set's own judge does, in the real sandbox."""

import json
import math
import re
import sys
from dataclasses import replace

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
from tests.support.tables import read_table

pytestmark = pytest.mark.integration
SETTINGS = SandboxSettings(cpu_seconds=0.5)
TABLE = read_table("judged")
TEXTS = TABLE["texts"]
CHECK_ZERO = """
def check(candidate):
    for xs in ([1, 2], [-6, 3]):
        assert math.fabs(poly(xs, candidate(xs))) < 1e-4
"""


def convert(layout, **row):
    return describe_layout(layout).convert(row)


def convert_check(prompt, entry_point, test):
    return convert("humaneval", prompt=prompt, entry_point=entry_point, test=test)


def convert_apps(**tests):
    starter = tests.pop("starter", "")
    return convert("apps", question="q", starter_code=starter, input_output=json.dumps(tests))


def convert_limited(expected, count, seconds=0.0):
    tests = {"input": ["1\n"] * count, "output": [expected] * count}
    limit = {"seconds": int(seconds), "nanos": int(seconds % 1 * 1e9)}
    return convert("code_contests", description="q", public_tests=tests, time_limit=limit)


def convert_call(arguments, expected, starter):
    inputs, outputs = [json.loads(arguments)], [json.loads(expected)]
    return convert_apps(fn_name="f", inputs=inputs, outputs=outputs, starter=starter)


# Data set -> its problem by the facts of a row, and a program that its row may state as right.
PROBLEMS = {
    "code_contests": lambda expected, _: convert_limited(expected, 1),
    "apps": lambda expected, _: convert_apps(inputs=["1\n"], outputs=[expected]),
    "apps_calls": lambda arguments, expected, starter, _: convert_call(
        arguments, expected, fill(starter)
    ),
    "humaneval": lambda _: convert_check(TEXTS["POLYNOMIAL"], "find_zero", CHECK_ZERO),
    "mbpp": lambda setup, test, code: convert(
        "mbpp", text="q", code=code, test_list=[test], test_setup_code=setup
    ),
}


def fill(text):
    """Replace the names in capitals by the texts of the table."""
    return re.sub("CLASS|TREE|POLYNOMIAL|LINKED", lambda name: TEXTS[name[0]], text)


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


def test_problems_of_one_prompt_and_other_tests_are_judged_by_their_own(sandbox):
    row = {"text": "q", "code": "def f(): return 2", "test_setup_code": ""}
    problems = [convert("mbpp", test_list=[f"assert f() == {n}"], **row) for n in (1, 2, 1)]
    same = [replace(problem, prompt="q") for problem in problems]  # that of MBPP has its tests
    results = run_programs(sandbox, SETTINGS, same, ["def f(): return 2"] * 3)
    assert [result.status for result in results] == ["failed", "passed", "failed"]


@pytest.mark.parametrize("layout", ["mbpp", "mbpp_sanitized", "humaneval", "apps", "code_contests"])
def test_every_solution_passes(judge, layout):
    rows, solutions = read_rows(layout)[:3], read_solutions(layout)[:3]
    found = [judge(convert(layout, **row), text) for row, text in zip(rows, solutions, strict=True)]
    assert found == ["passed"] * 3


@pytest.mark.parametrize(
    ("data_set", "facts", "program", "status"),
    [(data_set, *row) for data_set, rows in TABLE["judged"].items() for row in rows],
)
def test_a_program_is_judged_as_its_data_set_does(judge, data_set, facts, program, status):
    program = fill(program)
    assert judge(PROBLEMS[data_set](*facts, program), program) == status


def test_numbers_of_any_length_and_names_that_the_judge_imports(judge):
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        big = str(math.factorial(2000))
    finally:
        sys.set_int_max_str_digits(limit)
    problem = convert_apps(inputs=["2000\n"], outputs=[big])
    assert judge(problem, "print(math.factorial(int(input())))") == "passed"
    check = f"def check(candidate):\n    assert str(candidate(2000)) == {big!r}\n"
    problem = convert_check("def f(n):\n    '''Doc.'''\n", "f", check)
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
    problem = convert_check(head, entry, CHECK)
    assert judge(problem, f"{METHOD}        return sum(xs)") == "passed"
    assert judge(problem, f"{METHOD}        return len(xs)") == "failed"
    if head == METHOD:
        assert judge(problem, "        return sum(xs)") == "passed"


LENGTH = "class Solution:\n    def f(self, node): return 1 + self.f(node.next) if node else 0"


def test_a_function_with_a_class_makes_arguments_alone(judge):
    test = "def check(candidate):\n    assert candidate(node=link([1, 2])) == 2"
    problem = convert_check(TEXTS["LINKED"], "Solution().f", test)
    assert judge(problem, LENGTH) == "passed"
    assert judge(problem, LENGTH.replace("1 +", "2 +")) == "failed"


@pytest.mark.parametrize(("prompt", "entry", "test", "reason"), TABLE["refused"])
def test_a_test_that_a_program_could_decide_is_refused(prompt, entry, test, reason):
    with pytest.raises(RowError, match=reason):
        convert_check(fill(prompt), entry, f"def check(candidate):\n{test}")


@pytest.mark.parametrize("test", TABLE["questions"])
def test_what_a_function_returns_answers_no_question_about_itself(judge, test):
    code = TEXTS["ANYTHING"]
    problem = convert("mbpp", text="q", code=code, test_list=[f"assert {test}"])
    assert judge(problem, code) in ("failed", "error")


def test_every_test_has_the_time_that_the_data_set_states(judge, monkeypatch):
    monkeypatch.setattr(execution, "measure_slowness", lambda sandbox: 1.0)
    busy = "import time\nend = time.process_time() + .3\nwhile time.process_time() < end: pass\n"
    assert judge(convert_limited("1", 3), f"{busy}print(1)") == "timeout"
    assert judge(convert_limited("1", 3, 0.6), f"{busy}print(1)") == "passed"
    settings = SandboxSettings(cpu_seconds=0.05, wall_seconds=0.2)
    with open_sandbox(settings) as sandbox:
        for endless in ("while True: pass", "import time\ntime.sleep(99)"):
            texts = [f"```python\n{endless}\n```"]
            [result] = run_programs(sandbox, settings, [convert_limited("1", 20, 0.1)], texts)
            assert result.status == "timeout"
            assert result.cpu_seconds < 20 * 0.1 / 2  # the other tests are not run


def test_limits_are_scaled_and_never_lower_than_the_configured():
    limits = Limits(cpu_seconds=1.0, wall_seconds=4.0)
    slow = build_program_job(convert_limited("1", 4, 2.5), "pass", limits, 2.0).limits
    assert (slow.test_cpu_seconds, slow.cpu_seconds, slow.wall_seconds) == (5.0, 20.0, 80.0)
    fast = build_program_job(convert_limited("1", 4, 0.5), "pass", limits, 1.0).limits
    assert (fast.test_cpu_seconds, fast.cpu_seconds) == (1.0, 4.0)
    assert build_program_job(convert_limited("1", 4), "pass", limits).limits == limits


@pytest.mark.parametrize("time_limit", [{"seconds": "2"}, {"seconds": -1}, "2", {"nanos": 1e99}])
def test_a_time_limit_that_is_none_is_refused(time_limit):
    tests = {"input": ["1"], "output": ["1"]}
    with pytest.raises(RowError, match="time_limit"):
        convert("code_contests", description="q", public_tests=tests, time_limit=time_limit)


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


PLUS = TEXTS["PLUS"]


def test_tests_may_import_the_modules_of_the_sandbox():
    """EvalPlus writes rows in HumanEval's columns whose tests import numpy."""
    pytest.importorskip("numpy")
    problem = convert_check("def f(xs):\n    ''' Mean. '''\n", "f", PLUS)
    assert problem.data["modules"] == ["numpy"]
    settings = SandboxSettings(modules=("numpy",), cpu_seconds=5)
    texts = ["    return sum(xs) / len(xs)", "    return sum(xs)"]
    with open_sandbox(settings) as sandbox:
        results = run_programs(sandbox, settings, [problem] * 2, texts)
    assert [result.status for result in results] == ["passed", "failed"]


@pytest.mark.parametrize(("module", "modules", "fix"), TABLE["modules"])
def test_modules_that_tests_need_are_asked_for_before_the_sweep(tmp_path, module, modules, fix):
    test = PLUS.replace("import numpy", f"import {module}")
    heads = [f"def f(xs):\n    ''' Mean {n}. '''\n" for n in range(60)]
    rows = [{"prompt": head, "entry_point": "f", "test": test} for head in heads]
    file = tmp_path / "plus.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = DataSettings(source=str(file), layout="humaneval")
    training = TrainingSettings(train_prompts=2, validation_prompts=2, test_prompts=2)
    if fix is None:
        check_data(data, training, tuple(modules))
        return
    with pytest.raises(DataError, match=fix):
        check_data(data, training, tuple(modules))
