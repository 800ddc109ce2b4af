"""Layouts of data sets for `code`; see `layouts`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from gdpo_tune.core.task_info import LayoutInfo
from gdpo_tune.sandbox.jobs import read_assert
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.columns import (
    Row,
    RowError,
    get_optional_text,
    get_text,
    parse_json,
    require_list,
    require_mapping,
    require_texts,
)
from gdpo_tune.tasks.execution import STREAMS_NOTE, build_code_problem, check_assert, check_streams
from gdpo_tune.tasks.text_rewards import write_answer

# APPS: `question`, and `input_output`, JSON with `inputs`, `outputs` and perhaps `fn_name`.
#
# With a function name, each input is a list of arguments. An output may be right as it stands or
# as the only item of a list, a tuple counts as a list, and keys of a dict are whole numbers if they
# read as such, because JSON has no others. The method of a class Solution is called if the program
# defines one, whatever the shown `starter_code` begins. Without a name, the program reads its input
# and prints. The judge imports some names, and gives each test four seconds. `solutions` and `url`
# are not used.
#
# Source: arXiv 2105.09938; columns of `codeparrot/apps`, and `eval/testing_util.py` of
# github.com/hendrycks/apps, whose rule of comparison `sandbox/guest/grading.py` has.

_IO = "input_output"
_APPS_HEAD = """import sys
import time
import itertools
from itertools import accumulate, product, permutations, combinations
import collections
from collections import Counter, OrderedDict, deque, defaultdict, ChainMap
from functools import lru_cache
import math
from math import sqrt, sin, cos, tan, ceil, fabs, floor, gcd, exp, log, log2
import fractions
from typing import Any, Dict, List, Optional, Set, Tuple
try:
    import numpy as np
except ImportError:
    pass
import random
import heapq
from heapq import *"""
"""Imports of its judge; those of types are what sites with such starter code import beforehand."""
_APPS_RULES: dict[str, Any] = {"head": _APPS_HEAD, "comparison": "apps", "seconds": 4.0}


def convert_apps(row: Row) -> Problem:
    """Return the question with its starter code, and its tests; the family is the difficulty."""
    question = get_text(row, "question").strip()
    starter = get_optional_text(row, "starter_code").strip()
    family = get_optional_text(row, "difficulty") or "apps"
    tests = require_mapping(parse_json(get_text(row, _IO), _IO), _IO)
    inputs, outputs = (require_list(tests.get(key), _IO) for key in ("inputs", "outputs"))
    if not inputs or len(inputs) != len(outputs):
        raise RowError(_IO, f"{len(inputs)} inputs and {len(outputs)} outputs")
    function = tests.get("fn_name")
    request = f"{question}\n{starter}\n" if starter else f"{question}\n"
    if not function:
        texts = [
            [v if isinstance(v, str) else "\n".join(map(str, require_list(v, _IO))) for v in values]
            for values in (inputs, outputs)
        ]
        pairs = check_streams(texts[0], texts[1], _IO)
        return build_code_problem(request + STREAMS_NOTE, family, streams=pairs, **_APPS_RULES)
    if not isinstance(function, str) or not function.isidentifier():
        raise RowError(_IO, f"fn_name is {function!r}, which is not a function name")
    if not starter:
        request += f"Write a function {function}.\n"
    calls = zip(map(_read_keys, inputs), map(_read_keys, outputs), strict=True)
    tests = _write_calls(function, calls, _IO)
    return build_code_problem(request, family, **tests, **_APPS_RULES)


def _read_keys(value: Any) -> Any:
    """Return a dict, or the dicts in a list, with whole keys if all of them read as such."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_read_keys(item) if isinstance(item, dict) else item for item in items]
    with suppress(ValueError):
        if isinstance(value, dict):
            return {int(key): item for key, item in cast("dict[str, Any]", value).items()}
    return value


def _write_calls(function: str, calls: Iterable[tuple[Any, object]], column: str) -> dict[str, Any]:
    """Return the part of a problem that calls a function, or the method of a class Solution."""
    asserts: list[str] = []
    for arguments, expected in calls:
        given = ", ".join(map(repr, require_list(arguments, column)))
        test = check_assert(f"assert {function}({given}) == {expected!r}", column)
        if read_assert(test) is None:
            raise RowError(column, f"a value that Python cannot write: {test[:80]}")
        asserts.append(test)
    tail = f"if hasattr(globals().get('Solution'), '{function}'): {function} = "
    return {"function": function, "asserts": asserts, "tail": f"{tail}Solution().{function}"}


