"""`space:` and `enqueue:` as a file writes them, and points that a person adds to a sweep.

A domain is written as `3`, `[1, 2]`, `{range: [1, 2]}` or `{log: [1, 2]}`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import FAMILIES, ParameterInfo
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.text import join_names, show, suggest
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.core.trl_fields import TRL_FIELDS, TRL_PREFIX, explain_field
from gdpo_tune.spec.document import DOMAIN_KEYS, KINDS, KeyPath, Problems, ReportedError
from gdpo_tune.spec.space import (
    Choices,
    Domain,
    Fixed,
    Number,
    Space,
    Uniform,
    format_domain,
    is_on_grid,
    is_one_of,
)

SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127
"""Smallest number with all its digits in a 32-bit float, and the largest such float."""
MOST_VALUES = 100_000
"""Most values of a finite domain: some functions list them."""
SYNTAX = "write 3 (fixed), [1, 2] (choices), {range: [1, 2]} or {log: [1, 2]}"
PUBLISHED = "published"
"""Word of `enqueue:` for the settings of the method's paper, besides the baseline."""

Point = dict[str, ParamValue]


@dataclass(frozen=True)
class DomainReader:
    """Reads the domain of one parameter; every method raises `ReportedError`."""

    info: ParameterInfo
    path: KeyPath
    """Path of the parameter in the document."""
    problems: Problems

    def _reject(
        self, reason: str, fix: str, *inner: str | int, value: object = None
    ) -> ReportedError:
        return self.problems.note((*self.path, *inner), reason, fix, value)

    def read(self, data: Any) -> Domain:
        """Return a domain in any notation, without its `when`."""
        if isinstance(data, tuple):
            return self._read_list(data)
        if not isinstance(data, dict):
            return Fixed(value=self.read_value(data))
        unknown = [key for key in data if key not in DOMAIN_KEYS]
        for key in unknown:
            self._reject("unknown key of a domain", f"{suggest(key, KINDS)}{SYNTAX}", key)
        if unknown:
            raise ReportedError
        kinds = [key for key in KINDS if key in data]
        if len(kinds) != 1:
            raise self._reject(f"needs exactly one of {join_names(KINDS)}", SYNTAX)
        kind, value = kinds[0], data[kinds[0]]
        if "step" in data and kind != "range":
            fix = "remove step:" if kind == "log" else "list the values instead"
            raise self._reject(f"{kind} has no step", fix, "step")
        if kind == "value":
            return Fixed(value=self.read_value(value))
        if kind != "choices":
            return self._read_range(value, data.get("step"), kind)
        if not isinstance(value, tuple):
            raise self._reject("not a list of choices", "write choices: [1, 2]")
        return self._read_list(value, kind)

    def _read_list(self, elements: tuple[Any, ...], *inner: str) -> Choices:
        if not elements:
            raise self._reject("no choices", "list at least one value", *inner)
        values: list[ParamValue] = []
        for index, element in enumerate(elements):
            with suppress(ReportedError):
                value = self.read_value(element, *inner, index)
                if is_one_of(value, tuple(values)):
                    reason, fix = f"{show(value)} is given twice", "name each value once"
                    raise self._reject(reason, fix, value=element)
                values.append(value)
        if len(values) < len(elements):
            raise ReportedError
        return Choices(choices=tuple(values))

    def _read_range(self, data: Any, step: Any, kind: str) -> Uniform:
        integer, log = self.info.kind == "int", kind == "log"
        if self.info.kind == "choice":
            fix = f"list choices: {show(self.info.choices)}"
            raise self._reject("has no order, so it cannot have a range", fix)
        if not isinstance(data, tuple) or len(data) != 2:
            raise self._reject("a range has two ends", f"write {kind}: [low, high]")
        numbers: list[Number] = []
        for end in data:
            with suppress(ReportedError):
                if log and isinstance(end, int | float) and not isinstance(end, bool) and end <= 0:
                    fix = "start above 0, such as {log: [0.01, 1]}, or use range:"
                    raise self._reject("a log range cannot reach 0 or below", fix, value=end)
                numbers.append(self.read_value(end))
        if len(numbers) < 2:
            raise ReportedError
        low, high = numbers
        if low >= high:
            fix = f"{kind}: [{show(high)}, {show(low)}]" if low > high else show(low)
            reason = "an empty range: low is not below high"
            raise self._reject(reason, f"write {fix}", value=data)
        width = None if step is None else self._read_step(step, low, high)
        distance = width or (1 if integer else None)
        if distance is not None and (high - low) / distance >= MOST_VALUES:
            fix = "end the range earlier" if integer else "write none, for any number"
            fix += "" if log else ", or write a larger step:"
            raise self._reject(f"more than {MOST_VALUES:,} values", fix, value=data)
        return Uniform(low=low, high=high, log=log, step=width, integer=integer)

    def _read_step(self, step: Any, low: Number, high: Number) -> Number:
        """Return the grid of a range; `high` must lie on it."""
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < math.inf:
            raise self._reject("not a positive number", "write a number above 0", "step")
        if self.info.kind == "int" and not isinstance(step, int):
            raise self._reject("not a whole number", "write a whole number", "step")
        if not is_on_grid(high - low, step):
            last = low + step * math.floor((high - low) / step)
            reason = f"steps from {show(low)} do not land on {show(high)}"
            fix = f"end the range at {last:.12g} or {last + step:.12g}, or remove step:"
            raise self._reject(reason, fix, "step")
        return step

    def read_value(self, data: Any, *inner: str | int) -> Any:
        """Return one value of the parameter's type and within its bounds."""
        complaint = explain_bad_value(data, self.info)
        if complaint is not None:
            raise self._reject(*complaint, *inner, value=data)
        # 1 and 1.0 mean the same weight, and so the same sweep.
        return float(data) if self.info.kind == "float" else data


