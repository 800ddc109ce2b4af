"""A small assembler for seccomp filters: a table of decisions becomes a binary search in BPF.

A search tree costs the kernel about eight comparisons a system call where a list costs
hundreds, and the kernel tries every number once whenever a filter is loaded, which here is
once a candidate.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

LOAD, JUMP, JUMP_EQUAL, JUMP_NOT_LESS, JUMP_ANY_BIT, RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
OFFSET_NUMBER, OFFSET_MACHINE, OFFSET_ARGUMENTS = 0, 4, 16
ALLOW = 0x7FFF0000
KILL = 0x80000000
_REACH = 255
"""Instructions that a conditional jump can skip. One place is left free: a long jump, which
the other branch may need, is written between this one and its target."""


def refuse(error: int) -> int:
    """The decision that lets a system call fail with `error` without running it."""
    return 0x00050000 | error


class Instruction(NamedTuple):
    """One instruction of classic BPF; the two jumps count instructions to skip."""

    code: int
    if_true: int
    if_false: int
    operand: int

    def pack(self) -> bytes:
        """The eight bytes that the kernel reads."""
        return struct.pack("=HBBI", *self)


def give(decision: int) -> Instruction:
    """End the filter with this decision."""
    return Instruction(RETURN, 0, 0, decision)


class WhenBits(NamedTuple):
    """Decide by the low word of an argument: `yes` if it has any of `bits`, else `no`."""

    argument: int
    bits: int
    yes: int
    no: int

    def assemble(self) -> list[Instruction]:
        """Four instructions; whatever is in the accumulator before is lost."""
        return [
            _load_argument(self.argument),
            Instruction(JUMP_ANY_BIT, 0, 1, self.bits),
            give(self.yes),
            give(self.no),
        ]


class WhenOneOf(NamedTuple):
    """Decide by the low word of an argument: `yes` if it is one of `values`, else `no`."""

    argument: int
    values: tuple[int, ...]
    yes: int
    no: int

    def assemble(self) -> list[Instruction]:
        """One comparison a value, with its decision behind it."""
        tests: list[Instruction] = []
        for value in self.values:
            tests += [Instruction(JUMP_EQUAL, 0, 1, value), give(self.yes)]
        return [_load_argument(self.argument), *tests, give(self.no)]


Rule: TypeAlias = int | WhenBits | WhenOneOf
"""What to do with a system call: a decision, or a look at one of its arguments first."""


def assemble(
    audit: int, first_foreign: int, rules: Mapping[int, Rule], otherwise: int
) -> list[Instruction]:
    """Assemble the filter of one machine.

    Args:
        audit: `AUDIT_ARCH_*` of the machine; a call under any other kills the process.
        first_foreign: calls from this number on kill the process.
        rules: number to rule.
        otherwise: the decision for every number that has no rule.
    """
    native = {number: rule for number, rule in rules.items() if number < first_foreign}
    search = _Search()
    search.add(_intervals({**native, first_foreign: KILL}, otherwise, first_foreign))
    return [
        Instruction(LOAD, 0, 0, OFFSET_MACHINE),
        Instruction(JUMP_EQUAL, 1, 0, audit),
        give(KILL),
        Instruction(LOAD, 0, 0, OFFSET_NUMBER),
        *search.instructions(),
    ]


def _intervals(
    rules: Mapping[int, Rule], otherwise: int, first_foreign: int
) -> list[tuple[int, Rule]]:
    """Merge neighbours with one rule: (first number, rule), from number 0 upwards."""
    intervals: list[tuple[int, Rule]] = [(0, rules.get(0, otherwise))]
    edges = sorted({edge for number in rules for edge in (number, number + 1)})
    for edge in edges:
        rule = rules.get(edge, KILL if edge >= first_foreign else otherwise)
        if rule != intervals[-1][1]:
            intervals.append((edge, rule))
    return intervals


class _Search:
    """A binary search, written from its end, so that what a jump leads to is always there.

    Every decision is written once, however many numbers it is for. A position is how many
    instructions follow from it to the end.
    """

    def __init__(self) -> None:
        self._reversed: list[Instruction] = []
        self._positions: dict[Rule, int] = {}

    def add(self, intervals: Sequence[tuple[int, Rule]]) -> int:
        """Write the search through the intervals; its position."""
        first, rule = intervals[len(intervals) // 2]
        if len(intervals) == 1:
            if rule not in self._positions:
                block = [give(rule)] if isinstance(rule, int) else rule.assemble()
                self._reversed += reversed(block)
                self._positions[rule] = len(self._reversed)
            return self._positions[rule]
        above = self.add(intervals[len(intervals) // 2 :])
        below = self.add(intervals[: len(intervals) // 2])
        above, below = self._bring_near(above), self._bring_near(below)
        end = len(self._reversed)
        self._reversed.append(Instruction(JUMP_NOT_LESS, end - above, end - below, first))
        return end + 1

    def _bring_near(self, position: int) -> int:
        distance = len(self._reversed) - position
        if distance < _REACH:
            return position
        self._reversed.append(Instruction(JUMP, 0, 0, distance))
        return len(self._reversed)

    def instructions(self) -> list[Instruction]:
        """Everything, in the order in which it runs."""
        return self._reversed[::-1]


def _load_argument(index: int) -> Instruction:
    return Instruction(LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * index)
