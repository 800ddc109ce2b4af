"""The contract of every task with synthetic problems, and what their problems are."""

import json
import re
from hashlib import sha256
from itertools import combinations
from typing import get_args

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.settings import SandboxSettings, TrainingSettings
from gdpo_tune.tasks.base import Problem, Split, Task
from gdpo_tune.tasks.code import draw_code_problems
from gdpo_tune.tasks.generation import choose_split, draw_problems
from gdpo_tune.tasks.tool_rewards import parse_calls

SPLITS = get_args(Split)
TASKS = ("math", "gsm8k", "tools", "code")
STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


def task_named(name: str) -> Task:
    return registry.describe_task(name).build(TrainingSettings(), SandboxSettings())


@pytest.fixture(params=TASKS)
def task(request) -> Task:
    return task_named(request.param)


def test_the_registry_names_the_rewards_and_metrics(task):
    described = map(registry.describe_task, TASKS)
    infos = [info for info in described if isinstance(task, info.build)]
    assert [tuple(info.rewards) for info in infos] == [task.rewards]
    assert [set(info.metrics) for info in infos] == [set(task.metrics)]


def test_same_arguments_give_the_same_problems(task):
    hundred = task.problems("train", 100, 3)
    assert task.problems("train", 100, 3) == hundred
    assert task.problems("train", 30, 3) == hundred[:30]
    assert task.problems("train", 30, 0) != task.problems("train", 30, 1)


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "splits"),
    [
        ("code", ["validation"]),
        *(pytest.param(name, SPLITS[1:], marks=pytest.mark.slow) for name in registry.TASKS),
    ],
)
def test_a_task_can_write_as_many_prompts_as_the_registry_says(name, splits):
    known = registry.describe_task(name).prompts
    with task_named(name) as task:
        assert [len(task.problems(split, known[split], 0)) for split in splits] == [
            known[split] for split in splits
        ]


def get_split_text(problem: Problem) -> str:
    return problem.data.get("calculation", problem.prompt)


def get_meaning(problem: Problem) -> tuple:
    """Return what a prompt asks, in whatever words: the program and the steps of a code task."""
    return problem.data["solution"], problem.data["thoughts"]["terse"]


def test_problems_are_distinct_and_no_split_has_what_another_has(task):
    # 2048 are as many as a sweep needs.
    drawn = {split: task.problems(split, 2048, seed) for seed, split in enumerate(SPLITS)}
    for split, problems in drawn.items():
        assert len({problem.prompt for problem in problems}) == 2048
        assert {choose_split(get_split_text(problem)) for problem in problems} == {split}
    keys = [lambda problem: problem.prompt, get_split_text]
    if "visible" in problems[0].data:
        keys.append(get_meaning)
    for one, other in combinations(drawn.values(), 2):
        for key in keys:
            assert not set(map(key, one)) & set(map(key, other))
    families = [problem.family for problem in drawn["train"]]
    shares = sorted(families.count(family) / 2048 for family in set(families))
    assert shares == pytest.approx([0.2, 0.2, 0.6], abs=0.04)


def test_data_survives_json_and_every_step_of_a_thought_is_right_within_two_digits(task):
    for problem in task.problems("train", 300, 0):
        assert json.loads(json.dumps(problem.data)) == problem.data
        terse, long = (problem.data["thoughts"][mode] for mode in ("terse", "long"))
        assert STEP.findall(terse) == STEP.findall(long)
        for left, sign, right, result in STEP.findall(terse):
            assert eval(f"{left}{sign}{right}") == int(result)
            assert 1 <= int(result) <= (40 if problem.family == "rate" else 99)
        if problem.family == "rate":
            assert len(STEP.findall(terse)) == len(terse.split())


def test_the_last_step_is_the_answer():
    for problem in task_named("math").problems("train", 200, 0):
        *_, (_, _, _, result) = STEP.findall(problem.data["thoughts"]["terse"])
        assert problem.data["answer"] == problem.data["solution"] == result
    for problem in task_named("tools").problems("train", 200, 0):
        if problem.family != "plain":
            *_, (_, _, _, result) = STEP.findall(problem.data["thoughts"]["terse"])
            assert int(result) in problem.data["calls"][-1]["parameters"].values()


def test_the_solution_of_a_request_holds_its_calls_for_tools_on_offer():
    for problem in task_named("tools").problems("train", 300, 0):
        assert parse_calls(f"<tool_call>{problem.data['solution']}") == problem.data["calls"]
        offered = problem.prompt.splitlines()[0]
        for call in problem.data["calls"]:
            assert f"{call['name']}({','.join(call['parameters'])})" in offered
        assert len(problem.data["calls"]) == (2 if problem.family == "pair" else 1)


@pytest.mark.parametrize("split", ["train", "test"])
def test_reference_programs_meet_every_test_and_hidden_tests_are_others(split):
    for problem in draw_code_problems(split, 300, 7):
        scope: dict = {}
        exec(problem.data["solution"], scope)  # of the generator, not of a model
        visible, hidden = problem.data["visible"], problem.data["hidden"]
        for argument, expected in visible + hidden:
            assert scope["f"](argument) == expected
        shown = [argument for argument, _ in visible]
        assert len(shown) >= 2
        assert sum(argument not in shown for argument, _ in hidden) >= 3


# SHA-256 of what is drawn: a seed gives the same problems in every release.
DRAWN = {"math": "03d72321", "gsm8k": "03d72321", "tools": "a99ae23d", "code": "0c1d830c"}


def test_problems_and_their_splits_are_stable_across_releases(task):
    problems = [problem for split in SPLITS for problem in task.problems(split, 100, 3)]
    text = json.dumps([[each.prompt, each.family, each.data] for each in problems], sort_keys=True)
    (name,) = {name for name in TASKS if type(task) is registry.describe_task(name).build}
    assert sha256(text.encode()).hexdigest()[:8] == DRAWN[name]
    prompt = "Write f(x): k is 11, plus 9, halved; return k times x.\n"
    assert choose_split(prompt) == "warm_start"


def test_more_prompts_than_there_are_are_refused():
    families = {"only": (1.0, lambda rng: Problem(f"What is {rng.randint(1, 50)}?", "only"))}
    three, nine = (draw_problems("toy", families, "train", count, 0) for count in (3, 9))
    assert three == nine[:3]
    message = r"toy task has no 50 distinct train prompts .* lower training\.train_prompts"
    with pytest.raises(UsageError, match=message):
        draw_problems("toy", families, "train", 50, 0)


@pytest.mark.parametrize("name", TASKS[:3])
def test_a_task_without_processes_is_a_context_and_reports_nothing(name):
    with task_named(name) as task:
        assert task.environment() == {}
    with pytest.raises(ValueError, match="argument"):
        task.score(task.problems("train", 2, 0), ["42"], [2])