def _write_first_program(programs: Iterable[str]) -> str:
    for program in programs:
        with suppress(RowError):
            _parse(program, "solutions")
            return write_answer("", program.strip())
    raise RowError("solutions", "no solution in Python 3")


APPS = LayoutInfo(
    convert_apps,
    write_reference=lambda row: _write_first_program(
        require_texts(parse_json(row.get("solutions"), "solutions"), "solutions")
    ),
    tasks=("code",),
    columns=("question", "input_output"),
    optional=("difficulty", "starter_code", "solutions"),
    doc="APPS: functions with arguments and results, or programs that read and print",
)


# CodeContests: `description`, and `public_tests`, `private_tests`, `generated_tests`.
#
# Each of the three is a mapping of `input` and `output`, lists of texts. Public tests come first,
# as `execution.MOST_TESTS` are kept. Problems that read a file instead of standard input, or show a
# picture (`<image>`), cannot be solved here and are left out. `time_limit` is that of one test.
#
# Source: Science 378 (2022), AlphaCode; columns of `deepmind/code_contests`, and `OutputsMatch` of
# its judge (`execution/tester_sandboxer.cc`), whose rule `sandbox/guest/grading.py` has.

_CONTEST_TESTS = ("public_tests", "private_tests", "generated_tests")


def convert_code_contests(row: Row) -> Problem:
    """Return the description and its tests."""
    request = get_text(row, "description").strip()
    if "<image>" in request:
        raise RowError("description", "it shows a picture")
    if get_optional_text(row, "input_file"):
        raise RowError("input_file", "the program would read a file")
    pairs: list[tuple[str, str]] = []
    for column in _CONTEST_TESTS:
        tests = require_mapping(row.get(column) or {"input": [], "output": []}, column)
        pairs += check_streams(tests.get("input"), tests.get("output"), column)
    if not pairs:
        raise RowError(_CONTEST_TESTS[0], "no test")
    limit = require_mapping(row.get("time_limit") or {}, "time_limit")
    seconds, nanos = (limit.get(key) or 0 for key in ("seconds", "nanos"))
    if not all(isinstance(part, (int, float)) and 0 <= part <= 1e10 for part in (seconds, nanos)):
        raise RowError("time_limit", f"{limit} is no number of seconds and nanos")
    return build_code_problem(
        f"{request}\n{STREAMS_NOTE}",
        "code_contests",
        streams=pairs,
        comparison="code_contests",
        seconds=seconds + nanos / 1e9,
    )


_PYTHON_3 = (3, "PYTHON3")
"""How `solutions.language` names it: a class of the released data, or its name."""


def _write_code_contests(row: Row) -> str:
    solutions = require_mapping(row.get("solutions"), "solutions")
    languages = require_list(solutions.get("language"), "solutions")
    programs = zip(languages, require_texts(solutions.get("solution"), "solutions"), strict=False)
    return _write_first_program(text for language, text in programs if language in _PYTHON_3)


CODE_CONTESTS = LayoutInfo(
    convert_code_contests,
    write_reference=_write_code_contests,
    tasks=("code",),
    columns=("description", "public_tests"),
    optional=("private_tests", "generated_tests", "input_file", "time_limit", "solutions"),
    doc="CodeContests: programs that read and print",
)


# HumanEval: `prompt` is the head of a function, `test` defines `check(candidate)`.
#
# The prompt stands above the policy's program, so its imports and helpers are there even if the
# program does not repeat them. The function that the program defines replaces the empty one. The
# asserts of `check` are one test. `entry_point` may be a method: `Solution().f`, or `f` in a class.
#
# Source: arXiv 2107.03374; columns of `openai/openai_humaneval`; arXiv 2504.14655 for methods.


