"""CodeContests: `description`, and `public_tests`, `private_tests`, `generated_tests`.

Each of the three is a mapping of `input` and `output`, lists of texts. Public tests come first, as
`code_tests.MOST_TESTS` are kept. Problems that read a file instead of standard input, or show a
picture (`<image>`), cannot be solved here and are left out.

Source: Science 378 (2022), AlphaCode; columns of `deepmind/code_contests`.
"""

from __future__ import annotations

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_tests import checked_stream, code_problem
from gdpo_tune.tasks.data.columns import Row, RowError, mapping, optional_text, text, texts

_TESTS = ("public_tests", "private_tests", "generated_tests")
_NOTE = "Read the input from standard input and print the answer.\n"


def problem(row: Row) -> Problem:
    """The description and its tests.

    Raises:
        RowError: a column is not of its kind, there is no test, or text is not enough.
    """
    request = text(row, "description").strip()
    if "<image>" in request:
        raise RowError("description", "it shows a picture")
    if optional_text(row, "input_file"):
        raise RowError("input_file", "the program would read a file")
    pairs: list[tuple[str, str]] = []
    for column in _TESTS:
        tests = mapping(row.get(column) or {"input": [], "output": []}, column)
        inputs, outputs = texts(tests, "input"), texts(tests, "output")
        if len(inputs) != len(outputs):
            raise RowError(column, f"{len(inputs)} inputs and {len(outputs)} outputs")
        pairs += [
            checked_stream(given, wanted, column)
            for given, wanted in zip(inputs, outputs, strict=True)
        ]
    if not pairs:
        raise RowError(_TESTS[0], "no test")
    return code_problem(f"{request}\n{_NOTE}", "code_contests", streams=pairs)
