"""Notation of a domain: `3`, `[1, 2]`, `{range: [1, 2]}`, `{log: [1, 2]}`, with `when:`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from gdpo_tune.core.parameters import ParameterInfo
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.problems import KeyPath, Problems, did_you_mean, one_of, show
from gdpo_tune.spec.space import Choice, Domain, Fixed, Number, Uniform, is_one_of, on_grid

SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127
"""Of the numbers of 32 bits: the least that keeps all its digits, and the greatest."""
MOST_VALUES = 100_000
"""Most values of a finite domain: some functions list them."""
KINDS = ("range", "log", "choices", "value")
SYNTAX = "write 3 (fixed), [1, 2] (choices), {range: [1, 2]} or {log: [1, 2]}"


def as_mapping(data: object) -> Mapping[str, object] | None:
    """Return a value that is a mapping, else None."""
    return cast("Mapping[str, object]", data) if isinstance(data, Mapping) else None


def as_list(data: object) -> tuple[object, ...] | None:
    """Return a value that is a list, else None."""
    return cast("tuple[object, ...]", data) if isinstance(data, tuple) else None


@dataclass(frozen=True)
class DomainReader:
    """Reads the domain of one parameter; a None result means that a problem was noted."""

    info: ParameterInfo
    path: KeyPath
    """Of the parameter in the document."""
    problems: Problems

    def read(self, data: object) -> Domain | None:
        """Return a domain in any notation, without its `when`."""
        elements, entries = as_list(data), as_mapping(data)
        if elements is not None:
            return self._choices(elements, self.path)
        if entries is None:
            return self._fixed(data)
        unknown = [key for key in entries if key not in (*KINDS, "step", "when")]
        for key in unknown:
            fix = f"{did_you_mean(key, KINDS)}{SYNTAX}"
            self.problems.note((*self.path, key), "unknown key of a domain", fix)
        kinds = [key for key in KINDS if key in entries]
        if not unknown and len(kinds) != 1:
            self.problems.note(self.path, f"needs exactly one of {one_of(KINDS)}", SYNTAX)
        if unknown or len(kinds) != 1:
            return None
        kind, value = kinds[0], entries[kinds[0]]
        if "step" in entries and kind != "range":
            fix = "remove step:" if kind == "log" else "list the values instead"
            self.problems.note((*self.path, "step"), f"{kind} has no step", fix)
            return None
        if kind == "value":
            return self._fixed(value)
        if kind != "choices":
            return self._uniform(value, entries.get("step"), kind)
        elements = as_list(value)
        if elements is not None:
            return self._choices(elements, (*self.path, kind))
        self.problems.note(self.path, "not a list of choices", "write choices: [1, 2]")
        return None

    def _fixed(self, data: object) -> Fixed | None:
        value = self.value(data, self.path)
        return None if value is None else Fixed(value=value)

    def _choices(self, data: tuple[object, ...], path: KeyPath) -> Choice | None:
        if not data:
            self.problems.note(path, "no choices", "list at least one value")
            return None
        values: list[ParamValue] = []
        for index, element in enumerate(data):
            value = self.value(element, (*path, index))
            if value is not None and is_one_of(value, tuple(values)):
                reason = f"{show(value)} is given twice"
                self.problems.note(self.path, reason, "name each value once", element)
            elif value is not None:
                values.append(value)
        return Choice(choices=tuple(values)) if len(values) == len(data) else None

    def _uniform(self, data: object, step: object, kind: str) -> Uniform | None:
        """Return `range: [low, high]` or `log: [low, high]`."""
        if self.info.kind == "choice":
            fix = f"list choices: {show(self.info.choices)}"
            self.problems.note(self.path, "has no order, so it cannot have a range", fix)
            return None
        ends = as_list(data) or ()
        if len(ends) != 2:
            self.problems.note(self.path, "a range has two ends", f"write {kind}: [low, high]")
            return None
        low, high = (self._end(end, kind) for end in ends)
        if low is None or high is None:
            return None
        if low >= high:
            fix = f"{kind}: [{show(high)}, {show(low)}]" if low > high else show(low)
            reason = "an empty range: low is not below high"
            self.problems.note(self.path, reason, f"write {fix}", data)
            return None
        width = None if step is None else self._step(step, low, high)
        if step is not None and width is None:
            return None
        integer, log = self.info.kind == "int", kind == "log"
        distance = width or (1 if integer else None)
        if distance is not None and (high - low) / distance >= MOST_VALUES:
            fix = "end the range earlier" if integer else "write none, for any number"
            fix += "" if log else ", or write a larger step:"
            self.problems.note(self.path, f"more than {MOST_VALUES:,} values", fix, data)
            return None
        return Uniform(low=low, high=high, log=log, step=width, integer=integer)

    def _end(self, end: object, kind: str) -> Number | None:
        """Return one end of a range."""
        if kind == "log" and isinstance(end, int | float) and not isinstance(end, bool):
            if end <= 0:
                fix = "start above 0, such as {log: [0.01, 1]}, or use range:"
                reason = "a log range cannot reach 0 or below"
                self.problems.note(self.path, reason, fix, end)
                return None
        value = self.value(end, self.path)
        return None if isinstance(value, str) else value

    def _step(self, step: object, low: Number, high: Number) -> Number | None:
        """Return the grid of a range; `high` must lie on it."""
        path = (*self.path, "step")
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < math.inf:
            self.problems.note(path, "not a positive number", "write a number above 0")
        elif self.info.kind == "int" and not isinstance(step, int):
            self.problems.note(path, "not a whole number", "write a whole number")
        elif not on_grid(high - low, step):
            last = low + step * math.floor((high - low) / step)
            reason = f"steps from {show(low)} do not land on {show(high)}"
            fix = f"end the range at {show(last)} or {show(last + step)}, or remove step:"
            self.problems.note(path, reason, fix)
        else:
            return step
        return None

    def value(self, data: object, path: KeyPath) -> ParamValue | None:
        """Return one value of the parameter's type and within its bounds."""
        complaint = complain(data, self.info)
        if complaint is not None:
            self.problems.note(path, *complaint, data)
            return None
        # 1 and 1.0 mean the same weight, hence the same sweep.
        if self.info.kind == "float" and isinstance(data, int | float):
            return float(data)
        return data if isinstance(data, bool | int | float | str) else None