def explain_bad_value(value: Any, info: ParameterInfo) -> tuple[str, str] | None:
    """Return reason and fix if a parameter cannot have `value`, else None."""
    if info.kind == "choice":
        if isinstance(value, bool | int | float | str) and is_one_of(value, info.choices):
            return None
        close = suggest(value, map(str, info.choices))
        return "unknown value", f"{close}use one of {join_names(info.choices)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number", f"write a {'whole ' if info.kind == 'int' else ''}number"
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite", "write a finite number"
    if isinstance(value, int) and abs(value) > LARGEST:  # no float holds it
        return "out of range", f"write a number of at most {LARGEST:.2g}"
    if info.kind == "int" and not isinstance(value, int):
        return "not a whole number", f"write {round(value)}"
    if info.low is not None and (value <= info.low if info.open_low else value < info.low):
        negative = value < 0 and info.low == 0
        reason = "a weight or rate cannot be negative" if negative else "too small"
        return reason, f"write a number {'above' if info.open_low else 'of at least'} {info.low:g}"
    if info.high is not None and value > info.high:
        return "too large", f"write a number of at most {info.high:g}"
    if info.kind == "float" and value and not SMALLEST <= abs(value) <= LARGEST:
        result = "0" if abs(value) < SMALLEST else "infinity"
        between = f"between {SMALLEST:.2g} and {LARGEST:.2g}"
        return f"{result} in the 32 bits that training computes in", f"write a number {between}"
    return None


