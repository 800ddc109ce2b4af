"""Rewards of the mathematics tasks, and the two tasks that use them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune import rewards
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.tasks.answers import extract_answer, is_same_answer
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.math import GSM8KTask, MathTask
from gdpo_tune.tasks.text_rewards import normalize_number
from tests.support.data import score_one
from tests.support.tables import read_table

TABLE = read_table("answers")


@pytest.mark.parametrize(("completion", "correctness", "integer", "form"), TABLE["gsm8k"])
def test_gsm8k_rewards(completion, correctness, integer, form):
    assert score_one(rewards.exact_answer, completion, answer="42") == correctness
    assert score_one(rewards.integer, completion) == integer
    assert score_one(rewards.line_format, completion) == form


@pytest.mark.parametrize(
    "answer", ["-5", "1,000", "18.0", "+5", "5 apples", "²", "①", "٤", "", "4 2"]
)
def test_what_is_not_ascii_digits_is_no_integer(answer):
    assert score_one(rewards.integer, f"<answer>{answer}</answer>") == 0


@pytest.mark.parametrize(("written", "plain"), TABLE["plain"])
def test_numbers_are_written_plainly(written, plain):
    assert normalize_number(written) == plain
    assert normalize_number(plain) == plain


@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_an_integer_is_the_same_answer(number):
    for written in (f"{number}", f"{number:,}", f"{number}.00", f"{number}."):
        assert normalize_number(written) == str(number)
        assert is_same_answer(written, str(number))
        assert not is_same_answer(written, str(number + 1))


@pytest.mark.parametrize(("completion", "answer"), TABLE["marked"])
def test_the_answer_is_found_however_it_is_marked(completion, answer):
    assert extract_answer(completion) == answer


def test_the_mathematics_task_scores_each_objective_by_itself():
    task = MathTask(TrainingSettings(length_limit=7))
    problem = task.problems("train", 1, 0)[0]
    answer = problem.data["answer"]
    completions = [f"<think></think>\n<answer>{answer}.0</answer>", answer, "<answer>x</answer>"]
    scores = task.score([problem] * 3, completions, [7, 2, 8])
    assert scores.rewards == {"correctness": [1, 1, 0], "format": [1, 0, 0], "length": [1, 1, 0]}
    assert scores.metrics == {**scores.rewards, "mean_length": [7, 2, 8]}


def test_the_gsm8k_task_asks_for_the_exact_text():
    task = GSM8KTask(TrainingSettings(length_limit=7))
    problem = task.problems("train", 1, 0)[0]
    answer = problem.data["answer"]
    completions = [f"<think></think>\n<answer>{text}</answer>" for text in (answer, f"{answer}.0")]
    scores = task.score([problem] * 2, completions, [7, 8])
    assert scores.rewards == {"correctness": [1, 0], "integer": [1, 0], "format": [1, 1]}
    assert scores.metrics == {**scores.rewards, "length": [1, 0], "mean_length": [7, 8]}


def test_gold_answers_of_the_gsm8k_task_are_written_plainly():
    task = GSM8KTask(TrainingSettings())
    problem = Problem("How many?\n", "story", {"answer": "1,000"})
    scores = task.score([problem], ["1000"], [3])
    assert scores.rewards == {"correctness": [1], "integer": [1], "format": [0]}
