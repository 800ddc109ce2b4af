"""Synthetic word problems whose answer is a whole number.

Three families. `story` is serial arithmetic in two or three sentences, `total` the sum of two
products, `change` what is left after a purchase: all are hard in one pass and easy step by step.

Problems of two splits never have the same calculation, whoever it is told about.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from gdpo_tune.tasks.arithmetic import Step, steps
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.generation import Family, draw

_NAMES = ("Tom", "Ann", "Sam", "Eva", "Max", "Lea")
_THINGS = ("apples", "coins", "books", "pens", "cards")
_LARGEST_SUM = 60
_SENTENCES = {
    "+": ("Finds {n}.", "Gets {n}."),
    "-": ("Loses {n}.", "Gives {n}."),
    "*": ("Then has {n} times as many.",),
    "/": ("Gives half.",),
}


def generate(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` problems of one split with distinct prompts.

    The same arguments give the same list on every machine.

    Raises:
        UsageError: the split does not hold that many distinct prompts.
    """
    return draw("math", _FAMILIES, split, count, seed, lambda p: p.data["calculation"])


def _story(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    taken = steps(rng, 2, 3)
    told = [rng.choice(_SENTENCES[step.sign]).format(n=step.operand) for step in taken]
    story = f"{name} has {taken[0].value} {thing}. {' '.join(told)}"
    return _problem("story", f"{story} How many {thing}?", taken)


def _total(rng: random.Random) -> Problem:
    name = rng.choice(_NAMES)
    one, other = rng.sample(_THINGS, 2)
    n, m = rng.randint(2, 6), rng.randint(2, 6)
    price, fee = rng.randint(2, 9), rng.randint(2, 9)
    first, second = Step(n, "*", price, n * price), Step(m, "*", fee, m * fee)
    taken = [first, second, Step(first.result, "+", second.result, first.result + second.result)]
    if taken[-1].result > _LARGEST_SUM:
        return _total(rng)
    bought = f"{name} buys {n} {one} at {price} each and {m} {other} at {fee} each."
    return _problem("total", f"{bought} How much?", taken)


def _change(rng: random.Random) -> Problem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    n, price = rng.randint(2, 6), rng.randint(2, 9)
    spent = Step(n, "*", price, n * price)
    owned = spent.result + rng.randint(1, _LARGEST_SUM - spent.result)
    taken = [spent, Step(owned, "-", spent.result, owned - spent.result)]
    bought = f"{name} has {owned} and buys {n} {thing} at {price} each."
    return _problem("change", f"{bought} How much is left?", taken)


def _problem(family: str, question: str, taken: Sequence[Step]) -> Problem:
    notes = [str(step) for step in taken]
    calculation, answer = " ".join(notes), str(taken[-1].result)
    long = f"Let me see. {'. '.join(notes)}. So the result is {answer}."
    return Problem(
        prompt=f"{question}\n",
        family=family,
        data={
            "answer": answer,
            "solution": answer,
            "calculation": calculation,
            "thoughts": {"none": "", "terse": calculation, "long": long},
        },
    )


_FAMILIES: dict[str, Family] = {
    "story": (0.6, _story),
    "total": (0.2, _total),
    "change": (0.2, _change),
}
