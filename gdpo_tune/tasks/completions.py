"""Completions that a person judges: lines of JSON, each with a row of the data or a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import SpecProblem, UsageError
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.core.settings import DataSettings
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.core.text import format_count
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.columns import (
    SURROGATE,
    RowError,
    get_text,
    parse_json,
    require_list,
    require_mapping,
)
from gdpo_tune.tasks.custom import collect_rows
from gdpo_tune.tasks.data_rows import convert_row, name_columns
from gdpo_tune.tasks.execution import build_stated_problem
from gdpo_tune.tasks.layouts import parse_call

FACTS = {
    "math": ("answer",),
    "gsm8k": ("answer", "written_answer"),
    "tools": ("calls", "response"),
    "code": ("function", "head", "tail", "asserts", "streams"),
}
"""Task -> columns that a line with a `prompt` may have."""
MOST_LISTED = 20
"""Wrong lines that an error lists: a wrong form is that of all lines."""


def read_stated_completions(
    file: Path, task: str, data: DataSettings
) -> list[tuple[int, Problem, str]]:
    """Return the number, problem and completion of each line that is not blank.

    `task` and `data` are those of the search space.

    Raises:
        UsageError: every line that cannot be used, with its place, value, reason and fix.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        reason = f"--completions {file} cannot be read: {error.strerror}"
        raise UsageError(f"{reason}\n    fix: name a file of JSON lines") from error
    columns = ", ".join(f'"{name}": ...' for name in FACTS.get(task, ("column",)))
    fix = (
        f'write {{"completion": "...", "prompt": "...", {columns}}}, or {{"completion": "...", '
        '"row": {...}} with the columns of the data'
    )
    found: list[tuple[int, Problem, str]] = []
    problems: list[SpecProblem] = []
    first: tuple[str, ...] = ()
    for number, source in enumerate(lines, 1):
        if not source.strip():
            continue
        line: dict[str, Any] = {}
        try:
            line = require_mapping(parse_json(source, "line"), "line")
            completion = line.pop("completion", None)
            if not isinstance(completion, str) or SURROGATE.search(completion):
                raise RowError("completion", "missing, or not a text that a tokenizer reads")
            problem = _build_stated_problem(task, data, line)
            form = ("messages" if problem.turns else "a text", *sorted(problem.data))
            first = first or form
            if is_task_file(task) and form != first:
                raise RowError("prompt", f"unlike the first line, which has {', '.join(first)}")
            found.append((number, problem, completion))
        except RowError as error:
            row = line.get("row")
            value = {**(row if isinstance(row, dict) else {}), **line}.get(error.column)
            shown = "" if value is None else repr(value)[:60]
            problems.append(SpecProblem(f"{file}:{number}", error.column, shown, error.reason, fix))
    if problems or not found:
        listed = (
            "\n".join(map(str, problems[:MOST_LISTED])) or f"{file}: it has no line\n    fix: {fix}"
        )
        first_ones = f", of which the first {MOST_LISTED}" if len(problems) > MOST_LISTED else ""
        count = format_count(len(problems), "problem")
        raise UsageError(f"{count} in --completions{first_ones}\n{listed}")
    return found


def _build_stated_problem(task: str, data: DataSettings, line: Mapping[str, Any]) -> Problem:
    if "row" not in line and "prompt" not in line and line:
        raise RowError("prompt", "missing; if it has another name, rename that to prompt")
    if ("row" in line) == ("prompt" in line) or ("row" in line and len(line) > 1):
        raise RowError(
            ", ".join(line) or "row",
            "beside completion stands row alone, or prompt with the columns that rewards take",
        )
    stated = require_mapping(line["row"], "row") if "row" in line else dict(line)
    if is_task_file(task):
        try:
            (problem,) = collect_rows([stated]).values()
        except UsageError as error:
            reason = str(error).partition("\n")[0].removeprefix("rows(): ")
            raise RowError("prompt", reason.replace("row 0", "this line")) from error
        return problem
    if "row" in line:
        if not data.layout:
            raise RowError("row", "the search space has no data.layout that says what columns mean")
        layout = describe_layout(data.layout)
        for name, column in data.columns.items():
            if name in layout.columns and column not in stated:
                present = ", ".join(stated) or "nothing"
                raise RowError(column, f"this column of the data is missing; row has {present}")
        return convert_row(layout, name_columns(data, stated, layout))
    prompt = get_text(stated, "prompt")
    del stated["prompt"]
    known = FACTS[task]
    for name in stated:
        if name not in known:
            reason = f"no column that the task {task} takes; these are {', '.join(known)}"
            raise RowError(name, reason)
    if task in ("math", "gsm8k"):
        answers = {name: get_text(stated, name) for name in ("answer", *stated)}
        return Problem(prompt, "stated", answers)
    if task == "tools":
        calls = [parse_call(call) for call in require_list(stated.get("calls"), "calls")]
        response = bool(stated.get("response", not calls))
        return Problem(prompt, "stated", {"calls": calls, "response": response})
    return build_stated_problem(prompt, stated)