def convert_humaneval(row: Row) -> Problem:
    """Return the function to complete, and its check."""
    prompt, function, test = (get_text(row, name) for name in ("prompt", "entry_point", "test"))
    owner, _, name = function.rpartition("().")
    if not name.isidentifier() or not (owner or f"def {name}(" in prompt):
        raise RowError("entry_point", f"{function!r} is no function that the prompt begins")
    if not owner and f"\ndef {name}(" not in f"\n{prompt}".replace("\nasync ", "\n"):
        classes = re.findall(r"^class (\w+)", prompt.partition(f"def {name}(")[0], re.MULTILINE)
        owner = classes[-1] if classes else ""
    if "def check(" not in test:
        raise RowError("test", "does not define check(candidate)")
    request = f"Complete this function.\n{prompt.rstrip()}\n"
    try:
        _parse(prompt, "prompt")
    except RowError:
        # A head without a docstring is no Python until its function has a body.
        indent = re.search(rf"^[ \t]*(?=(?:async )?def {name}\()", prompt, re.MULTILINE)
        prompt = f"{prompt.rstrip()}\n{indent[0] if indent else ''}    pass\n"
    check = f"{test}\ncheck({owner + '().' if owner else ''}{name})"
    check = check_assert(check, "test", prompt, name)
    return build_code_problem(request, "humaneval", function=name, head=prompt, asserts=[check])


HUMANEVAL = LayoutInfo(
    convert_humaneval,
    write_reference=lambda row: write_answer(
        "", get_text(row, "prompt") + get_text(row, "canonical_solution")
    ),
    tasks=("code",),
    columns=("prompt", "entry_point", "test"),
    optional=("canonical_solution",),
    doc="HumanEval: the head of a function, and `check(candidate)`",
)


# MBPP: `text` asks for a function, `code` is a solution, `test_list` has asserts.
#
# The first test is shown, because the function's name and arguments are nowhere else; all are run.
# `test_setup_code` and, in the sanitized edition, `test_imports` are run before each test, apart
# from the policy's program, whose classes they may use.
#
# Source: arXiv 2108.07732; columns of `google-research-datasets/mbpp`, both configurations.


def _convert_mbpp(row: Row, column: str, setup: str, setup_column: str) -> Problem:
    tests = [
        check_assert(test, "test_list") for test in require_texts(row.get("test_list"), "test_list")
    ]
    if not tests:
        raise RowError("test_list", "no test")
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    solution = _parse(get_text(row, "code"), "code")
    definitions = {node.name for node in solution.body if isinstance(node, kinds)}
    for call in ast.walk(_parse(tests[0], "test_list")):
        match call:
            case ast.Call(func=ast.Name(id=function)) if function in definitions:
                break
            case _:
                pass
    else:
        reason = f"the first test calls nothing that the code defines: {tests[0]!r}"
        raise RowError("test_list", reason)
    _parse(setup, setup_column)
    example = f"The function must pass this test:\n{tests[0].strip()}\n"
    request = f"{get_text(row, column).strip()}\n{example}"
    setup = f"{setup.strip()}\n" if setup.strip() else ""
    asserts = [check_assert(setup + test, setup_column, function=function) for test in tests]
    return build_code_problem(request, "mbpp", function=function, asserts=asserts)


def _parse(source: str, column: str) -> ast.Module:
    try:
        return ast.parse(source.replace("\r\n", "\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowError(column, f"not Python: {error}") from error


def _write_mbpp(row: Row) -> str:
    return write_answer("", get_text(row, "code").replace("\r\n", "\n"))


MBPP = LayoutInfo(
    lambda row: _convert_mbpp(
        row, "text", get_optional_text(row, "test_setup_code"), "test_setup_code"
    ),
    write_reference=_write_mbpp,
    tasks=("code",),
    columns=("text", "code", "test_list"),
    optional=("test_setup_code",),
    doc="MBPP, full edition: a text and asserts, of which the first is shown",
)
MBPP_SANITIZED = LayoutInfo(
    lambda row: _convert_mbpp(
        row,
        "prompt",
        "\n".join(require_texts(row.get("test_imports"), "test_imports")),
        "test_imports",
    ),
    write_reference=_write_mbpp,
    tasks=("code",),
    columns=("prompt", "code", "test_list", "test_imports"),
    doc="MBPP, sanitized edition",
)
