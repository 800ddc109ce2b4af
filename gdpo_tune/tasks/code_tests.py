"""`Problem.data` of a code problem from a data set, for `execution.build_job`.

    function  the function to write; empty for a program that reads and prints
    head      Python above the policy's program, such as imports that are taken for granted
    tail      Python below it
    asserts   Python statements, at least one `assert` each
    streams   [input, expected output, tolerance]: the program is run on the input

There are streams, or asserts. The first `MOST_TESTS` tests of a problem are kept: all of
them share one candidate's limits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gdpo_tune.sandbox import Stream
from gdpo_tune.sandbox.asserts import read_assert
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data.columns import RowError

MOST_TESTS = 20
STREAMS_NOTE = "Read the input from standard input and print the answer.\n"
"""Ends the prompt of a problem that has streams."""
TOLERANCE = 1e-6
"""Of a printed number that is expected with a decimal point: other ways to print it are right."""
_NUMBER_WITH_POINT = re.compile(r"(?<!\S)[-+]*\d+\.\d+(?!\S)")


def build_code_problem(
    prompt: str,
    family: str,
    *,
    function: str = "",
    head: str = "",
    tail: str = "",
    asserts: Sequence[str] = (),
    streams: Sequence[tuple[str, str]] = (),
) -> Problem:
    """Return a code problem; streams are pairs of input and expected output."""
    data = {
        "function": function,
        "head": head,
        "tail": tail,
        "asserts": list(asserts[:MOST_TESTS]),
        "streams": [
            [*stream, TOLERANCE if _NUMBER_WITH_POINT.search(stream[1]) else 0.0]
            for stream in streams[:MOST_TESTS]
        ],
    }
    return Problem(prompt, family, data)


def check_assert(source: str, column: str) -> str:
    """Return a test that the sandbox can run.

    Raises:
        RowError: it is not Python, or nothing in it can fail.
    """
    try:
        read_assert(source)
    except ValueError as error:
        raise RowError(column, str(error).partition("\n")[0]) from error
    return source


def check_streams(
    inputs: Sequence[str], outputs: Sequence[str], column: str
) -> list[tuple[str, str]]:
    """Return pairs of input and expected output that the sandbox can run.

    Raises:
        RowError: there are more inputs than outputs, or fewer; nothing is expected, so that every
            program would pass; or a text is not Unicode.
    """
    if len(inputs) != len(outputs):
        raise RowError(column, f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    for pair in pairs:
        try:
            Stream(*pair)
        except ValueError as error:
            raise RowError(column, str(error).partition("\n")[0]) from error
    return pairs
