"""The words for a choice among what a sweep found, the same in every command.

    knee                                             the best compromise of the front
    max correctness, or max_correctness              the largest in a metric; `min` the smallest
    prefer correctness=2, length=1                   the best under weights of preference
    7                                                a trial by its number
    max correctness where length >= 0.9 and format >= 0.95

`where` goes with all but a number. Reading a choice needs no sweep; `choosing` makes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gdpo_tune.core.errors import PickError
from gdpo_tune.spec.problems import did_you_mean, show

Op = Literal[">=", "<=", ">", "<"]

OPS: Mapping[str, Op] = {">=": ">=", "<=": "<=", ">": ">", "<": "<"}
RULES = ("knee", "max", "min", "prefer")
EXAMPLE = "max correctness where length >= 0.9 and format >= 0.95"
MOST_DIGITS = 9
"""Of a trial's number."""
_WORD = re.compile(r"\s*(>=|<=|==|[<>=,]|[^\s<>=,]+)")


@dataclass(frozen=True)
class Metric:
    """A held-out metric as it was written."""

    name: str
    position: int
    """Of its first character, from 1."""


@dataclass(frozen=True)
class Bound:
    """What a metric has to be: one condition after `where`."""

    metric: Metric
    op: Op
    limit: float

    def missing(self, value: float) -> float:
        """By how much `value` fails; 0 if it holds, infinite for NaN."""
        match self.op:
            case ">=" | ">":
                short = self.limit - value
            case "<=" | "<":
                short = value - self.limit
        if math.isnan(short):
            return math.inf
        return max(short, 0.0)

    def holds(self, value: float) -> bool:
        """Whether `value` satisfies it; NaN does not."""
        strict = self.op in (">", "<") and value == self.limit
        return self.missing(value) == 0 and not strict

    def __str__(self) -> str:
        return f"{self.metric.name} {self.op} {show(self.limit)}"


@dataclass(frozen=True)
class Knee:
    """The best compromise."""


@dataclass(frozen=True)
class Extreme:
    """The largest or the smallest in a metric."""

    way: Literal["max", "min"]
    metric: Metric


@dataclass(frozen=True)
class Preferred:
    """The best under weights; objectives that are not named do not count."""

    weights: tuple[tuple[Metric, float], ...]


@dataclass(frozen=True)
class Numbered:
    """A trial, on the front or not."""

    number: int


Rule = Knee | Extreme | Preferred | Numbered


@dataclass(frozen=True)
class Pick:
    """A choice as it was written and as it is meant."""

    text: str
    rule: Rule
    bounds: tuple[Bound, ...] = ()

    @property
    def metrics(self) -> list[Metric]:
        """What it looks at besides the objectives: what is to be extreme, and what is bounded."""
        extreme = [self.rule.metric] if isinstance(self.rule, Extreme) else []
        return extreme + [bound.metric for bound in self.bounds]

    def error(self, position: int, reason: str, fix: str) -> PickError:
        """What is wrong at `position`, counted from 1."""
        return PickError(self.text, position, reason, fix)

    @property
    def label(self) -> str:
        """For a folder's name; empty where only the trial that it finds gives one."""
        match self.rule:
            case Knee() if not self.bounds:
                return "knee"
            case Extreme(way, metric) if not self.bounds:
                return f"{way}_{metric.name}"
            case _:
                return ""


def parse(text: str) -> Pick:
    """What `text` asks for.

    Raises:
        PickError: it is not in the words at the head of this module; with the position.
    """
    return _Parser(text).pick()


@dataclass(frozen=True)
class _Token:
    word: str
    position: int


