"""Layouts of data sets for `math`, `gsm8k` and `tools`: a function of a row, and its `LayoutInfo`.

A function raises `RowError` for a row that cannot become a problem: a column is missing or not of
its kind, there is no test, or the answer cannot be parsed.

`Problem.data` is what the tasks agree on: for `math` and `gsm8k` `{"answer": text}`; for `tools`
`{"calls": [{"name", "parameters"}], "response": bool}`; for `code` see `execution`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gdpo_tune.core.task_info import LayoutInfo
from gdpo_tune.tasks.answers import normalize_number
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data_rows import (
    Row,
    RowError,
    get_optional_text,
    get_text,
    parse_json,
    require_list,
    require_mapping,
)

# GSM8K: `question`, and `answer` that ends with `#### ` and a number.
#
# The number is written plainly (`1,000`, `$18` and `18.0` become `1000`, `18`, `18`). Otherwise the
# rewards for a correct and for a whole answer would contradict each other. The steps before it are
# not used.
#
# Source: arXiv 2110.14168; columns of `openai/gsm8k`.

_PLAIN = re.compile(r"-?\d+(?:\.\d+)?", flags=re.ASCII)


def convert_openai_gsm8k(row: Row) -> Problem:
    """Return the question, and the number as `data["answer"]`, also as it is written."""
    _, mark, last = get_text(row, "answer").rpartition("####")
    if not mark:
        raise RowError("answer", "no '####' with the result after it")
    # Some exporters put a blank after the sign or between groups of digits.
    answer = normalize_number(re.sub(r"(?<=[-+\d,$])\s+(?=[\d$])", "", last))
    if not _PLAIN.fullmatch(answer):
        raise RowError("answer", f"{last.strip()!r} after '####' is not a number")
    data = {"answer": answer, "written_answer": last.strip()}
    return Problem(get_text(row, "question").strip() + "\n", "gsm8k", data)


GSM8K = LayoutInfo(
    convert_openai_gsm8k,
    tasks=("math", "gsm8k"),
    columns=("question", "answer"),
    doc="word problems; the number after `####` is the answer",
)


# MATH: `problem`, and `solution` whose last `\boxed{...}` is the answer.
#
# A column `answer`, as in MATH-500, is used instead if it is there. Answers are LaTeX; `level` and
# `type` are not used.
#
# Source: arXiv 2103.03874; columns of the released data and of its copies on the Hub.

_BOXES = (r"\boxed", r"\fbox")


def convert_competition_math(row: Row) -> Problem:
    """Return the problem, and the answer as `data["answer"]`."""
    answer = get_optional_text(row, "answer").strip() or extract_box(get_text(row, "solution"))
    if not answer:
        raise RowError("solution", r"no answer in \boxed{...}")
    return Problem(get_text(row, "problem").strip() + "\n", "math", {"answer": answer})


def extract_box(solution: str) -> str:
    r"""Return the content of the last `\boxed{...}`, inner braces included; empty without one.

    `\boxed 7` holds the one character.
    """
    start, name = max((solution.rfind(box), box) for box in _BOXES)
    if start < 0:
        return ""
    rest = solution[start + len(name) :].lstrip()
    if not rest.startswith("{"):
        return rest[:1]
    depth = 0
    for index, character in enumerate(rest):
        escaped = index > 0 and rest[index - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:index].strip()
    return ""


MATH = LayoutInfo(
    convert_competition_math,
    tasks=("math", "gsm8k"),
    columns=("problem", "solution"),
    optional=("answer",),
    doc="MATH: the last `\\boxed{}` of the solution is the answer, or the column `answer`",
)


# ToolRL: `prompt` is a list of messages, `reward_model` a mapping whose `ground_truth` is right.
#
# The ground truth is the right answer itself: `<think>...</think>` and then a `<tool_call>` block
# with one JSON object a line, a `<response>` block, or both. Or it is the calls alone, as a JSON
# list. A call has `name` and `parameters`, which may also be called `arguments`. A column `tools`, a
# list of tools or its JSON, is shown above the messages; without it, the system message describes
# them.
#
# Source: arXiv 2504.13958; `dataset/rlla_4k` of github.com/qiancheng0/ToolRL.

_TRUTH = "reward_model"


def convert_toolrl(row: Row) -> Problem:
    """Return the messages as one text, the right `calls`, and whether a `response` is due."""
    truth = require_mapping(row.get(_TRUTH), _TRUTH).get("ground_truth")
    if isinstance(truth, str) and not truth.lstrip().startswith("["):
        calls, response = _parse_truth(truth)
    else:
        listed = require_list(parse_json(truth, _TRUTH), f"{_TRUTH}.ground_truth")
        calls = list(map(_parse_call, listed))
        response = False
    if not calls and not response:
        raise RowError(_TRUTH, "the ground truth has neither a tool call nor a response")
    prompt = "\n\n".join([*_show_tools(row), *_get_messages(row)]) + "\n"
    return Problem(prompt, "toolrl", {"calls": calls, "response": response})


def _parse_truth(truth: str) -> tuple[list[dict[str, Any]], bool]:
    block, response = (
        re.search(f"<{tag}>(.*?)</{tag}>", truth, flags=re.DOTALL)
        for tag in ("tool_call", "response")
    )
    lines = [line for line in (block[1] if block else "").split("\n") if line.strip()]
    return [_parse_call(parse_json(line, _TRUTH)) for line in lines], response is not None


def _parse_call(call: object) -> dict[str, Any]:
    fields = require_mapping(call, _TRUTH)
    name = fields.get("name")
    parameters = parse_json(fields.get("parameters", fields.get("arguments")), _TRUTH)
    if not isinstance(name, str) or not isinstance(parameters, dict):
        raise RowError(_TRUTH, "a call needs a name and an object of parameters")
    return {"name": name, "parameters": parameters}


def _show_tools(row: Row) -> list[str]:
    tools = row.get("tools")
    if not tools:
        return []
    listed = require_list(parse_json(tools, "tools"), "tools")
    lines = [tool if isinstance(tool, str) else json.dumps(tool) for tool in listed]
    return ["\n".join(["Tools:", *lines])]


def _get_messages(row: Row) -> list[str]:
    """Return the texts without roles: the policy's chat template sees one message."""
    messages = require_list(row.get("prompt"), "prompt")
    if not messages:
        raise RowError("prompt", "no message")
    return [
        get_text(require_mapping(message, f"prompt[{index}]"), "content").strip()
        for index, message in enumerate(messages)
    ]


TOOLRL = LayoutInfo(
    convert_toolrl,
    tasks=("tools",),
    columns=("prompt", "reward_model"),
    optional=("tools",),
    doc="ToolRL: messages, and the right answer with its tool calls",
)