@dataclass(frozen=True)
class SpaceReader:
    """Reads the parts of a file that name parameters."""

    parameters: Mapping[str, ParameterInfo]
    """Parameters of the task and of TRL; for an unknown task without those of rewards."""
    problems: Problems
    optional: Sequence[str] = ()
    """Weights of rewards that are on only where the space has them."""
    knows_task: bool = True

    def read_space(self, data: Any) -> Space:
        """Return the search space; a parameter with a bad domain appears at its default."""
        if not isinstance(data, dict):
            fix = "list parameters below it, such as group_size: [4, 8]"
            self.problems.note("space", "not a mapping of parameters to domains", fix)
            data = {}
        written = dict(self._flatten(data, ("space",)))
        domains: dict[str, Domain] = {}
        for name, info in self.parameters.items():
            if name in TRL_FIELDS and name not in written:
                continue
            domains[name] = Fixed(value=info.default)
            with suppress(ReportedError):
                if name in written:
                    reader = DomainReader(info, ("space", name), self.problems)
                    domains[name] = reader.read(written[name])
        conditions = {
            name: self._read_when(("space", name, "when"), child["when"], domains)
            for name, child in written.items()
            if isinstance(child, dict) and "when" in child
        }
        for name, when in conditions.items():
            domains[name] = domains[name].model_copy(update={"when": when})
        for name in written:
            modes = [m for m, info in registry.NORMALIZATIONS.items() if name not in info.ignores]
            self._restrict(name, "normalization", modes, domains)
            self._restrict(name, *(self.parameters[name].needs or ("", ())), domains)
        try:
            waits_for = {name: tuple(domain.when) for name, domain in domains.items()}
            TopologicalSorter(waits_for).prepare()
        except CycleError as error:
            circle = [str(name) for name in error.args[1]]
            reason = f"conditions in a circle: {' -> '.join(reversed(circle))}"
            path = ("space", circle[0], "when")
            self.problems.note(path, reason, "remove one of these when:")
            domains = {name: each.model_copy(update={"when": {}}) for name, each in domains.items()}
        return Space(domains=domains)

    def _flatten(
        self, entries: Mapping[str, Any], path: KeyPath, prefix: str = ""
    ) -> Iterator[tuple[str, Any]]:
        """Yield dotted parameter names with their values in the file; note unknown names."""
        for key, child in entries.items():
            name = f"{prefix}{key}"
            members = [each for each in self.parameters if each.startswith(f"{name}.")]
            if name in self.parameters:
                yield name, child
            elif members and isinstance(child, dict):
                yield from self._flatten(child, path, f"{name}.")
            elif members:
                fix = f"give a value to each of {join_names(members)}"
                fix = "write trl: {weight_decay: 0.1}" if members[0] in TRL_FIELDS else fix
                self.problems.note((*path, name), "a group of parameters, not one", fix)
            elif name.startswith(TRL_PREFIX):
                self.problems.note((*path, name), *explain_field(name.removeprefix(TRL_PREFIX)))
            elif self.knows_task or name not in FAMILIES:
                known = [n for n in (*self.parameters, *self.optional) if n not in TRL_FIELDS]
                fix = f"{suggest(name, known)}parameters are {join_names(known)}"
                fix = f"write {TRL_PREFIX}{name}" if f"{TRL_PREFIX}{name}" in TRL_FIELDS else fix
                self.problems.note((*path, name), "unknown parameter", fix)

    def _is_set(self, name: str, path: KeyPath, domains: Mapping[str, Domain]) -> bool:
        """Return whether the space has a parameter; note a field of TRL that it does not name."""
        if name not in domains:
            fix = f"add {name} to space:, or remove it here"
            self.problems.note((*path, name), "this sweep does not set it", fix)
        return name in domains

    def _read_when(
        self, path: KeyPath, data: Any, domains: Mapping[str, Domain]
    ) -> dict[str, tuple[ParamValue, ...]]:
        """Return `when: {normalization: [gdpo]}`; a scalar stands for a list of one."""
        if not isinstance(data, dict):
            fix = "write when: {normalization: [gdpo]}"
            self.problems.note(path, "not a mapping of parameters to values", fix)
            return {}
        conditions: dict[str, tuple[ParamValue, ...]] = {}
        for parent, child in self._flatten(data, path):
            if not self._is_set(parent, path, domains):
                continue
            domain, elements = domains[parent], child if isinstance(child, tuple) else (child,)
            if not elements:
                reason = "no value, so it never holds"
                self.problems.note((*path, parent), reason, "list a value")
            possible = domain.list_values()
            values: list[ParamValue] = []
            for value in elements:
                if isinstance(value, bool | int | float | str) and (
                    (possible is not None and domain.contains(value))
                    or self.problems.has_problem(f"space.{parent}")
                ):
                    values.append(domain.align(value))
                    continue
                fix = "conditions need a parameter with choices; this one is a continuous range"
                fix = fix if possible is None else f"use any of {join_names(possible)}"
                reason = f"{parent} never has this value here"
                self.problems.note((*path, parent), reason, fix, value)
            conditions[parent] = tuple(values)
        return conditions

    def _restrict(
        self, name: str, parent: str, effective: Sequence[ParamValue], domains: dict[str, Domain]
    ) -> None:
        """Search a parameter only under those values of another one that give it effect."""
        domain = domains[name]
        if not parent or isinstance(domain, Fixed) or self.problems.has_problem(f"space.{parent}"):
            return
        possible = domain.when.get(parent, domains[parent].list_values() or ())
        kept = tuple(value for value in possible if value in effective)
        if len(kept) == len(possible):
            return
        if not kept:
            reason = f"{parent} is never {join_names(effective)}: it has no effect"
            fix = f"remove it, or write {parent}: {show([*possible, effective[0]])}"
            self.problems.note(("space", name), reason, fix)
        when = {**domain.when, parent: kept}
        domains[name] = domain.model_copy(update={"when": when})

    def read_enqueue(self, data: Any, space: Space, task: TaskInfo | None) -> tuple[Point, ...]:
        """Return `enqueue:`: points of the space, each complete or partial, or `published`."""
        if not isinstance(data, tuple):
            fix = "write a list of points, such as - {group_size: 8}"
            self.problems.note("enqueue", "not a list", fix)
            return ()
        points: list[Point] = []
        for index, element in enumerate(data):
            path = ("enqueue", index)
            if isinstance(element, dict) and element:
                points.append(self._read_point(element, path, space))
            elif element != PUBLISHED:
                fix = "write values, such as {group_size: 8}, or published"
                self.problems.note(path, "not a point of the space", fix)
            elif task is not None:
                points += self._list_published(path, space, task)
        return tuple(points)

    def _list_published(self, path: KeyPath, space: Space, task: TaskInfo) -> list[Point]:
        """Return the settings of the method's paper, other than the baseline, that the space has.

        Source: arXiv 2601.05242, where the weight of the length runs from .25 to 1.
        """
        if task.length_reward is None or not task.published:
            reason = "only the baseline, which every sweep runs, was published for this task"
            self.problems.refuse(path, reason, "remove the word")
            return []
        name, weights = f"reward_weights.{task.length_reward}", registry.PUBLISHED_LENGTH_WEIGHTS
        points: list[Point] = [{**task.published, name: weight} for weight in weights]
        inside = [p for p in points if all(space.domains[k].contains(v) for k, v in p.items())]
        if not inside:
            reason = "the space holds none of the published points"
            needed = f"1 and, for the length, {join_names(weights)}"
            fix = f"widen space.reward_weights to hold {needed}, or remove the word"
            self.problems.refuse(path, reason, fix, "space")
        return inside

    def _read_point(self, entries: Mapping[str, Any], path: KeyPath, space: Space) -> Point:
        point: Point = {}
        for name, child in self._flatten(entries, path):
            if not self._is_set(name, path, space.domains):
                continue
            with suppress(ReportedError):
                reader = DomainReader(self.parameters[name], path, self.problems)
                point[name] = space.domains[name].align(reader.read_value(child, name))
        active = space.select_active(point)
        for name, value in point.items():
            domain, key = space.domains[name], f"space.{name}"
            parents = [space.domains[p] for p in domain.when if p not in point]
            if not domain.contains(value):
                fix = f"stay within {format_domain(domain)}, or widen space.{name}"
                self.problems.refuse((*path, name), "outside of the space", fix, key)
            elif name not in active and all(isinstance(parent, Fixed) for parent in parents):
                fix = f"remove it, or meet {show(domain.when)}"
                self.problems.refuse((*path, name), "has no effect at this point", fix, key)
        return point
