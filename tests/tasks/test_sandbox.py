"""The code task in the real sandbox."""

import pytest

from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.tasks.code import CodeTask

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def task():
    with CodeTask(TrainingSettings()) as task:
        yield task


def score(task, problems, programs):
    completions = [f"<think></think><answer>{program}</answer>" for program in programs]
    return task.score(problems, completions, [20] * len(programs))


def test_reference_solutions_are_correct(task):
    problems = task.problems("test", 60, 0)
    assert {problem.family for problem in problems} == {"rate", "chain", "list"}
    scores = score(task, problems, [problem.data["solution"] for problem in problems])
    assert set(scores.rewards["correctness"]) == {1.0}
    assert set(scores.metrics["bug_rate"]) == {0.0}


def test_hidden_tests_catch_a_solution_that_only_meets_the_visible_ones(task):
    problems = [p for p in task.problems("test", 40, 0) if p.family != "list"]
    tables = [
        f"def f(x): return {dict(problem.data['visible'])}.get(x, 12345)" for problem in problems
    ]
    scores = score(task, problems, tables)
    assert set(scores.rewards["correctness"]) == {0.0}
    assert set(scores.metrics["bug_rate"]) == {0.0}


def test_a_table_of_the_visible_tests_earns_their_share(task):
    problem = next(p for p in task.problems("test", 40, 0) if p.family != "list")
    visible, hidden = problem.data["visible"], problem.data["hidden"]
    table = f"def f(x): return {dict(visible)}.get(x, 12345)"
    raising = f"def f(x): return {dict(visible)}[x]"
    scores = score(task, [problem] * 2, [table, raising])
    share = len(visible) / len(visible + hidden)
    assert scores.partial["correctness"] == pytest.approx([share, share])
    assert scores.metrics["correctness"] == [0.0, 0.0]
    assert scores.metrics["bug_rate"] == [0.0, 1.0]


def test_the_tier_of_isolation_is_reported(task):
    assert task.environment()["sandbox"]
