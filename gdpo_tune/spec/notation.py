"""How a domain is written: `3`, `[1, 2]`, `{range: [1, 2]}`, `{log: [1, 2]}`, with `when:`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gdpo_tune.core.parameters import ParameterInfo
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.domains import Choice, Domain, Fixed, Number, Uniform, is_one_of, on_grid
from gdpo_tune.spec.problems import KeyPath, Node, Problems, did_you_mean, one_of, show

SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127
"""Of the numbers of 32 bits: the least that keeps all its digits, and the greatest."""
MOST_VALUES = 100_000
"""Values of a domain that has finitely many: what looks at them lists them."""
KINDS = ("range", "log", "choices", "value")
SYNTAX = "write 3 (fixed), [1, 2] (choices), {range: [1, 2]} or {log: [1, 2]}"


@dataclass(frozen=True)
class Reader:
    """Reads the domain of one parameter; a None result means that a problem was noted."""

    info: ParameterInfo
    path: KeyPath
    problems: Problems

    def domain(self, node: Node) -> Domain | None:
        """Any of the notations, without its `when`."""
        entries = node.entries
        if entries is None:
            return self.fixed(node) if node.elements is None else self.choices(node)
        unknown = [key for key in entries if key not in (*KINDS, "step", "when")]
        for key in unknown:
            fix = f"{did_you_mean(key, KINDS)}{SYNTAX}"
            self.problems.at(entries[key], (*self.path, key), "unknown key of a domain", fix)
        kinds = [key for key in KINDS if key in entries]
        if unknown or len(kinds) != 1:
            if not unknown:
                reason = f"needs exactly one of {one_of(KINDS)}"
                self.problems.at(node, self.path, reason, SYNTAX)
            return None
        kind = kinds[0]
        if "step" in entries and kind != "range":
            fix = "remove step:" if kind == "log" else "list the values instead"
            self.problems.at(entries["step"], (*self.path, "step"), f"{kind} has no step", fix)
            return None
        if kind == "value":
            return self.fixed(entries[kind])
        if kind == "choices":
            return self.choices(entries[kind])
        return self.uniform(entries[kind], entries.get("step"), log=kind == "log")

    def fixed(self, node: Node) -> Fixed | None:
        """One value."""
        value = self.value(node, self.path)
        return None if value is None else Fixed(value=value)

    def choices(self, node: Node) -> Choice | None:
        """A list of values."""
        elements = node.elements
        if elements is None:
            self.problems.at(node, self.path, "not a list of choices", "write choices: [1, 2]")
            return None
        if not elements:
            self.problems.at(node, self.path, "no choices", "list at least one value")
            return None
        values: list[ParamValue] = []
        sound = True
        for index, element in enumerate(elements):
            value = self.value(element, (*self.path, index))
            if value is None:
                sound = False
            elif is_one_of(value, tuple(values)):
                fix = "name each value once"
                self.problems.at(element, self.path, f"{show(value)} is given twice", fix)
                sound = False
            else:
                values.append(value)
        return Choice(choices=tuple(values)) if sound else None

    def uniform(self, node: Node, step: Node | None, *, log: bool) -> Uniform | None:
        """`range: [low, high]` or `log: [low, high]`."""
        kind = "log" if log else "range"
        if self.info.kind == "choice":
            fix = f"list choices: {show(self.info.choices)}"
            self.problems.at(node, self.path, "has no order, so it cannot have a range", fix)
            return None
        ends = node.elements
        if ends is None or len(ends) != 2:
            fix = f"write {kind}: [low, high]"
            self.problems.at(node, self.path, "a range has two ends", fix)
            return None
        low, high = (self.range_end(end, log=log) for end in ends)
        if low is None or high is None:
            return None
        if low >= high:
            fix = (
                f"write {kind}: [{show(high)}, {show(low)}]" if low > high else f"write {show(low)}"
            )
            self.problems.at(node, self.path, "an empty range: low is not below high", fix)
            return None
        width = None if step is None else self.step(step, low, high)
        if step is not None and width is None:
            return None
        domain = Uniform(low=low, high=high, log=log, step=width, integer=self.info.kind == "int")
        return domain if self.can_be_listed(domain, node) else None

    def can_be_listed(self, domain: Uniform, node: Node) -> bool:
        """Whether a domain is continuous, or has no more values than can be looked at."""
        distance = domain.step or (1 if domain.integer else None)
        if distance is None or (domain.high - domain.low) / distance < MOST_VALUES:
            return True
        way_out = "end the range earlier" if domain.integer else "write none, for any number"
        fix = way_out if domain.log else f"{way_out}, or write a larger step:"
        self.problems.at(node, self.path, f"more than {MOST_VALUES:,} values", fix)
        return False

    def range_end(self, node: Node, *, log: bool) -> Number | None:
        """One end of a range."""
        number = node.value
        if log and not isinstance(number, bool) and isinstance(number, int | float) and number <= 0:
            fix = "start above 0, such as {log: [0.01, 1]}, or use range:"
            reason = "a log range cannot reach 0 or below"
            self.problems.at(node, self.path, reason, fix)
            return None
        value = self.value(node, self.path)
        return None if isinstance(value, str) else value

    def step(self, node: Node, low: Number, high: Number) -> Number | None:
        """The grid of a range; `high` must lie on it."""
        step, path = node.value, (*self.path, "step")
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < math.inf:
            self.problems.at(node, path, "not a positive number", "write a number above 0")
            return None
        if self.info.kind == "int" and not isinstance(step, int):
            self.problems.at(node, path, "not a whole number", "write a whole number")
            return None
        if not on_grid(high - low, step):
            last = low + step * math.floor((high - low) / step)
            reason = f"steps from {show(low)} do not land on {show(high)}"
            fix = f"end the range at {show(last)} or {show(last + step)}, or remove step:"
            self.problems.at(node, path, reason, fix)
            return None
        return step

    def value(self, node: Node, path: KeyPath) -> ParamValue | None:
        """One value of the parameter's type and within its bounds."""
        value = node.value
        complaint = complain(value, self.info)
        if complaint is not None:
            self.problems.at(node, path, *complaint)
            return None
        # 1 and 1.0 mean the same weight, hence the same sweep.
        if self.info.kind == "float" and isinstance(value, int | float):
            return float(value)
        return value if isinstance(value, bool | int | float | str) else None


