"""What holds for every task with synthetic problems."""

import json
import re
from itertools import combinations
from typing import get_args

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.settings import SandboxSettings, TrainingSettings
from gdpo_tune.tasks.base import Problem, Split, Task
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
    assert task.problems("train", 100, 3) == task.problems("train", 100, 3)
    assert task.problems("train", 100, 3)[:30] == task.problems("train", 30, 3)
    assert task.problems("train", 30, 0) != task.problems("train", 30, 1)


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_are_distinct_and_as_many_as_a_sweep_needs(task, split):
    prompts = [problem.prompt for problem in task.problems(split, 2048, 0)]
    assert len(set(prompts)) == 2048


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


def test_no_split_has_a_prompt_or_a_calculation_of_another(task):
    drawn = {split: task.problems(split, 800, seed) for seed, split in enumerate(SPLITS)}
    for one, other in combinations(SPLITS, 2):
        for key in (lambda p: p.prompt, get_split_text):
            assert not {key(p) for p in drawn[one]} & {key(p) for p in drawn[other]}
    for split, problems in drawn.items():
        assert {choose_split(get_split_text(problem)) for problem in problems} == {split}


def test_families_have_the_stated_shares(task):
    families = [problem.family for problem in task.problems("train", 1500, 0)]
    shares = sorted(families.count(family) / 1500 for family in set(families))
    assert shares == pytest.approx([0.2, 0.2, 0.6], abs=0.04)


def test_data_survives_json(task):
    for problem in task.problems("train", 100, 0):
        assert json.loads(json.dumps(problem.data)) == problem.data


def test_every_step_of_a_thought_is_right_and_stays_within_two_digits(task):
    for problem in task.problems("train", 300, 0):
        terse, long = (problem.data["thoughts"][mode] for mode in ("terse", "long"))
        assert STEP.findall(terse) == STEP.findall(long)
        for left, sign, right, result in STEP.findall(terse):
            assert eval(f"{left}{sign}{right}") == int(result)
            assert 1 <= int(result) <= 99


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


def test_more_prompts_than_there_are_are_refused():
    families = {"only": (1.0, lambda rng: Problem(f"What is {rng.randint(1, 50)}?", "only"))}
    assert (
        draw_problems("toy", families, "train", 3, 0)
        == draw_problems("toy", families, "train", 9, 0)[:3]
    )
    message = r"toy task has no 50 distinct train prompts .* lower training\.train_prompts"
    with pytest.raises(UsageError, match=message):
        draw_problems("toy", families, "train", 50, 0)


@pytest.mark.parametrize("name", TASKS[:3])
def test_a_task_without_processes_is_a_context_and_reports_nothing(name):
    with task_named(name) as task:
        assert task.environment() == {}
    with pytest.raises(ValueError, match="argument"):
        task.score(task.problems("train", 2, 0), ["42"], [2])
