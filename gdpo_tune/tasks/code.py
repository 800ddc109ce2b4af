"""The code task: write Python, which the sandbox runs against several tests.

Problems come from a data set (`code_layouts`), or are synthetic: each describes a one-argument
function `f`. `rate` needs serial arithmetic (see `generation`), `chain` nests operations on a
number, `list` on a list. Expected values come from closures that are composed along with the
expression: no code of a problem or a completion runs in this process.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.generation import Family, build_problem, draw_problems, draw_steps
from gdpo_tune.tasks.task import BuiltInTask
from gdpo_tune.tasks.text_rewards import (
    block_format,
    bug_free,
    bug_rate,
    length,
    mean_length,
    share_passed,
    tests_passed,
)

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result, Sandbox
    from gdpo_tune.tasks.execution import BackgroundRunner


_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")  # from 2 on


@dataclass(frozen=True)
class _Operation:
    """One step of a chain or a list problem, with a constant c from 2 to 9 that it may use."""

    phrase: str
    """With `{n}` for the constant in words."""
    note: str
    """The step in a terse thought, with `{c}` for the constant."""
    template: str
    """Python expression with `{e}` for the previous expression, and `{c}`."""
    apply: Callable[[Any, int], Any]
    """(previous value, constant) -> value."""


def _map_items(
    phrase: str, note: str, value: str, function: Callable[[int, int], int]
) -> _Operation:
    template = f"[{value} for v in {{e}}]"
    return _Operation(phrase, note, template, lambda v, c: [function(i, c) for i in v])


def _filter_items(
    phrase: str, note: str, condition: str, function: Callable[[int, int], bool]
) -> _Operation:
    template = f"[v for v in {{e}} if {condition}]"
    return _Operation(phrase, note, template, lambda v, c: [i for i in v if function(i, c)])


_CHAIN = (
    _Operation("add {n}", "+{c}", "({e}+{c})", lambda v, c: v + c),
    _Operation("subtract {n}", "-{c}", "({e}-{c})", lambda v, c: v - c),
    _Operation("multiply by {n}", "*{c}", "({e}*{c})", lambda v, c: v * c),
    _Operation("negate it", "neg", "(-{e})", lambda v, c: -v),
    _Operation("take the absolute value", "abs", "abs({e})", lambda v, c: abs(v)),
    _Operation("square it", "sq", "({e}**2)", lambda v, c: v * v),
)
_LIST = (
    _map_items("add {n} to each item", "+{c}", "v+{c}", lambda v, c: v + c),
    _map_items("multiply each item by {n}", "*{c}", "v*{c}", lambda v, c: v * c),
    _map_items("subtract {n} from each item", "-{c}", "v-{c}", lambda v, c: v - c),
    _filter_items("keep the items above {n}", ">{c}", "v>{c}", lambda v, c: v > c),
    _map_items("square each item", "sq", "v*v", lambda v, c: v * v),
    _filter_items("keep the even items", "even", "v%2==0", lambda v, c: v % 2 == 0),
    _filter_items("keep the positive items", "pos", "v>0", lambda v, c: v > 0),
    _Operation("reverse the list", "rev", "{e}[::-1]", lambda v, c: v[::-1]),
    _Operation("sort the list", "sort", "sorted({e})", lambda v, c: sorted(v)),
)
_ENDS = (
    _Operation("return the sum", "sum", "sum({e})", lambda v, c: sum(v)),
    _Operation("return the largest item", "max", "max({e})", lambda v, c: max(v)),
    _Operation("return the smallest item", "min", "min({e})", lambda v, c: min(v)),
    _Operation("count the items", "len", "len({e})", lambda v, c: len(v)),
    _Operation("return the first item", "first", "{e}[0]", lambda v, c: v[0]),
    _Operation("return the last item", "last", "{e}[-1]", lambda v, c: v[-1]),
    _Operation("return the list", "id", "{e}", lambda v, c: list(v)),
)
_VISIBLE_LISTS = ([4, -1, 12], [13, 8, 6, 8])
_HIDDEN_LISTS = ([2, -5, 7, 10], [16, 2], [1, 9, -4, 12, 12])
_Step = tuple[_Operation, int]
"""An operation and its constant."""


def _draw_rate(rng: random.Random) -> Problem:
    steps = draw_steps(rng)
    phrases = [f"k is {steps[0].value}", *(step.phrase for step in steps)]
    notes = [str(step) for step in steps]
    k = steps[-1].result
    uses: list[tuple[str, str, Callable[[int], int]]] = [
        ("k times x", f"{k}*x", lambda x: k * x),
        ("x plus k", f"x+{k}", lambda x: x + k),
        ("x minus k", f"x-{k}", lambda x: x - k),
        ("k minus x", f"{k}-x", lambda x: k - x),
    ]
    words, expression, function = rng.choice(uses)
    hidden = (7, -3, rng.randint(10, 99), rng.randint(-99, -10))
    return build_problem(
        "rate",
        f"Write f(x): {', '.join(phrases)}; return {words}.",
        f"def f(x): return {expression}",
        terse=" ".join(notes),
        long=f"Let me see. {'. '.join(notes)}. So k is {k}.",
        function="f",
        visible=_build_tests(function, (0, 1, 2)),
        hidden=_build_tests(function, hidden),
    )


def _draw_chain(rng: random.Random) -> Problem:
    while True:
        steps = [_draw_operation(rng, _CHAIN) for _ in range(rng.randint(2, 5))]
        function = _compose(steps)
        # Numbers stay small enough to be compared exactly in any language that a judge may use.
        if all(abs(function(x)) <= 10**6 for x in range(-12, 13)):
            break
    hidden = (5, -3, -7, rng.randint(8, 12), rng.randint(-12, -8))
    return _nest_operations("chain", ": ", steps, (0, 1, 2), hidden)


def _draw_list(rng: random.Random) -> Problem:
    hidden = (*_HIDDEN_LISTS, [24, *(rng.randint(-20, 20) for _ in range(rng.randint(2, 5)))])
    while True:
        steps = [_draw_operation(rng, _LIST) for _ in range(rng.randint(0, 2))]
        steps.append((rng.choice(_ENDS), 2))  # ends have no constant
        try:
            _build_tests(_compose(steps), (*_VISIBLE_LISTS, *hidden))
        except (IndexError, ValueError):
            continue  # such as the largest item of an empty list
        return _nest_operations("list", " for a list x: ", steps, _VISIBLE_LISTS, hidden)


def _draw_operation(rng: random.Random, operations: Sequence[_Operation]) -> _Step:
    constant = rng.randint(2, 9)
    return rng.choice(operations), constant


def _compose(steps: Sequence[_Step]) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        for operation, constant in steps:
            x = operation.apply(x, constant)
        return x

    return function


def _nest_operations(
    family: str, lead: str, steps: Sequence[_Step], visible: Sequence[Any], hidden: Sequence[Any]
) -> Problem:
    expression = "x"
    for operation, c in steps:
        expression = operation.template.format(e=expression, c=c)
    phrases = [operation.phrase.format(n=_NUMBERS[c - 2]) for operation, c in steps]
    function = _compose(steps)
    return build_problem(
        family,
        f"Write f(x){lead}{', '.join(phrases)}.",
        f"def f(x): return {expression}",
        terse=" ".join(operation.note.format(c=c) for operation, c in steps),
        long=f"The steps are: {' then '.join(phrases)}. Let me see, now nest them.",
        function="f",
        visible=_build_tests(function, visible),
        hidden=_build_tests(function, hidden),
    )


def _build_tests(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[list[Any]]:
    return [[argument, function(argument)] for argument in arguments]


_FAMILIES: dict[str, Family] = {
    "rate": (0.6, _draw_rate),
    "chain": (0.2, _draw_chain),
    "list": (0.2, _draw_list),
}


draw_code_problems = functools.partial(draw_problems, "code", _FAMILIES)
"""Draws problems of a split; see `draw_problems`."""


class CodeTask(BuiltInTask):
    """Code problems, judged by execution. Use it as a context manager."""

    reward_funcs = {"correctness": tests_passed, "format": block_format, "length": length}
    optional_reward_funcs = {"bug_free": bug_free}
    partial_funcs = {"correctness": share_passed}
    metric_funcs = {**reward_funcs, "mean_length": mean_length, "bug_rate": bug_rate}
    directions = {**BuiltInTask.directions, "bug_rate": "minimize"}
    generate = staticmethod(draw_code_problems)
    format_request = (
        "Think first, between <think> and </think>. Then write the Python code between <answer> "
        "and </answer>, and nothing else. Use each pair of tags once, and at most {limit} tokens "
        "in all."
    )

    sandbox: Sandbox | None = None
    """Started when it is first needed, unless it was set before."""
    _runner: BackgroundRunner | None = None
    _starting = threading.Lock()
    """Held while the trainer or an engine's thread starts both."""

    def begin_scoring(self, problem: Problem, completion: str) -> None:
        """Run the program of a completion while others are sampled; see `Task`."""
        self._start()[1].submit(problem, completion)

    def _run_programs(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> list[Result | None]:
        # SandboxUnavailable and SandboxInfraError pass: no completion gets a zero for them.
        return self._start()[1].gather(problems, completions)

    def environment(self) -> dict[str, str]:
        """Return the sandbox's tier of isolation, which starts it, and where problems come from."""
        return {"sandbox": self._start()[0].info.tier, **super().environment()}

    def close(self) -> None:
        """End the sandbox; the task may be used again and then starts a new one."""
        if self.sandbox is not None:
            self.sandbox.close()
            self.sandbox = None
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def _start(self) -> tuple[Sandbox, BackgroundRunner]:
        from gdpo_tune.tasks.execution import BackgroundRunner, open_sandbox, run_programs

        with self._starting:
            if self.sandbox is None:
                self.sandbox = open_sandbox(self._settings)
            if self._runner is None:
                run = functools.partial(run_programs, self.sandbox, self._settings)
                self._runner = BackgroundRunner(run)
            return self.sandbox, self._runner


TASK = CodeTask.describe(
    "embedded",
    {"train": 6000, "validation": 2500, "test": 2500},
    published_with={"bug_free": {"partial_credit": True}},
)
