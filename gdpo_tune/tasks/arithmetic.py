"""Serial arithmetic on small whole numbers, the difficulty that the embedded tasks share.

A small policy rarely finds the result of several steps in one pass, but nearly always step by step,
so correctness and length really conflict.
"""

from __future__ import annotations

import operator
import random
from dataclasses import dataclass

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


def draw_step(rng: random.Random, value: int) -> ArithmeticStep:
    """Draw a step from `value` that stays within bounds."""
    sign = rng.choice("+-*/" if value % 2 == 0 else "+-*")
    operand = {"*": rng.choice((2, 3)), "/": 2}.get(sign, rng.randint(2, 9))
    step = ArithmeticStep(value, sign, operand)
    if 1 <= step.result <= LARGEST:
        return step
    return ArithmeticStep(value, "+" if value <= LARGEST // 2 else "-", rng.randint(2, 9))


def draw_steps(rng: random.Random) -> list[ArithmeticStep]:
    """Draw two or three steps, each from the result of the one before; starts at 2 to 12."""
    value = rng.randint(2, 12)
    steps: list[ArithmeticStep] = []
    for _ in range(rng.randint(2, 3)):
        steps.append(draw_step(rng, value))
        value = steps[-1].result
    return steps
