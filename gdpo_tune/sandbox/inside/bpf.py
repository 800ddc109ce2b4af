"""Assembler of seccomp filters: a table of decisions becomes a binary search in BPF.

A binary search costs the kernel about eight comparisons per system call where a list costs
hundreds. The kernel also tries every number once whenever a filter is loaded, here once per
candidate.
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
"""Instructions that a conditional jump can skip. One position is left free: a long jump, which
the other branch may need, is written between this one and its target."""


def refuse(error: int) -> int:
    """Return the decision that lets a system call fail with `error` without running it."""
    return 0x00050000 | error


class Instruction(NamedTuple):
    """One instruction of classic BPF; the two jumps count instructions to skip."""

    code: int
    if_true: int
    if_false: int
    operand: int

    def pack(self) -> bytes:
        """Return the eight bytes that the kernel reads."""
        return struct.pack("=HBBI", *self)


class ArgumentRule(NamedTuple):
    """Decision by the low word of an argument: `yes` if it passes one of the tests, else `no`."""

    argument: int
    test: int
    """`JUMP_EQUAL` or `JUMP_ANY_BIT`."""
    values: tuple[int, ...]
    """Operands of the tests: numbers to equal, or sets of bits to have any of."""
    yes: int
    no: int

    def assemble(self) -> list[Instruction]:
        """Return one test per value, each followed by its decision."""
        tests: list[Instruction] = []
        for value in self.values:
            tests += [Instruction(self.test, 0, 1, value), _return_decision(self.yes)]
        load = Instruction(LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * self.argument)
        return [load, *tests, _return_decision(self.no)]


Rule: TypeAlias = int | ArgumentRule
"""Treatment of a system call: a decision, or one that depends on an argument."""


def assemble(
    audit: int, first_foreign: int, rules: Mapping[int, Rule], otherwise: int
) -> list[Instruction]:
    """Assemble the filter of one machine.

    Args:
        audit: `AUDIT_ARCH_*` of the machine; a call under any other kills the process.
        first_foreign: calls from this number on kill the process.
        rules: number to rule.
        otherwise: the decision for every number without a rule.
    """
    native = {number: rule for number, rule in rules.items() if number < first_foreign}
    search = _Search()
    search.add(_merge_intervals({**native, first_foreign: KILL}, otherwise, first_foreign))
    return [
        Instruction(LOAD, 0, 0, OFFSET_MACHINE),
        Instruction(JUMP_EQUAL, 1, 0, audit),
        _return_decision(KILL),
        Instruction(LOAD, 0, 0, OFFSET_NUMBER),
        *search.list_instructions(),
    ]


def _merge_intervals(
    rules: Mapping[int, Rule], otherwise: int, first_foreign: int
) -> list[tuple[int, Rule]]:
    """Merge neighbours with one rule: (first number, rule), from number 0 upwards."""
    intervals: list[tuple[int, Rule]] = [(0, rules.get(0, otherwise))]
    for edge in sorted({edge for number in rules for edge in (number, number + 1)}):
        rule = rules.get(edge, KILL if edge >= first_foreign else otherwise)
        if rule != intervals[-1][1]:
            intervals.append((edge, rule))
    return intervals


class _Search:
    """A binary search, written from its end, so that the target of each jump exists already.

    Every decision is written once, however many numbers it is for. A position is the number of
    instructions from it to the end.
    """

    def __init__(self) -> None:
        self._reversed: list[Instruction] = []
        self._positions: dict[Rule, int] = {}

    def add(self, intervals: Sequence[tuple[int, Rule]]) -> int:
        """Write the search through the intervals and return its position."""
        first, rule = intervals[len(intervals) // 2]
        if len(intervals) == 1:
            if rule not in self._positions:
                block = [_return_decision(rule)] if isinstance(rule, int) else rule.assemble()
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

    def list_instructions(self) -> list[Instruction]:
        """Return all instructions in the order in which they run."""
        return self._reversed[::-1]


def _return_decision(decision: int) -> Instruction:
    return Instruction(RETURN, 0, 0, decision)
