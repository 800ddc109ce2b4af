"""Problems that the code task writes; see also test_generators."""

from itertools import combinations
from typing import get_args

import pytest

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


def test_split_is_stable_across_releases():
    prompt = "Write f(x): k is 11, plus 9, halved; return k times x.\n"
    assert choose_split(prompt) == "warm_start"


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


def test_terse_steps_of_a_rate_problem_are_right():
    for problem in draw_code_problems("train", 300, 0):
        if problem.family == "rate":
            for step in problem.data["thoughts"]["terse"].split():
                left, right = step.split("=")
                assert eval(left) == int(right)
                assert 1 <= int(right) <= 40


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
