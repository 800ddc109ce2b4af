"""Language in which every command names one candidate of a sweep.

    knee                                       the best compromise on the front
    max correctness, or max_correctness        the largest value of a metric; `min`: the smallest
    7                                          the end of a trial, by its number
    7@40                                       its checkpoint after 40 steps
    merge-27                                   a merge
    max correctness where length >= 0.9 and format >= 0.95

`where` may follow every rule that names no candidate. `picking` applies a parsed pick to a sweep.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gdpo_tune.core.errors import PickError
from gdpo_tune.core.trials import MERGE_PREFIX
from gdpo_tune.spec.text import show, suggest

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
CONDITIONS = "length >= 0.6 and format >= 0.8"
EXAMPLE = "max correctness where length >= 0.9 and format >= 0.95"
_CHECKPOINT = re.compile(r"(\d{1,9})@(\d{1,9})")
_MERGE = re.compile(rf"{MERGE_PREFIX}(\d{{1,9}})")
_TOKEN = re.compile(r"\s*(>=|<=|==|[<>=,]|[^\s<>=,]+)")


class Metric(NamedTuple):
    """Held-out metric as the person wrote it."""

    name: str
    position: int
    """Position of its first character in the text, from 1."""


@dataclass(frozen=True)
class Bound:
    """One condition after `where`."""

    metric: Metric
    comparison: str
    """Key of `COMPARISONS`."""
    limit: float

    def holds(self, value: float) -> bool:
        """Return whether `value` satisfies the condition; NaN does not."""
        return COMPARISONS[self.comparison](value, self.limit)

    def compute_shortfall(self, value: float) -> float:
        """Return the distance of `value` to the limit; 0 beyond the limit, infinite for NaN."""
        gap = value - self.limit if self.comparison[0] == "<" else self.limit - value
        return math.inf if math.isnan(gap) else max(gap, 0.0)

    def __str__(self) -> str:
        return f"{self.metric.name} {self.comparison} {show(self.limit)}"


@dataclass(frozen=True)
class Extreme:
    """Largest or smallest value of a metric."""

    end: Literal["max", "min"]
    metric: Metric


class CheckpointName(NamedTuple):
    """Name of a checkpoint: `7@40`."""

    trial: int
    step: int


class MergeName(NamedTuple):
    """Name of a merge: `merge-27`."""

    number: int


Rule = Literal["knee"] | Extreme | int | CheckpointName | MergeName


@dataclass(frozen=True)
class Pick:
    """Parsed choice of a candidate."""

    text: str
    rule: Rule
    """Knee or extreme of the front; or any candidate: a trial's number, a checkpoint or a merge."""
    bounds: tuple[Bound, ...] = ()

    @property
    def names_candidate(self) -> bool:
        """True if it names one candidate, on the front or not."""
        return isinstance(self.rule, int | CheckpointName | MergeName)

    @property
    def metrics(self) -> list[Metric]:
        """Metrics that the text names."""
        extreme = [self.rule.metric] if isinstance(self.rule, Extreme) else []
        return extreme + [bound.metric for bound in self.bounds]

    def error(self, position: int, reason: str, fix: str) -> PickError:
        """Return an error that points at `position`, from 1."""
        return PickError(self.text, position, reason, fix)


def parse_pick(text: str) -> Pick:
    """Parse a choice of a candidate.

    Raises:
        PickError: the text does not follow the rules above; it has the position of the problem.
    """
    return _Parser(text).parse_pick()


def parse_conditions(text: str) -> tuple[Bound, ...]:
    """Parse conditions such as `length >= 0.6, format >= 0.8`; `and` stands for the comma too.

    Raises:
        PickError: the text has another form.
    """
    return _Parser(text).parse_conditions()


class _Parser:
    """Parser that reads a text once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [(match[1], match.start(1) + 1) for match in _TOKEN.finditer(text)]
        self._tokens.append(("", len(text) + 1))  # the end

    def parse_pick(self) -> Pick:
        rule = self._parse_rule()
        bounds: list[Bound] = []
        keyword = "where"
        while self._tokens[0][0]:
            word, position = self._take()
            if word != keyword:
                guess = suggest(word, [keyword])
                reason = f"{word!r}: {guess}a condition begins with `{keyword}`"
                raise self._error(position, reason)
            if not (rule == "knee" or isinstance(rule, Extreme)):
                what = "a trial number" if isinstance(rule, int) else "the name of a candidate"
                reason = f"{what} has no conditions"
                raise self._error(position, reason, "leave `where` out")
            bounds.append(self._parse_bound())
            keyword = "and"
        return Pick(self._text, rule, tuple(bounds))

    def parse_conditions(self) -> tuple[Bound, ...]:
        bounds = [self._parse_bound("at the start of a condition")]
        while self._tokens[0][0]:
            word, position = self._take()
            if word not in (",", "and"):
                reason = f"{word!r}: conditions are joined by `and` or a comma"
                raise self._error(position, reason, f"write for example {CONDITIONS!r}")
            bounds.append(self._parse_bound("at the start of a condition"))
        return tuple(bounds)

    def _parse_rule(self) -> Rule:
        word, position = self._take()
        rule, _, name = word.partition("_")
        if word == "knee":
            return "knee"
        if word.isdecimal() and len(word) < 10:  # `int` refuses thousands of digits
            return int(word)
        if match := _CHECKPOINT.fullmatch(word):
            return CheckpointName(int(match[1]), int(match[2]))
        if match := _MERGE.fullmatch(word):
            return MergeName(int(match[1]))
        if (rule == "max" or rule == "min") and (name or word == rule):
            metric = Metric(name, position + 4) if name else self._parse_metric(f"after `{rule}`")
            return Extreme(rule, metric)
        guess = suggest(word, ("knee", "max", "min"))
        rules = (
            "a choice begins with knee, max or min, or is the number of a trial, a checkpoint such "
            "as 7@40, or a merge such as merge-27"
        )
        reason = f"{word!r}: {guess}{rules}" if word else "the choice is empty"
        raise self._error(position, reason)

    def _parse_bound(self, where: str = "after `where` or `and`") -> Bound:
        metric = self._parse_metric(where)
        comparison, position = self._take()
        if comparison not in COMPARISONS:
            reason = f"{metric.name} is compared by >=, <=, > or <"
            raise self._error(position, reason, f"write {metric.name} >= 0.9")
        word, position = self._take()
        try:
            limit = float(word)
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit):
            reason = f"{word!r} is not a number" if word else "a number is missing"
            raise self._error(position, reason, "write a number there, such as 0.9")
        return Bound(metric, comparison, limit)

    def _parse_metric(self, where: str) -> Metric:
        word, position = self._take()
        if not word or word[0] in "<>=,":
            raise self._error(position, f"the name of a metric is missing {where}")
        return Metric(word, position)

    def _take(self) -> tuple[str, int]:
        return self._tokens.pop(0) if len(self._tokens) > 1 else self._tokens[0]

    def _error(self, position: int, reason: str, fix: str = "") -> PickError:
        return PickError(self._text, position, reason, fix or f"write for example {EXAMPLE!r}")
