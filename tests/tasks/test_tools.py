"""Scoring of tool calls: every published vector, every quirk that is kept, and the task itself."""

import json
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.tool_rewards import (
    agreement,
    compare_calls,
    compute_jaccard,
    parse_calls,
    tool_format,
)
from gdpo_tune.tasks.tools import ToolsTask
from tests.support.data import score_one
from tests.support.tables import read_table


def call(name: str = "f", **parameters) -> dict:
    return {"name": name, "parameters": parameters}


TABLE = read_table("tool_calls")
RIGHT = [call(a=1, b="x")]
"""One right call with two parameters."""


def block(*calls: dict) -> str:
    return "<tool_call>\n" + "\n".join(json.dumps(call) for call in calls) + "\n</tool_call>"


def spoken(*calls: dict) -> str:
    return f"<think>why</think>\n{block(*calls)}"


def correctness_of(completion: str, right) -> float:
    return score_one(agreement, completion, calls=right)


def form_of(completion: str, *, calls: bool, response: bool) -> float:
    return score_one(tool_format, completion, calls=RIGHT * calls, response=response)


def scored(completion: str) -> tuple[float, float]:
    return form_of(completion, calls=True, response=False), correctness_of(completion, RIGHT)


EXACT = json.dumps(RIGHT[0])


VECTORS = {
    "exact": (spoken(call(a=1, b="x")), 1, 3),
    "one value wrong": (spoken(call(a=1, b="y")), 1, 1.5),
    "text for a number": (spoken(call(a="1", b="x")), 1, 1.5),
    "extra call": (spoken(call(a=1, b="x"), call("g", c=1)), 1, 2.25),
    "missing parameter": (spoken(call(a=1)), 1, 0.75),
    "wrong name": (spoken(call("g", a=1, b="x")), 1, -3),
    "bad JSON": ("<think>why</think>\n<tool_call>\n{broken\n</tool_call>", 1, -3),
    "no parameters": ('<think>why</think>\n<tool_call>\n{"name": "f"}\n</tool_call>', 1, -3),
    "no think": (block(call(a=1, b="x")), 0, 3),
    "no tags": (EXACT, 0, -3),
    "two blocks": (spoken(call(a=1, b="x")) + "\n" + block(call("g")), 0, 3),
    "tag in the thoughts": (f"<think>a <tool_call> is due</think>\n{block(*RIGHT)}", 0, -3),
    "missing end tags": (f"<think>why<tool_call>{EXACT}", 0, 3),
}


@pytest.mark.parametrize(("completion", "form", "correctness"), VECTORS.values(), ids=VECTORS)
def test_published_vectors(completion, form, correctness):
    assert scored(completion) == (form, correctness)


LONG = [("[" * 100_000, 1, -3), ("9" * 5000, 1, -3)]


@pytest.mark.parametrize(("lines", "form", "correctness"), [*TABLE["blocks"], *LONG])
def test_quirks_within_a_block(lines, form, correctness):
    lines = lines.replace("EXACT", EXACT)
    assert scored(f"<think></think>\n<tool_call>\n{lines}\n</tool_call>") == (form, correctness)


@pytest.mark.parametrize(("completion", "calls", "response"), TABLE["tags"])
def test_format_wants_the_tags_of_the_right_answer_alone(completion, calls, response):
    for wanted in ((c, r) for c in (True, False) for r in (True, False)):
        expected = wanted == (calls, response)
        assert form_of(completion, calls=wanted[0], response=wanted[1]) == expected


@pytest.mark.parametrize("completion", TABLE["breaks"])
def test_format_wants_fixed_line_breaks_and_nothing_else(completion):
    assert form_of(completion, calls=True, response=False) == 0


def test_matching_is_optimal_whatever_the_order_of_the_calls():
    # Greedily, the first right call would take the call that the second one hits in full: .43.
    right, called = [call(a=1, b=1), call(a=1, b=2)], [call(a=1, b=2), call(a=9, b=9)]
    assert [[compare_calls(one, other) for other in called] for one in right] == [[2, 1], [3, 1]]
    for order in permutations(right):
        for given_order in permutations(called):
            value = correctness_of(spoken(*given_order), order)
            assert value == pytest.approx(6 * 5 / 7 - 3) == pytest.approx(1.29, abs=0.005)


names = st.sampled_from(["f", "g"])
values = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 2), max_size=3)
calls = st.lists(st.builds(lambda n, v: call(n, **v), names, values), min_size=1, max_size=4)


@given(calls, calls)
def test_matching_equals_the_best_of_all_pairings(right, called):
    padded = [*called, *[call("none")] * len(right)]
    best = max(
        sum(compare_calls(one, other) for one, other in zip(right, order, strict=False))
        for order in permutations(padded, len(right))
    )
    score = compute_jaccard([c["name"] for c in right], [c["name"] for c in called]) + best
    most = 1 + sum(1 + len(c["parameters"]) for c in right)
    value = correctness_of(spoken(*called), right)
    assert value == pytest.approx(6 * score / most - 3)
    assert -3 <= value <= 3
    assert correctness_of(spoken(*reversed(right)), right) == 3


def test_jaccard_counts_repeated_names():
    assert compute_jaccard([], []) == 1
    assert compute_jaccard(["f"], []) == 0
    assert compute_jaccard(["f", "f"], ["f"]) == 0.5
    assert compute_jaccard(["f", "f", "g"], ["f", "h"]) == 0.25


def test_a_parameterless_call_is_matched_by_its_name():
    right = [call("now")]
    assert correctness_of(spoken(call("now")), right) == 3
    assert correctness_of(spoken(call("now", zone=1)), right) == 0


def test_calls_are_read_from_the_first_block():
    assert parse_calls("no block") is None
    assert parse_calls(block(call("f")) + block(call("g"))) == [call("f")]


def problem(*right: dict, response: bool = False) -> Problem:
    return Problem("User: ...\n", "toy", {"calls": list(right), "response": response})


def test_scores_of_the_task():
    task = ToolsTask(TrainingSettings(length_limit=9))
    completions = [spoken(*RIGHT), spoken(call(a=1)), "hello"]
    scores = task.score([problem(*RIGHT)] * 3, completions, [9, 8, 10])
    expected = {"correctness": [3, 0.75, -3], "format": [1, 1, 0], "length": [1, 1, 0]}
    assert scores.rewards == expected
    assert scores.metrics == {**scores.rewards, "exact": [1, 0, 0], "mean_length": [9, 8, 10]}


def test_without_a_right_call_there_is_no_correctness_reward():
    task = ToolsTask(TrainingSettings())
    answer = "<think></think>\n<response>Hello.</response>"
    problems = [problem(response=True)] * 2 + [problem(*RIGHT)]
    scores = task.score(problems, [answer, spoken(*RIGHT), spoken(*RIGHT)], [9] * 3)
    assert scores.rewards["correctness"] == [None, None, 3]
    assert scores.rewards["format"] == [1, 0, 1]
    assert scores.metrics["correctness"] == [3, -3, 3]
    assert scores.metrics["exact"] == [1, 0, 1]
