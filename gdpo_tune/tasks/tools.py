"""The tools task: answer a request with calls of the tools on offer, in few tokens.

Problems are synthetic. `amount` hides serial arithmetic in one argument, which a small policy
rarely gets right in one pass, so correctness and length really conflict. `pair` asks for two calls
of one tool, the second argument relative to the first; `plain` only copies. Requests of two splits
never have the same calculation, whatever tool and subject they name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.generation import (
    LARGEST,
    ArithmeticStep,
    Family,
    build_problem,
    draw_problems,
    draw_steps,
)
from gdpo_tune.tasks.task import BuiltInTask
from gdpo_tune.tasks.text_rewards import length, mean_length
from gdpo_tune.tasks.tool_rewards import (
    agreement,
    exact_calls,
    released_tool_calls,
    released_tool_format,
    tool_calls,
    tool_format,
    write_calls,
)


@dataclass(frozen=True)
class _Tool:
    name: str
    parameters: tuple[str, str]
    subjects: tuple[str, ...]
    request: str
    """With `{s}` for the subject and `{n}` for the number."""

    def build_call(self, subject: str, number: int) -> dict[str, object]:
        values = dict(zip(self.parameters, (subject, number), strict=True))
        return {"name": self.name, "parameters": values}


_TOOLS = (
    _Tool("pay", ("to", "sum"), ("Tom", "Ann", "Sam", "Eva", "Max"), "pay {s} {n}"),
    _Tool("heat", ("room", "level"), ("hall", "attic", "office", "bath"), "heat the {s} to {n}"),
    _Tool("order", ("item", "count"), ("apples", "books", "pens", "cards"), "order {s}, {n}"),
    _Tool("book", ("city", "price"), ("Paris", "Rome", "Oslo", "Lima"), "book {s} for {n}"),
    _Tool("timer", ("dish", "minutes"), ("rice", "soup", "eggs", "cake"), "time the {s}, {n}"),
)


def _draw_amount(rng: random.Random) -> Problem:
    tool = rng.choice(_TOOLS)
    subject = rng.choice(tool.subjects)
    steps = draw_steps(rng)
    start = tool.request.format(s=subject, n=steps[0].value)
    request = ", ".join([start, *(step.phrase for step in steps)])
    calls = [tool.build_call(subject, steps[-1].result)]
    return _ask(rng, "amount", tool, request, list(map(str, steps)), calls)


def _draw_pair(rng: random.Random) -> Problem:
    tool = rng.choice(_TOOLS)
    one, other = rng.sample(tool.subjects, 2)
    first, more = rng.randint(2, LARGEST - 9), rng.randint(2, 9)
    step = ArithmeticStep(first, rng.choice("+-"), more)
    if step.result < 1:
        step = ArithmeticStep(first, "+", more)
    word = "more" if step.sign == "+" else "less"
    request = f"{tool.request.format(s=one, n=first)} and {other} {more} {word}"
    calls = [tool.build_call(one, first), tool.build_call(other, step.result)]
    return _ask(rng, "pair", tool, request, [str(step)], calls)


def _draw_plain(rng: random.Random) -> Problem:
    tool = rng.choice(_TOOLS)
    subject, number = rng.choice(tool.subjects), rng.randint(1, LARGEST)
    calls = [tool.build_call(subject, number)]
    request = tool.request.format(s=subject, n=number)
    return _ask(rng, "plain", tool, request, [f"{tool.name} {number}"], calls, _write_calls(calls))


def _ask(
    rng: random.Random,
    family: str,
    tool: _Tool,
    request: str,
    notes: Sequence[str],
    calls: Sequence[dict[str, object]],
    calculation: str = "",
) -> Problem:
    others = [other for other in _TOOLS if other is not tool]
    offered = [tool, *rng.sample(others, 2)]
    rng.shuffle(offered)
    tools = " ".join(f"{each.name}({','.join(each.parameters)})" for each in offered)
    return build_problem(
        family,
        f"Tools: {tools}\nUser: {request}.",
        _write_calls(calls),
        terse=" ".join(notes),
        long=f"Let me see. {'. '.join(notes)}. So I call {tool.name}.",
        calls=calls,
        response=False,
        calculation=calculation or " ".join(notes),
    )


def _write_calls(calls: Sequence[dict[str, object]]) -> str:
    return "\n".join(json.dumps(call, separators=(",", ":")) for call in calls)


_FAMILIES: dict[str, Family] = {
    "amount": (0.6, _draw_amount),
    "pair": (0.2, _draw_pair),
    "plain": (0.2, _draw_plain),
}


class ToolsTask(BuiltInTask):
    """Requests to an assistant with tools.

    Of a problem, `data["calls"]` are the right calls, each with `name` and `parameters`, and
    `data["response"]` says whether the answer also speaks to the user.
    """

    reward_funcs = {"correctness": tool_calls, "format": tool_format, "length": length}
    released_funcs = {"correctness": released_tool_calls, "format": released_tool_format}
    metric_funcs = {
        "correctness": agreement,  # unlike the reward, it counts requests without a right call
        "exact": exact_calls,
        "format": tool_format,
        "length": length,
        "mean_length": mean_length,
    }
    generate = staticmethod(
        partial(draw_problems, "tools", _FAMILIES, split_by=lambda p: p.data["calculation"])
    )
    format_request = (
        "Think first, between <think> and </think>. To call tools, write <tool_call> on the next "
        'line, then each call as a JSON object on one line, {{"name": "...", "parameters": '
        "{{...}}}}, then </tool_call> on a line. To say something to the user, write it last, on a "
        "new line, between <response> and </response>. Use each pair of tags at most once, and at "
        "most {limit} tokens in all."
    )

    def write_reference(self, problem: Problem) -> str:
        """Return the right calls as a completion."""
        return write_calls(problem.data["thoughts"]["terse"], problem.data["calls"])


TASK = ToolsTask.describe("embedded_tools", {"train": 30_000, "validation": 14_000, "test": 14_000})
