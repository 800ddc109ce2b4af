"""Layouts of data sets for `math`, `gsm8k` and `tools`: a function of a row, and its `LayoutInfo`.

A function raises `RowError` for a row that cannot become a problem.

`Problem.data` is what the tasks agree on: for `math` and `gsm8k` `{"answer": text}`; for `tools`
`{"calls": [{"name", "parameters"}], "response": bool}`; for `code` see `execution`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gdpo_tune.core.task_info import LayoutInfo
from gdpo_tune.tasks.answers import extract_box, find_answer_problem
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.columns import (
    Row,
    RowError,
    get_answer,
    get_optional_text,
    get_text,
    parse_json,
    require_list,
    require_mapping,
)
from gdpo_tune.tasks.text_rewards import normalize_number, write_answer
from gdpo_tune.tasks.tool_rewards import write_calls

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
    write_reference=lambda row: write_answer(
        get_text(row, "answer").rpartition("####")[0].strip(),
        convert_openai_gsm8k(row).data["answer"],
    ),
    tasks=("math", "gsm8k"),
    columns=("question", "answer"),
    doc="word problems; the number after `####` is the answer",
)


# MATH: `problem`, and `solution` whose last `\boxed{...}` is the answer, or `answer`, or both.
#
# `answer`, as in MATH-500, AIME and AMC, is used if it is there; it may be a number or a list.
# Answers are LaTeX; `level` and `type` are not used.
#
# Source: arXiv 2103.03874; columns of the released data and of its copies on the Hub.


def read_math_answer(row: Row) -> str:
    """Return the answer that a row states, or else that of its solution."""
    if row.get("answer") not in (None, "") or "solution" not in row:
        return require_comparable(get_answer(row, "answer"), "answer")
    answer = extract_box(get_text(row, "solution"))
    if not answer:
        raise RowError("solution", r"no answer in \boxed{...}")
    return require_comparable(answer, "solution")


def require_comparable(answer: str, column: str) -> str:
    """Return an answer that completions can be compared with."""
    if reason := find_answer_problem(answer):
        raise RowError(column, reason)
    return answer


MATH = LayoutInfo(
    lambda row: Problem(
        get_text(row, "problem").strip() + "\n", "math", {"answer": read_math_answer(row)}
    ),
    write_reference=lambda row: write_answer(
        solution := get_optional_text(row, "solution").strip(),
        extract_box(solution) or read_math_answer(row),
    ),
    tasks=("math", "gsm8k"),
    columns=("problem",),
    one_of=("answer", "solution"),
    optional=("answer", "solution"),
    doc="MATH, MATH-500, AIME, AMC: the column `answer`, or the last `\\boxed{}` of the solution",
)


# Questions with their answers alone, in the columns in which each set was released.
#
# A context or body stands above the question. Of the answers of ASDiv the unit is left out:
# `9 (apples)`. OlympiadBench's `error` is the tolerance of an answer. The reference solution is the
# equation, where a set has it (`( 290.0 / 2.0 )` of SVAMP, `7+2=9` of ASDiv), and the answer.
# `verl` is the form of verl's training files.
#
# Source: arXiv 2103.07191 (SVAMP), arXiv 2106.15772 (ASDiv), NAACL 2016 (MAWPS), arXiv 2402.14008
# (OlympiadBench); columns of the released data and in `evaluation/data` of
# github.com/QwenLM/Qwen2.5-Math.

_TRUTH = "reward_model"
_QUESTIONS = ("Body", "body", "Question", "question", "input", "prompt")
_EQUATIONS = ("Equation", "formula")
_ANSWERS = ("Answer", "answer", "target", "final_answer", _TRUTH)


def convert_question(row: Row) -> Problem:
    """Return context, body and question as one text, and the answer as `data["answer"]`."""
    texts = [get_optional_text(row, "context").strip()]
    texts += [get_text(row, column).strip() for column in _QUESTIONS if column in row]
    column = next((column for column in _ANSWERS if column in row), "answer")
    found = row.get(column)
    if column == _TRUTH:
        found = require_mapping(parse_json(found, column), column).get("ground_truth")
        if isinstance(found, str) and found.lstrip().startswith('{"'):  # as Eurus-2-RL-Data mixes
            raise RowError(column, "tests or a table in JSON, not an answer of mathematics")
    answer = require_comparable(get_answer({column: found}, column), column)
    if "body" in row:
        answer = re.sub(r"(?<=\S)\s*\([^()]*\)$", "", answer)
    data: dict[str, Any] = {
        "answer": normalize_number(answer) if {"target", "Answer"} & {*row} else answer
    }
    if row.get("error") not in (None, ""):
        try:
            data["tolerance"] = float(get_answer(row, "error"))
        except ValueError as error:
            raise RowError("error", f"{row['error']!r} is no number") from error
    return Problem(" ".join(filter(None, texts)) + "\n", "math", data)


def write_equation(row: Row) -> str:
    """Return a completion whose thought is the equation of a row, and its answer."""
    answer = convert_question(row).data["answer"]
    equation = next((get_optional_text(row, name) for name in _EQUATIONS if name in row), "")
    equation = re.sub(r"(\d)\.0\b", r"\1", re.sub(r"^\( | \)$", "", equation.strip()))
    whole = "=" in equation or not equation
    return write_answer(equation if whole else f"{equation} = {answer}", answer)


def _describe_questions(doc: str, *columns: str, optional: tuple[str, ...] = ()) -> LayoutInfo:
    return LayoutInfo(
        convert_question,
        write_reference=write_equation,
        tasks=("math", "gsm8k"),
        columns=columns,
        optional=optional,
        doc=doc,
    )


QUESTION_ANSWER = _describe_questions(
    "questions whose answer stands alone: a text, a number or a list", "question", "answer"
)
SVAMP = _describe_questions(
    *("SVAMP: a body and a question", "Body", "Question", "Answer"), optional=("Equation",)
)
ASDIV = _describe_questions(
    *("ASDiv: a body and a question; the answer with its unit", "body", "question", "answer"),
    optional=("formula",),
)
MAWPS = _describe_questions("MAWPS: the target is a number", "input", "target")
OLYMPIADBENCH = _describe_questions(
    *("OlympiadBench: a list of final answers", "question", "final_answer"),
    optional=("context", "error"),
)
VERL = _describe_questions("verl: messages; `ground_truth` is right", "prompt", _TRUTH)


# ToolRL: `prompt` is a list of messages, `reward_model` a mapping whose `ground_truth` is right.
#
# The ground truth is the right answer itself: `<think>...</think>` and then a `<tool_call>` block
# with one JSON object a line, a `<response>` block, or both. Or it is the calls alone, as a JSON
# list. A call has `name` and `parameters`, which may also be called `arguments`. A column `tools`,
# a list of tools or its JSON, is shown above the messages; without it, the system message describes
# them.
#
# Source: arXiv 2504.13958; `dataset/rlla_4k` of github.com/qiancheng0/ToolRL.


def convert_toolrl(row: Row) -> Problem:
    """Return the messages as one text, the right `calls`, and whether a `response` is due."""
    _, calls, response = _read_truth(row)
    if not calls and not response:
        raise RowError(_TRUTH, "the ground truth has neither a tool call nor a response")
    return Problem(_write_prompt(row), "toolrl", {"calls": calls, "response": response})


def _read_truth(row: Row) -> tuple[str, list[dict[str, Any]], bool]:
    """Return the right answer as a completion, its calls, and whether it has a response."""
    truth = require_mapping(row.get(_TRUTH), _TRUTH).get("ground_truth")
    if not isinstance(truth, str) or truth.lstrip().startswith("["):
        listed = require_list(parse_json(truth, _TRUTH), f"{_TRUTH}.ground_truth")
        calls = list(map(parse_call, listed))
        return write_calls("", calls), calls, False
    block, response = (
        re.search(f"<{tag}>(.*?)</{tag}>", truth.rpartition("</think>")[2], flags=re.DOTALL)
        for tag in ("tool_call", "response")
    )
    lines = [line for line in (block[1] if block else "").split("\n") if line.strip()]
    calls = [parse_call(parse_json(line, _TRUTH)) for line in lines]
    return truth.strip(), calls, response is not None


def parse_call(call: object) -> dict[str, Any]:
    """Return a call as rewards read it: its `name`, and its `parameters` or `arguments`."""
    fields = require_mapping(call, _TRUTH)
    name = fields.get("name")
    parameters = parse_json(fields.get("parameters", fields.get("arguments")), _TRUTH)
    if not isinstance(name, str) or not isinstance(parameters, dict):
        raise RowError(_TRUTH, "a call needs a name and an object of parameters")
    return {"name": name, "parameters": parameters}


def _write_prompt(row: Row) -> str:
    """Return tools and messages of a row; no roles: a chat template sees one message."""
    texts: list[str] = []
    if row.get("tools"):
        listed = require_list(parse_json(row["tools"], "tools"), "tools")
        lines = [tool if isinstance(tool, str) else json.dumps(tool) for tool in listed]
        texts.append("\n".join(["Tools:", *lines]))
    said = require_list(row.get("prompt"), "prompt")
    if not said:
        raise RowError("prompt", "no message")
    for index, message in enumerate(said):
        fields = require_mapping(message, f"prompt[{index}]")
        texts.append(get_text(fields, "content").strip())
    return "\n\n".join(texts) + "\n"


TOOLRL = LayoutInfo(
    convert_toolrl,
    write_reference=lambda row: _read_truth(row)[0],
    tasks=("tools",),
    columns=("prompt", "reward_model"),
    optional=("tools",),
    keeps_messages=True,
    doc="ToolRL: messages, and the right answer with its tool calls",
)


# Demonstrations of ToolRL: `instruction` and `input` are the messages, `output` is right.
#
# Source: `dataset/rlla_sft.json` of github.com/qiancheng0/ToolRL.


def _arrange_demonstration(row: Row) -> Row:
    texts = [get_text(row, "instruction"), get_optional_text(row, "input")]
    truth = {"ground_truth": get_text(row, "output")}
    return {"prompt": [{"content": text} for text in texts if text], _TRUTH: truth}


RLLA_SFT = LayoutInfo(
    lambda row: convert_toolrl(_arrange_demonstration(row)),
    write_reference=lambda row: _read_truth(_arrange_demonstration(row))[0],
    tasks=("tools",),
    columns=("instruction", "output"),
    optional=("input",),
    doc="demonstrations of ToolRL: instruction, input, and the right answer with its tool calls",
)
