"""Synthetic problems, split by hash, and the serial arithmetic that makes them hard in one pass.

A small policy rarely finds the result of several steps in one pass, but nearly always step by step,
so correctness and length really conflict.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.tasks.base import Problem, Split

Family = tuple[float, Callable[[random.Random], Problem]]
"""Share of the problems, and the function that draws one of them."""

_SPLIT_ENDS: dict[Split, int] = {"warm_start": 60, "train": 80, "validation": 90, "test": 100}
"""End of each split's interval of the hash modulo 100."""
_ATTEMPTS = 1000


def choose_split(text: str) -> Split:
    """Return the split of a prompt, or of whatever a task splits by; its text alone decides."""
    bucket = int.from_bytes(sha256(text.encode()).digest()[:8]) % 100
    return next(name for name, end in _SPLIT_ENDS.items() if bucket < end)


def normalize_prompt(prompt: str) -> str:
    """Return the form in which prompts of a user are compared: without case and white space."""
    return " ".join(prompt.casefold().split())


def choose_row_split(prompt: str) -> Split:
    """Return the split of a user's row: 80 per cent train, 10 validation, 10 test."""
    split = choose_split(normalize_prompt(prompt))
    return "train" if split == "warm_start" else split


def draw_problems(
    task: str,
    families: Mapping[str, Family],
    split: Split,
    count: int,
    seed: int,
    split_by: Callable[[Problem], str] = lambda problem: problem.prompt,
) -> list[Problem]:
    """Return `count` problems of one split with distinct prompts, the same on every machine.

    `split_by` returns the text that two problems of different splits never share.

    Raises:
        UsageError: the split does not hold that many distinct prompts.
    """
    rng = random.Random(f"{task}/{split}/{seed}")
    shares = [share for share, _ in families.values()]
    drawn: dict[str, Problem] = {}
    while len(drawn) < count:
        family = rng.choices(list(families), shares)[0]
        _, generator = families[family]
        # Staying in a family keeps the shares although some families hold fewer prompts.
        for _ in range(_ATTEMPTS):
            problem = generator(rng)
            if problem.prompt not in drawn and choose_split(split_by(problem)) == split:
                drawn[problem.prompt] = problem
                break
        else:
            raise UsageError(
                f"the {task} task has no {count} distinct {split} prompts (family {family} is used "
                f"up after {len(drawn)}): lower training.{split}_prompts"
            )
    return list(drawn.values())


def build_problem(
    family: str, prompt: str, solution: str, terse: str, long: str, **data: Any
) -> Problem:
    """Return a problem with its solution, thoughts of three lengths, and the task's own data."""
    thoughts = {"none": "", "terse": terse, "long": long}
    return Problem(f"{prompt}\n", family, {**data, "solution": solution, "thoughts": thoughts})


LARGEST = 40
"""Every step that is drawn has a result from 1 to this."""
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@dataclass(frozen=True)
class ArithmeticStep:
    """One operation on a running value."""

    value: int
    """Before the operation."""
    sign: str
    """`+`, `-`, `*` or `/`."""
    operand: int

    @property
    def result(self) -> int:
        """The value after the operation."""
        return _OPERATIONS[self.sign](self.value, self.operand)

    def __str__(self) -> str:
        """Return the step as a terse thought."""
        return f"{self.value}{self.sign}{self.operand}={self.result}"

    @property
    def phrase(self) -> str:
        """The step in words, without its value and result."""
        words = {"+": f"plus {self.operand}", "-": f"minus {self.operand}"}
        return {**words, "*": f"times {self.operand}", "/": "halved"}[self.sign]


def draw_steps(rng: random.Random) -> list[ArithmeticStep]:
    """Draw two or three steps, each from the result of the one before."""
    value = rng.randint(2, 12)
    steps: list[ArithmeticStep] = []
    for _ in range(rng.randint(2, 3)):
        sign = rng.choice("+-*/" if value % 2 == 0 else "+-*")
        operand = {"*": rng.choice((2, 3)), "/": 2}.get(sign, rng.randint(2, 9))
        step = ArithmeticStep(value, sign, operand)
        if not 1 <= step.result <= LARGEST:
            step = ArithmeticStep(value, "+" if value <= LARGEST // 2 else "-", rng.randint(2, 9))
        steps.append(step)
        value = step.result
    return steps
