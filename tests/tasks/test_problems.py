import json
from itertools import combinations
from typing import get_args

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.tasks.base import Split
from gdpo_tune.tasks.code import draw_code_problems
from gdpo_tune.tasks.generation import choose_split

SPLITS = get_args(Split)


def run(program: str, argument: object) -> object:
    """Run a reference solution; it comes from the generator, not from a model."""
    scope: dict[str, object] = {}
    exec(program, scope)
    function = scope["f"]
    assert callable(function)
    return function(argument)


def test_same_arguments_give_the_same_problems():
    assert draw_code_problems("train", 200, 3) == draw_code_problems("train", 200, 3)


def test_first_problems_do_not_depend_on_the_count():
    assert draw_code_problems("train", 200, 3)[:50] == draw_code_problems("train", 50, 3)


def test_seeds_give_different_problems():
    assert draw_code_problems("train", 50, 0) != draw_code_problems("train", 50, 1)


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_are_distinct_and_of_their_split(split):
    prompts = [problem.prompt for problem in draw_code_problems(split, 1500, 0)]
    assert len(set(prompts)) == 1500
    assert {choose_split(prompt) for prompt in prompts} == {split}


def test_splits_share_no_prompt_whatever_the_seeds():
    prompts = {
        split: {problem.prompt for problem in draw_code_problems(split, 800, seed)}
        for seed, split in enumerate(SPLITS)
    }
    for one, other in combinations(SPLITS, 2):
        assert not prompts[one] & prompts[other]


def test_split_is_stable_across_releases():
    prompt = "Write f(x): k is 11, plus 9, halved; return k times x.\n"
    assert choose_split(prompt) == "warm_start"


def test_shares_of_the_families():
    problems = draw_code_problems("train", 2000, 0)
    shares = {
        family: sum(problem.family == family for problem in problems) / 2000
        for family in ("rate", "chain", "list")
    }
    assert shares == pytest.approx({"rate": 0.6, "chain": 0.2, "list": 0.2}, abs=0.04)


@pytest.mark.parametrize("split", ["train", "test"])
def test_reference_solutions_meet_every_test(split):
    for problem in draw_code_problems(split, 300, 7):
        tests = problem.data["visible"] + problem.data["hidden"]
        assert [run(problem.data["solution"], argument) for argument, _ in tests] == [
            expected for _, expected in tests
        ]


def test_problems_have_visible_and_other_hidden_tests():
    for problem in draw_code_problems("validation", 300, 0):
        visible = [argument for argument, _ in problem.data["visible"]]
        hidden = [argument for argument, _ in problem.data["hidden"]]
        assert len(visible) >= 2
        assert sum(argument not in visible for argument in hidden) >= 3


def test_data_survives_json():
    for problem in draw_code_problems("train", 100, 0):
        assert json.loads(json.dumps(problem.data)) == problem.data


def test_terse_steps_of_a_rate_problem_are_right():
    for problem in draw_code_problems("train", 300, 0):
        if problem.family == "rate":
            for step in problem.data["thoughts"]["terse"].split():
                left, right = step.split("=")
                assert eval(left) == int(right)
                assert 1 <= int(right) <= 40


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(UsageError, match=r"test prompts .* lower training\.test_prompts"):
        draw_code_problems("test", 100_000, 0)


def test_no_split_says_in_other_words_what_another_says():
    meanings = {
        split: {
            (problem.data["solution"], problem.data["thoughts"]["terse"])
            for problem in draw_code_problems(split, 800, 0)
        }
        for split in SPLITS
    }
    for one, other in combinations(SPLITS, 2):
        assert not meanings[one] & meanings[other]
