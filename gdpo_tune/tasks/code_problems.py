"""Synthetic code problems: describe a one-argument function `f`, ask for it in Python.

Three families. `rate` needs serial arithmetic, which a small policy cannot do in one pass but can
do step by step, so a short answer is less often right: this makes correctness and length real
rivals. `chain` nests operations on a number, `list` on a list.

Pure Python. Expected values come from closures that are composed along with the expression, so
nothing is ever evaluated from text in this process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gdpo_tune.tasks.arithmetic import steps
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.generation import Family, draw

FUNCTION = "f"
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")  # from 2 on
_CHAIN_MAX = 10**6


@dataclass(frozen=True)
class _Operation:
    """One step of a chain or a list problem."""

    phrase: str
    note: str
    """The step in a terse thought."""
    template: str
    """Python expression with `{e}` where the previous expression goes."""
    apply: Callable[[Any], Any]


def generate(split: Split, count: int, seed: int) -> list[Problem]:
    """`count` problems of one split with distinct prompts.

    The same arguments give the same list on every machine.

    Raises:
        UsageError: the split does not hold that many distinct prompts.
    """
    return draw("code", _FAMILIES, split, count, seed)


# --- rate: a constant that must be computed, then used once ---------------------------------------


def _rate(rng: random.Random) -> Problem:
    taken = steps(rng, 2, 3)
    phrases = [f"k is {taken[0].value}", *(step.phrase for step in taken)]
    notes = [str(step) for step in taken]
    k = taken[-1].result
    uses: list[tuple[str, str, Callable[[int], int]]] = [
        ("k times x", f"{k}*x", lambda x: k * x),
        ("x plus k", f"x+{k}", lambda x: x + k),
        ("x minus k", f"x-{k}", lambda x: x - k),
        ("k minus x", f"{k}-x", lambda x: k - x),
    ]
    words, expression, function = rng.choice(uses)
    hidden = (7, -3, rng.randint(10, 99), rng.randint(-99, -10))
    return _problem(
        family="rate",
        description=f": {', '.join(phrases)}; return {words}.",
        expression=expression,
        terse=" ".join(notes),
        long=f"Let me see. {'. '.join(notes)}. So k is {k}.",
        visible=_tests(function, (0, 1, 2)),
        hidden=_tests(function, hidden),
    )


# --- chain: nested operations on a number ---------------------------------------------------------


def _chain(rng: random.Random) -> Problem:
    while True:
        operations = [_chain_operation(rng) for _ in range(rng.randint(2, 5))]
        function = _compose(operations)
        # Numbers stay small enough to be compared exactly in any language that a judge may use.
        if all(abs(function(x)) <= _CHAIN_MAX for x in range(-12, 13)):
            break
    hidden = (5, -3, -7, rng.randint(8, 12), rng.randint(-12, -8))
    return _composed("chain", ": ", operations, (0, 1, 2), hidden)


def _chain_operation(rng: random.Random) -> _Operation:
    c = rng.randint(2, 9)
    number = _NUMBERS[c - 2]
    return rng.choice(
        (
            _Operation(f"add {number}", f"+{c}", f"({{e}}+{c})", lambda v: v + c),
            _Operation(f"subtract {number}", f"-{c}", f"({{e}}-{c})", lambda v: v - c),
            _Operation(f"multiply by {number}", f"*{c}", f"({{e}}*{c})", lambda v: v * c),
            _Operation("negate it", "neg", "(-{e})", lambda v: -v),
            _Operation("take the absolute value", "abs", "abs({e})", abs),
            _Operation("square it", "sq", "({e}**2)", lambda v: v * v),
        )
    )


# --- list: nested operations on a list, then one result -------------------------------------------


_ENDS = (
    _Operation("return the sum", "sum", "sum({e})", sum),
    _Operation("return the largest item", "max", "max({e})", max),
    _Operation("return the smallest item", "min", "min({e})", min),
    _Operation("count the items", "len", "len({e})", len),
    _Operation("return the first item", "first", "{e}[0]", lambda v: v[0]),
    _Operation("return the last item", "last", "{e}[-1]", lambda v: v[-1]),
    _Operation("return the list", "id", "{e}", list),
)
_VISIBLE_LISTS = ((4, -1, 12), (13, 8, 6, 8))
_HIDDEN_LISTS = ((2, -5, 7, 10), (16, 2), (1, 9, -4, 12, 12))


def _list(rng: random.Random) -> Problem:
    hidden = (*_HIDDEN_LISTS, (24, *(rng.randint(-20, 20) for _ in range(rng.randint(2, 5)))))
    while True:
        operations = [_list_operation(rng) for _ in range(rng.randint(0, 2))]
        operations.append(rng.choice(_ENDS))
        if _defined(_compose(operations), (*_VISIBLE_LISTS, *hidden)):
            return _composed("list", " for a list x: ", operations, _VISIBLE_LISTS, hidden)


def _list_operation(rng: random.Random) -> _Operation:
    c = rng.randint(2, 9)
    number = _NUMBERS[c - 2]
    return rng.choice(
        (
            _Operation(
                f"add {number} to each item",
                f"+{c}",
                f"[v+{c} for v in {{e}}]",
                lambda v: [i + c for i in v],
            ),
            _Operation(
                f"multiply each item by {number}",
                f"*{c}",
                f"[v*{c} for v in {{e}}]",
                lambda v: [i * c for i in v],
            ),
            _Operation(
                f"subtract {number} from each item",
                f"-{c}",
                f"[v-{c} for v in {{e}}]",
                lambda v: [i - c for i in v],
            ),
            _Operation(
                f"keep the items above {number}",
                f">{c}",
                f"[v for v in {{e}} if v>{c}]",
                lambda v: [i for i in v if i > c],
            ),
            _Operation(
                "square each item", "sq", "[v*v for v in {e}]", lambda v: [i * i for i in v]
            ),
            _Operation(
                "keep the even items",
                "even",
                "[v for v in {e} if v%2==0]",
                lambda v: [i for i in v if i % 2 == 0],
            ),
            _Operation(
                "keep the positive items",
                "pos",
                "[v for v in {e} if v>0]",
                lambda v: [i for i in v if i > 0],
            ),
            _Operation("reverse the list", "rev", "{e}[::-1]", lambda v: v[::-1]),
            _Operation("sort the list", "sort", "sorted({e})", sorted),
        )
    )


def _defined(function: Callable[[Any], Any], arguments: Sequence[Sequence[int]]) -> bool:
    """Whether the function has a value for each list (an empty one has no largest item)."""
    try:
        for argument in arguments:
            function(list(argument))
    except (IndexError, ValueError):
        return False
    return True


# --- shared ---------------------------------------------------------------------------------------


def _compose(operations: Sequence[_Operation]) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        for operation in operations:
            x = operation.apply(x)
        return x

    return function


def _composed(
    family: str,
    lead: str,
    operations: Sequence[_Operation],
    visible: Sequence[Any],
    hidden: Sequence[Any],
) -> Problem:
    expression = "x"
    for operation in operations:
        expression = operation.template.format(e=expression)
    phrases = [operation.phrase for operation in operations]
    function = _compose(operations)
    return _problem(
        family=family,
        description=f"{lead}{', '.join(phrases)}.",
        expression=expression,
        terse=" ".join(operation.note for operation in operations),
        long=f"The steps are: {' then '.join(phrases)}. Let me see, now nest them.",
        visible=_tests(function, visible),
        hidden=_tests(function, hidden),
    )


def _tests(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[list[Any]]:
    """Pairs [argument, expected value]; each value is computed on an argument of its own."""
    values: list[Any] = [
        list(cast("tuple[int, ...]", a)) if isinstance(a, tuple) else a for a in arguments
    ]
    return [[value, function(value)] for value in values]


def _problem(
    *,
    family: str,
    description: str,
    expression: str,
    terse: str,
    long: str,
    visible: list[list[Any]],
    hidden: list[list[Any]],
) -> Problem:
    return Problem(
        prompt=f"Write {FUNCTION}(x){description}\n",
        family=family,
        data={
            "function": FUNCTION,
            "solution": f"def {FUNCTION}(x): return {expression}",
            "thoughts": {"none": "", "terse": terse, "long": long},
            "visible": visible,
            "hidden": hidden,
        },
    )


_FAMILIES: dict[str, Family] = {"rate": (0.6, _rate), "chain": (0.2, _chain), "list": (0.2, _list)}
