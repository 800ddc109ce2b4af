"""`space:` and `enqueue:` as a file writes them, with every problem noted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import FAMILIES, PARAMETERS, ParameterInfo
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.notation import DomainReader, format_domain, get_list, get_mapping
from gdpo_tune.spec.problems import (
    KeyPath,
    Problems,
    UnreadableNodeError,
    join_names,
    show,
    suggest,
)
from gdpo_tune.spec.space import Domain, Fixed, Space

PUBLISHED = "published"
"""Word of `enqueue:` for the settings of the method's paper, besides the baseline."""

Point = dict[str, ParamValue]


@dataclass(frozen=True)
class SpaceReader:
    """Reads the parts of a file that name parameters."""

    parameters: Mapping[str, ParameterInfo]
    """Parameters of the task; for an unknown task `PARAMETERS`, and without those of rewards."""
    problems: Problems

    def read_space(self, data: object) -> Space:
        """Return the search space; a parameter with a bad domain appears at its default."""
        entries = get_mapping(data)
        if entries is None:
            fix = "list parameters below it, such as group_size: [4, 8]"
            self.problems.note("space", "not a mapping of parameters to domains", fix)
        written = dict(self._flatten(entries or {}, ("space",)))
        domains: dict[str, Domain] = {}
        for name, info in self.parameters.items():
            domains[name] = Fixed(value=info.default)
            with suppress(UnreadableNodeError):
                if name in written:
                    reader = DomainReader(info, ("space", name), self.problems)
                    domains[name] = reader.read(written[name])
        conditions = {
            name: self._read_when(("space", name, "when"), entries["when"], domains)
            for name, child in written.items()
            if (entries := get_mapping(child)) is not None and "when" in entries
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
        self, entries: Mapping[str, object], path: KeyPath, prefix: str = ""
    ) -> Iterator[tuple[str, object]]:
        for key, child in entries.items():
            name, inner = f"{prefix}{key}", get_mapping(child)
            members = [each for each in self.parameters if each.startswith(f"{name}.")]
            if name in self.parameters:
                yield name, child
            elif members and inner is not None:
                yield from self._flatten(inner, path, f"{name}.")
            elif members:
                fix = f"give a value to each of {join_names(members)}"
                self.problems.note((*path, name), "a group of parameters, not one", fix)
            elif self.parameters is not PARAMETERS or name not in FAMILIES:
                fix = (
                    f"{suggest(name, self.parameters)}parameters are {join_names(self.parameters)}"
                )
                self.problems.note((*path, name), "unknown parameter", fix)

    def _read_when(
        self, path: KeyPath, data: object, domains: Mapping[str, Domain]
    ) -> dict[str, tuple[ParamValue, ...]]:
        when = get_mapping(data)
        if when is None:
            fix = "write when: {normalization: [gdpo]}"
            self.problems.note(path, "not a mapping of parameters to values", fix)
        conditions: dict[str, tuple[ParamValue, ...]] = {}
        for parent, child in self._flatten(when or {}, path):
            elements, domain = get_list(child), domains[parent]
            if elements == ():
                reason = "no value, so it never holds"
                self.problems.note((*path, parent), reason, "list a value")
            possible = domain.list_values()
            values: list[ParamValue] = []
            for value in (child,) if elements is None else elements:
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

    def read_enqueue(self, data: object, space: Space, task: TaskInfo | None) -> tuple[Point, ...]:
        """Return `enqueue:`: points of the space, each complete or partial, or `published`."""
        elements = get_list(data)
        if elements is None:
            fix = "write a list of points, such as - {group_size: 8}"
            self.problems.note("enqueue", "not a list", fix)
        points: list[Point] = []
        for index, element in enumerate(elements or ()):
            path, entries = ("enqueue", index), get_mapping(element)
            if entries:
                points.append(self._read_point(entries, path, space))
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

    def _read_point(self, entries: Mapping[str, object], path: KeyPath, space: Space) -> Point:
        point: Point = {}
        for name, child in self._flatten(entries, path):
            with suppress(UnreadableNodeError):
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


def check_weights(space: Space, problems: Problems) -> None:
    """Refuse a space in which a trial can have only weights of 0."""
    weights = [name for name in space.domains if name.startswith("reward_weights.")]
    for name in weights:
        values = space.list_reachable(name)
        if not (space.domains[name].contains(0) if values is None else 0 in values):
            return
    if not weights:
        return  # of an unknown task, if the file names no reward
    always = all(space.domains[name].list_values() == (0,) for name in weights)
    reason = "every weight is 0" if always else "a trial could have a weight of 0 for every reward"
    anchor = weights[0].rpartition(".")[2]
    fix = f"fix one above 0, such as {anchor}: 1: only ratios matter"
    problems.refuse("space.reward_weights", f"{reason}, so nothing would be learnt", fix)


def check_ranges(space: Space, task: TaskInfo, problems: Problems) -> None:
    """Refuse gamma and conditions that depend on a reward of unknown range."""
    unknown = [name for name, (low, high) in task.rewards.items() if math.isinf(high - low)]
    weighted = [name for name in unknown if space.list_reachable(f"reward_weights.{name}") != (0,)]
    state = "state the lowest and highest value of {} in its task"
    if weighted and space.domains["gamma"].list_values() != (0,):
        reason = f"the range of {join_names(weighted)} is unknown, and gamma needs it"
        problems.refuse("space.gamma", reason, f"remove gamma, or {state.format(weighted[0])}")
    for parameter in [name for name in space.domains if name.startswith("conditioning.")]:
        for other in set(unknown).intersection(space.domains[parameter].list_values() or ()):
            reason = f"the range of {other} is unknown, and its threshold needs it"
            fix = f"condition on another reward, or {state.format(other)}"
            problems.refuse(("space", parameter), reason, fix)
