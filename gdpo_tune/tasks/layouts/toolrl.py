"""ToolRL: `prompt` is a list of messages, `reward_model` a mapping whose `ground_truth` is right.

The ground truth is the right answer itself, `<think>...</think>` and then a `<tool_call>` block
with one JSON object a line, a `<response>` block, or both; or the calls alone, as a JSON list. A
call has `name` and `parameters` (`arguments` is read, too). Where there is a column `tools`, a list
of tools or its JSON, it is shown above the messages; else the system message describes them.

Source: arXiv 2504.13958; `dataset/rlla_4k` of github.com/qiancheng0/ToolRL.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data.columns import Row, RowError, from_json, kind, mapping, sequence, text

_TRUTH = "reward_model"
_BLOCK = r"<{0}>(.*?)</{0}>"


def problem(row: Row) -> Problem:
    """The messages as one text; `data` has the right `calls`, and whether a `response` is due.

    Raises:
        RowError: a column is not of this kind, a call is broken, or the truth says nothing.
    """
    truth = mapping(row.get(_TRUTH), _TRUTH).get("ground_truth")
    if isinstance(truth, str) and not truth.lstrip().startswith("["):
        calls, response = _of_text(truth)
    else:
        listed = from_json(truth, _TRUTH) if isinstance(truth, str) else truth
        calls = [_call(call) for call in sequence(listed, f"{_TRUTH}.ground_truth")]
        response = False
    if not calls and not response:
        raise RowError(_TRUTH, "the ground truth has neither a tool call nor a response")
    prompt = "\n\n".join([*_tools(row), *_messages(row)]) + "\n"
    return Problem(prompt, "toolrl", {"calls": calls, "response": response})


def _of_text(truth: str) -> tuple[list[dict[str, Any]], bool]:
    block = _block("tool_call", truth)
    lines = [line for line in (block or "").split("\n") if line.strip()]
    return [_call(from_json(line, _TRUTH)) for line in lines], _block("response", truth) is not None


def _block(tag: str, truth: str) -> str | None:
    found = re.search(_BLOCK.format(tag), truth, flags=re.DOTALL)
    return found[1] if found else None


def _call(call: object) -> dict[str, Any]:
    fields = mapping(call, _TRUTH)
    name, parameters = fields.get("name"), fields.get("parameters", fields.get("arguments"))
    if isinstance(parameters, str):
        parameters = from_json(parameters, _TRUTH)
    if not isinstance(name, str) or not isinstance(parameters, dict):
        raise RowError(_TRUTH, "a call needs a name and an object of parameters")
    return {"name": name, "parameters": parameters}


def _tools(row: Row) -> list[str]:
    tools = row.get("tools")
    if not tools:
        return []
    listed = sequence(from_json(tools, "tools") if isinstance(tools, str) else tools, "tools")
    lines = [tool if isinstance(tool, str) else json.dumps(tool) for tool in listed]
    return ["\n".join(["Tools:", *lines])]


def _messages(row: Row) -> list[str]:
    """The messages' texts. Roles are left to the policy's chat template, which sees one message."""
    messages = sequence(row.get("prompt"), "prompt")
    if not messages:
        raise RowError("prompt", "no message")
    found: list[str] = []
    for message in messages:
        if not isinstance(message, dict):
            raise RowError("prompt", f"a message is not a mapping but {kind(message)}")
        found.append(text(message, "content").strip())
    return found
