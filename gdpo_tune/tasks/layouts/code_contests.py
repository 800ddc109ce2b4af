"""CodeContests: `description`, and `public_tests`, `private_tests`, `generated_tests`.

Each of the three is a mapping of `input` and `output`, lists of texts. Public tests come first, as
`code_tests.MOST_TESTS` are kept. Problems that read a file instead of standard input, or show a
picture (`<image>`), cannot be solved here and are left out.

Source: Science 378 (2022), AlphaCode; columns of `deepmind/code_contests`.
"""

from __future__ import annotations

from gdpo_tune.core.registry import LayoutInfo
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.code_tests import STREAMS_NOTE, build_code_problem, check_streams
from gdpo_tune.tasks.data.columns import (
    Row,
    RowError,
    get_optional_text,
    get_text,
    get_texts,
    require_mapping,
)

_TESTS = ("public_tests", "private_tests", "generated_tests")


def convert(row: Row) -> Problem:
    """Return the description and its tests."""
    request = get_text(row, "description").strip()
    if "<image>" in request:
        raise RowError("description", "it shows a picture")
    if get_optional_text(row, "input_file"):
        raise RowError("input_file", "the program would read a file")
    pairs: list[tuple[str, str]] = []
    for column in _TESTS:
        tests = require_mapping(row.get(column) or {"input": [], "output": []}, column)
        pairs += check_streams(get_texts(tests, "input"), get_texts(tests, "output"), column)
    if not pairs:
        raise RowError(_TESTS[0], "no test")
    return build_code_problem(f"{request}\n{STREAMS_NOTE}", "code_contests", streams=pairs)


LAYOUT = LayoutInfo(
    convert,
    tasks=("code",),
    columns=("description", "public_tests"),
    optional=("private_tests", "generated_tests", "input_file"),
    doc="CodeContests: programs that read and print",
)