def complain(value: object, info: ParameterInfo) -> tuple[str, str] | None:
    """Return reason and fix if a parameter cannot have `value`, else None."""
    if info.kind == "choice":
        if isinstance(value, bool | int | float | str) and is_one_of(value, info.choices):
            return None
        close = did_you_mean(value, map(str, info.choices))
        return "unknown value", f"{close}use one of {one_of(info.choices)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number", f"write a {'whole ' if info.kind == 'int' else ''}number"
    if not math.isfinite(value):
        return "not finite", "write a finite number"
    if info.kind == "int" and not isinstance(value, int):
        return "not a whole number", f"write {round(value)}"
    if info.low is not None and (value <= info.low if info.open_low else value < info.low):
        negative = value < 0 and info.low == 0
        reason = "a weight or rate cannot be negative" if negative else "too small"
        return reason, f"write a number {'above' if info.open_low else 'of at least'} {info.low:g}"
    if info.high is not None and value > info.high:
        return "too large", f"write a number of at most {info.high:g}"
    if info.kind == "float" and value and not SMALLEST <= abs(value) <= LARGEST:
        what = "0" if abs(value) < SMALLEST else "infinity"
        between = f"between {SMALLEST:.2g} and {LARGEST:.2g}"
        return f"{what} in the 32 bits that training computes in", f"write a number {between}"
    return None


def notation(domain: Domain) -> object:
    """Return a domain in the shortest form that the file allows."""
    when = {"when": {name: list(values) for name, values in domain.when.items()}}
    if isinstance(domain, Fixed):
        return {"value": domain.value, **when} if domain.when else domain.value
    if isinstance(domain, Choice):
        choices = list(domain.choices)
        return {"choices": choices, **when} if domain.when else choices
    data: dict[str, object] = {"log" if domain.log else "range": [domain.low, domain.high]}
    if domain.step is not None:
        data["step"] = domain.step
    return {**data, **when} if domain.when else data


def describe(domain: Domain) -> str:
    """Return a domain in the file's notation, without its conditions."""
    return show(notation(domain.model_copy(update={"when": {}})))