def complain(value: object, info: ParameterInfo) -> tuple[str, str] | None:
    """Reason and fix if a parameter cannot have `value`, else None."""
    if info.kind == "choice":
        if isinstance(value, bool | int | float | str) and is_one_of(value, info.choices):
            return None
        return (
            "unknown value",
            f"{did_you_mean(value, map(str, info.choices))}use one of {one_of(info.choices)}",
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number", f"write a {'whole ' if info.kind == 'int' else ''}number"
    if not math.isfinite(value):
        return "not finite", "write a finite number"
    if info.kind == "int" and not isinstance(value, int):
        return "not a whole number", f"write {round(value)}"
    if info.low is not None and (value <= info.low if info.open_low else value < info.low):
        bound = f"{'above' if info.open_low else 'of at least'} {info.low:g}"
        negative = value < 0 and info.low == 0
        reason = "a weight or rate cannot be negative" if negative else "too small"
        return reason, f"write a number {bound}"
    if info.high is not None and value > info.high:
        return "too large", f"write a number of at most {info.high:g}"
    if info.kind == "float" and value and not SMALLEST <= abs(value) <= LARGEST:
        what = "0" if abs(value) < SMALLEST else "infinity"
        between = f"between {SMALLEST:.2g} and {LARGEST:.2g}"
        return f"{what} in the 32 bits that training computes in", f"write a number {between}"
    return None


def describe(domain: Domain) -> str:
    """A domain in the file's notation."""
    if isinstance(domain, Fixed):
        return show(domain.value)
    if isinstance(domain, Choice):
        return show(domain.choices)
    step = f", step: {show(domain.step)}" if domain.step is not None else ""
    kind = "log" if domain.log else "range"
    return f"{{{kind}: [{show(domain.low)}, {show(domain.high)}]{step}}}"
