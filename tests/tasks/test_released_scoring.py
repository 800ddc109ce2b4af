"""Scoring as the authors' code does it: values that this code gave, and every difference to ours.

`tests/data/released` holds completions, some written and some drawn at random, with the values that
the authors' functions returned for them: `rlla.py` of github.com/NVlabs/GDPO at b080e63, which is
that of github.com/qiancheng0/ToolRL at 8cee13e, and `gsm8k.py` of the former.
"""

import json
import re

import pytest

from gdpo_tune.core.registry import TASKS
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.task_files import build_task, load_task_info
from gdpo_tune.tasks import layouts
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.math import GSM8KTask
from gdpo_tune.tasks.tools import ToolsTask
from tests.support.data import read_rows
from tests.support.paths import ROOT

SETTINGS = TrainingSettings(length_limit=9)


def score(task: type, problem: Problem, completion: str, scoring: str) -> dict[str, float | None]:
    """Return the rewards of one completion."""
    scores = task(SETTINGS, scoring=scoring).score([problem], [completion], [1])
    return {name: values[0] for name, values in scores.rewards.items()}


def take_name(row: dict) -> str:
    return row["name"]


@pytest.mark.parametrize("row", read_rows("released/tools"), ids=take_name)
def test_tool_calls_have_the_values_of_the_released_code(row):
    columns = {"prompt": [{"content": "?"}], "reward_model": {"ground_truth": row["truth"]}}
    problem = layouts.convert_toolrl(columns)
    rewards = score(ToolsTask, problem, row["completion"], "released")
    expected = {"correctness": row["correctness"], "format": row["format"], "length": 1}
    assert rewards == expected


@pytest.mark.parametrize("row", read_rows("released/gsm8k"), ids=take_name)
def test_gsm8k_answers_have_the_values_of_the_released_code(row):
    problem = layouts.convert_openai_gsm8k({"question": "?", "answer": row["answer"]})
    rewards = score(GSM8KTask, problem, row["completion"], "released")
    assert rewards == {name: row[name] for name in ("correctness", "integer", "format")}


def call(**parameters: int) -> dict:
    return {"name": "f", "parameters": parameters}


EXAMPLES = {
    "recipes": (
        ToolsTask,
        {
            "": {"calls": [call(a=1)], "response": False},
            "two calls": {"calls": [call(a=1, b=1), call(a=1, b=2)], "response": False},
            "no call": {"calls": [], "response": True},
        },
    ),
    "data": (
        GSM8KTask,
        {"": {"answer": "18"}, "1,000": {"answer": "1000", "written_answer": "1,000"}},
    ),
}
"""Page -> the task of its table, and the right answers that the table names."""


def read_differences():
    for page, (task, answers) in EXAMPLES.items():
        text = (ROOT / "docs" / f"{page}.md").read_text()
        table = text.partition("| strict | released |")[2].partition("\n\n")[0]
        for line in table.splitlines()[2:]:
            reward, example, strict, released, _ = line[2:-2].split(" | ", 4)
            answer, completion = re.fullmatch(r"(?:([^`]+): )?`(.+)`", example).groups("")
            texts = (Problem("", "", answers[answer]), completion.replace("\\n", "\n"))
            yield pytest.param(task, texts, reward, strict, released, id=f"{page}: {example}")


@pytest.mark.parametrize(
    ("task", "texts", "reward", "strict", "released"), list(read_differences())
)
def test_the_examples_of_the_pages(task, texts, reward, strict, released):
    for scoring, text in (("strict", strict), ("released", released)):
        value = score(task, *texts, scoring)[reward]
        expected = None if text == "none" else pytest.approx(float(text), abs=0.005)
        assert value == expected, scoring


def test_the_pages_have_the_differences_of_every_reward():
    found = {(row.values[0], row.values[2]) for row in read_differences()}
    assert found == {
        *((ToolsTask, reward) for reward in ("correctness", "format")),
        *((GSM8KTask, reward) for reward in ("correctness", "integer", "format")),
    }


def test_the_tasks_that_offer_it():
    assert {name for name in TASKS if load_task_info(name).offers_released} == {"tools", "gsm8k"}


def test_held_out_metrics_follow_the_rewards_of_their_names():
    right = Problem("?", "toy", {"calls": [call(a=1)], "response": False})
    talk = Problem("!", "toy", {"calls": [], "response": True})
    unclosed = f"<think>x</think>\n<tool_call>\n{json.dumps(call(a=1))}"
    spoken = "<think>x</think>\n<think>y</think>\n<response>Hi.</response>"
    parts = (SETTINGS, SandboxSettings(), DataSettings())
    task = build_task("tools", *parts, scoring="released")
    scores = task.score([right, talk], [unclosed, spoken], [9, 10])
    assert scores.rewards == {"correctness": [-3, 0], "format": [0, 1], "length": [1, 0]}
    assert scores.metrics == {**scores.rewards, "exact": [1, 1], "mean_length": [9, 10]}
    strict = build_task("tools", *parts).score([right, talk], [unclosed, spoken], [9, 10])
    assert strict.rewards == {"correctness": [3, None], "format": [0, 0], "length": [1, 0]}
    assert strict.metrics["correctness"] == [3, 3]
