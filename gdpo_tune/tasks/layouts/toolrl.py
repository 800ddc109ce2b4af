"""ToolRL: `prompt` is a list of messages, `reward_model` a mapping whose `ground_truth` is right.

The ground truth is the right answer itself: `<think>...</think>` and then a `<tool_call>` block
with one JSON object a line, a `<response>` block, or both. Or it is the calls alone, as a JSON
list. A call has `name` and `parameters`, which may also be called `arguments`. A column `tools`, a
list of tools or its JSON, is shown above the messages; without it, the system message describes
them.

Source: arXiv 2504.13958; `dataset/rlla_4k` of github.com/qiancheng0/ToolRL.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gdpo_tune.core.registry import LayoutInfo
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data.columns import (
    Row,
    RowError,
    get_text,
    parse_json,
    require_list,
    require_mapping,
)

_TRUTH = "reward_model"


def convert(row: Row) -> Problem:
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


LAYOUT = LayoutInfo(
    convert,
    tasks=("tools",),
    columns=("prompt", "reward_model"),
    optional=("tools",),
    doc="ToolRL: messages, and the right answer with its tool calls",
)
