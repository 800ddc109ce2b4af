"""Serial arithmetic on small whole numbers, the difficulty that the embedded tasks share.

A small policy rarely finds the result of several steps in one pass, but nearly always step by step:
this makes correctness and length real rivals.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LARGEST = 40


@dataclass(frozen=True)
class ArithmeticStep:
    """One operation on a running value."""

    value: int
    """Before the operation."""
    sign: str
    """`+`, `-`, `*` or `/`."""
    operand: int
    result: int
    """From 1 to `LARGEST`."""

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
    result = {
        "+": value + operand,
        "-": value - operand,
        "*": value * operand,
        "/": value // operand,
    }[sign]
    if 1 <= result <= LARGEST:
        return ArithmeticStep(value, sign, operand, result)
    operand = rng.randint(2, 9)
    if value <= LARGEST // 2:
        return ArithmeticStep(value, "+", operand, value + operand)
    return ArithmeticStep(value, "-", operand, value - operand)


def draw_steps(rng: random.Random) -> list[ArithmeticStep]:
    """Draw two or three steps, each from the result of the one before; starts at 2 to 12."""
    value = rng.randint(2, 12)
    steps: list[ArithmeticStep] = []
    for _ in range(rng.randint(2, 3)):
        steps.append(draw_step(rng, value))
        value = steps[-1].result
    return steps
