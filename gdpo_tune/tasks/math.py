"""Word problems: `math`, answered in few tokens, and `gsm8k`, under its three binary rewards.

Problems are synthetic. `story` is serial arithmetic in two or three sentences, `total` the sum of
two products, `change` the rest after a purchase: all are hard in one pass and easy step by step.
Problems of two splits never have the same calculation, whatever names and things they mention.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from gdpo_tune.tasks import text_rewards as rewards
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.generation import (
    ArithmeticStep,
    Family,
    build_problem,
    draw_problems,
    draw_steps,
)
from gdpo_tune.tasks.task import BuiltInTask

ANSWER_REQUEST = (
    "Think first, between <think> and </think>. Then write, on the next line, the answer alone "
    "between <answer> and </answer>, and nothing else. Use each pair of tags once, and at most "
    "{limit} tokens in all."
)
"""Instructions for a policy that has not learnt this format; `{limit}` is in tokens."""
PROMPTS = {"train": 40_000, "validation": 20_000, "test": 20_000}
"""Split -> distinct prompts that can be written."""
_NAMES = ("Tom", "Ann", "Sam", "Eva", "Max", "Lea")
_THINGS = ("apples", "coins", "books", "pens", "cards")
_LARGEST_SUM = 60
_SENTENCES = {
    "+": ("Finds {n}.", "Gets {n}."),
    "-": ("Loses {n}.", "Gives {n}."),
    "*": ("Then has {n} times as many.",),
    "/": ("Gives half.",),
}


def _draw_story(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    steps = draw_steps(rng)
    sentences = [rng.choice(_SENTENCES[step.sign]).format(n=step.operand) for step in steps]
    story = f"{name} has {steps[0].value} {thing}. {' '.join(sentences)}"
    return _ask("story", f"{story} How many {thing}?", steps)


def _draw_total(rng: random.Random) -> Problem:
    name = rng.choice(_NAMES)
    one, other = rng.sample(_THINGS, 2)
    n, m = rng.randint(2, 6), rng.randint(2, 6)
    price, fee = rng.randint(2, 9), rng.randint(2, 9)
    first = ArithmeticStep(n, "*", price)
    second = ArithmeticStep(m, "*", fee)
    total = ArithmeticStep(first.result, "+", second.result)
    if total.result > _LARGEST_SUM:
        return _draw_total(rng)
    purchase = f"{name} buys {n} {one} at {price} each and {m} {other} at {fee} each."
    return _ask("total", f"{purchase} How much?", [first, second, total])


def _draw_change(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    n, price = rng.randint(2, 6), rng.randint(2, 9)
    cost = ArithmeticStep(n, "*", price)
    money = cost.result + rng.randint(1, _LARGEST_SUM - cost.result)
    steps = [cost, ArithmeticStep(money, "-", cost.result)]
    purchase = f"{name} has {money} and buys {n} {thing} at {price} each."
    return _ask("change", f"{purchase} How much is left?", steps)


def _ask(family: str, question: str, steps: Sequence[ArithmeticStep]) -> Problem:
    notes = [str(step) for step in steps]
    calculation, answer = " ".join(notes), str(steps[-1].result)
    long = f"Let me see. {'. '.join(notes)}. So the result is {answer}."
    return build_problem(
        family, question, answer, calculation, long, answer=answer, calculation=calculation
    )


_FAMILIES: dict[str, Family] = {
    "story": (0.6, _draw_story),
    "total": (0.2, _draw_total),
    "change": (0.2, _draw_change),
}


draw_math_problems = partial(
    draw_problems, "math", _FAMILIES, split_by=lambda p: p.data["calculation"]
)
"""Draws problems of a split; see `draw_problems`."""


class MathTask(BuiltInTask):
    """Word problems; `data["answer"]` of a problem is its right answer."""

    reward_funcs = {
        "correctness": rewards.answer,
        "format": rewards.block_format,
        "length": rewards.length,
    }
    metric_funcs = {**reward_funcs, "mean_length": rewards.mean_length}
    generate = staticmethod(draw_math_problems)
    format_request = ANSWER_REQUEST


class GSM8KTask(BuiltInTask):
    """Word problems; `data["answer"]` of a problem is its right answer."""

    reward_funcs = {
        "correctness": rewards.exact_answer,
        "integer": rewards.integer,
        "format": rewards.line_format,
    }
    released_funcs = {
        "correctness": rewards.released_answer,
        "integer": rewards.released_integer,
        "format": rewards.released_line_format,
    }
    metric_funcs = {**reward_funcs, "length": rewards.length, "mean_length": rewards.mean_length}
    generate = staticmethod(draw_math_problems)
    format_request = ANSWER_REQUEST


MATH = MathTask.describe("embedded_math", PROMPTS)
GSM8K = GSM8KTask.describe("embedded_math", PROMPTS)