class _Parser:
    """Reads one choice from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [
            _Token(match.group(1), match.start(1) + 1) for match in _WORD.finditer(text)
        ]
        self._next = 0

    def pick(self) -> Pick:
        rule = self._rule()
        if self._done():
            return Pick(self._text, rule)
        where = self._peek()
        if where.word != "where":
            guess = did_you_mean(where.word, ["where"])
            comma = " (weights are separated by commas)" if isinstance(rule, Preferred) else ""
            raise self._error(
                where,
                f"{where.word!r}: {guess}what follows a choice begins with `where`{comma}",
                f"write for example {EXAMPLE!r}",
            )
        if isinstance(rule, Numbered):
            raise self._error(where, "a trial by its number is taken as it is", "leave `where` out")
        self._take()
        bounds = [self._bound()]
        while not self._done():
            joint = self._take()
            if joint.word != "and":
                guess = did_you_mean(joint.word, ["and"])
                reason = f"{joint.word!r}: {guess}conditions are joined by `and`"
                raise self._error(joint, reason, f"write for example {EXAMPLE!r}")
            bounds.append(self._bound())
        return Pick(self._text, rule, tuple(bounds))

    def _rule(self) -> Rule:
        if self._done():
            raise self._error(None, "nothing to choose by", f"write knee, or {EXAMPLE!r}")
        first = self._take()
        if first.word.isdecimal() and len(first.word) <= MOST_DIGITS:
            return Numbered(int(first.word))
        way, _, name = first.word.partition("_")
        match way:
            case "knee" if not name:
                return Knee()
            case "max" | "min" if name:
                return Extreme(way, Metric(name, first.position + len(way) + 1))
            case "max" | "min" if first.word == way:
                return Extreme(way, self._metric(f"after `{way}`"))
            case "prefer" if not name:
                return self._preferred()
            case _:
                raise self._error(
                    first,
                    f"{first.word!r}: {did_you_mean(first.word, RULES)}a choice begins with knee, "
                    "max, min or prefer, or is the number of a trial",
                    f"write for example {EXAMPLE!r}",
                )

    def _preferred(self) -> Preferred:
        weights: list[tuple[Metric, float]] = []
        while True:
            metric = self._metric("after `prefer` or a comma")
            equals = self._take("`=` and a weight") if not self._done() else None
            if equals is None or equals.word != "=":
                raise self._error(equals, f"{metric.name} has no weight", f"write {metric.name}=1")
            weight = self._number("a weight")
            if weight <= 0:
                last = self._tokens[self._next - 1]
                raise self._error(last, "a weight is above 0", f"leave {metric.name} out")
            if metric.name in (known.name for known, _ in weights):
                named = _Token(metric.name, metric.position)
                raise self._error(named, f"{metric.name} has a weight already", "name it once")
            weights.append((metric, weight))
            if self._done() or self._peek().word != ",":
                return Preferred(tuple(weights))
            self._take()

    def _bound(self) -> Bound:
        metric = self._metric("to compare")
        op = self._take("a comparison") if not self._done() else None
        if op is None or op.word not in OPS:
            raise self._error(
                op, f"{metric.name} is compared by >=, <=, > or <", f"write {metric.name} >= 0.9"
            )
        return Bound(metric, OPS[op.word], self._number("a number"))

    def _metric(self, what: str) -> Metric:
        token = self._take(f"the name of a metric {what}")
        if token.word[0] in "<>=,":
            raise self._error(
                token, f"a metric is missing {what}", f"write for example {EXAMPLE!r}"
            )
        return Metric(token.word, token.position)

    def _number(self, what: str) -> float:
        token = self._take(what)
        try:
            value = float(token.word)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self._error(
                token, f"{token.word!r} is no number", f"put {what} there, such as 0.9"
            )
        return value

    def _done(self) -> bool:
        return self._next == len(self._tokens)

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self, what: str = "more") -> _Token:
        if self._done():
            raise self._error(None, f"it ends where {what} should follow", f"write {EXAMPLE!r}")
        self._next += 1
        return self._tokens[self._next - 1]

    def _error(self, at: _Token | None, reason: str, fix: str) -> PickError:
        position = len(self._text) + 1 if at is None else at.position
        return PickError(self._text, position, reason, fix)
