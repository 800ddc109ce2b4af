"""What `Problem.data` of a code problem from a data set holds, and the job that it becomes.

    function  the function to write; empty for a program that reads and prints
    head      Python above the policy's program, such as imports that are taken for granted
    tail      Python below it
    calls     [arguments, expected]: the function is called and what it returns compared
    asserts   Python statements, at least one `assert` each
    streams   [input, expected output, tolerance]: the program is run on the input

There are streams, or calls and asserts. At most `MOST_TESTS` tests of a problem are kept, the first
ones: all of them share one candidate's limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gdpo_tune.sandbox import Call, Job, Limits, Stream
from gdpo_tune.sandbox.asserts import read_assert
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data.columns import RowError

MOST_TESTS = 20
TOLERANCE = 1e-6
"""Of a printed number that is expected with a decimal point: other ways to print it are right."""


def code_problem(
    prompt: str,
    family: str,
    *,
    function: str = "",
    head: str = "",
    tail: str = "",
    calls: Sequence[Sequence[Any]] = (),
    asserts: Sequence[str] = (),
    streams: Sequence[tuple[str, str]] = (),
) -> Problem:
    """A code problem; streams are pairs of input and expected output."""
    data = {
        "function": function,
        "head": head,
        "tail": tail,
        "calls": [list(call) for call in calls[:MOST_TESTS]],
        "asserts": list(asserts[:MOST_TESTS]),
        "streams": [[*stream, _tolerance(stream[1])] for stream in streams[:MOST_TESTS]],
    }
    return Problem(prompt, family, data)


def checked_assert(source: str, column: str) -> str:
    """A test that the sandbox can run.

    Raises:
        RowError: it is no Python, or nothing in it can fail.
    """
    try:
        read_assert(source)
    except ValueError as error:
        raise RowError(column, str(error).partition("\n")[0]) from error
    return source


def checked_stream(given: str, expected: str, column: str) -> tuple[str, str]:
    """A pair of input and expected output that the sandbox can run.

    Raises:
        RowError: it expects nothing, so that every program would pass, or a text is no Unicode.
    """
    try:
        Stream(given, expected)
    except ValueError as error:
        raise RowError(column, str(error).partition("\n")[0]) from error
    return given, expected


def job_of(problem: Problem, program: str, limits: Limits) -> Job:
    """The policy's program with all tests of its problem."""
    data = problem.data
    return Job(
        "\n".join(part for part in (data["head"], program, data["tail"]) if part),
        tuple(Call(data["function"], tuple(args), expected) for args, expected in data["calls"]),
        tuple(data["asserts"]),
        tuple(Stream(*stream) for stream in data["streams"]),
        limits=limits,
    )


def _tolerance(expected: str) -> float:
    return TOLERANCE if any(_has_point(token) for token in expected.split()) else 0.0


def _has_point(token: str) -> bool:
    whole, point, part = token.lstrip("+-").partition(".")
    return bool(point) and whole.isdecimal() and part.isdecimal()
