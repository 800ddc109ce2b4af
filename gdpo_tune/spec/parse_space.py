"""`space:` and `enqueue:` as a file writes them, with every problem noted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import FAMILIES, PARAMETERS, ParameterInfo, parameters_of
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.notation import DomainReader, as_list, as_mapping, describe
from gdpo_tune.spec.problems import KeyPath, Node, Problems, did_you_mean, one_of, show
from gdpo_tune.spec.space import Domain, Fixed, Space

PUBLISHED = "published"
"""Word of `enqueue:` for the settings of the method's paper, besides the baseline."""

Parameters = Mapping[str, ParameterInfo]
Point = dict[str, ParamValue]


def list_parameters(task: TaskInfo | None, root: Node) -> Parameters:
    """Return what `space:` may name; under an unknown task, any reward that the file names."""
    if task is not None:
        return parameters_of(task)
    named: dict[str, ParameterInfo] = {}
    for family, info in FAMILIES.items():
        group = root.get(("space", family))
        for reward, node in ((group and group.entries) or {}).items():
            values = (child.value for _, child in node.walk())
            choices = tuple(v for v in values if isinstance(v, bool | int | float | str))
            named[f"{family}.{reward}"] = replace(info, choices=choices)
    return {**PARAMETERS, **named}


def parse_space(data: object, parameters: Parameters, problems: Problems) -> Space:
    """Return the search space.

    Args:
        data: the section as plain values.
        parameters: every parameter of the task.
        problems: where problems go. A parameter with a bad domain appears at its default, so that
            the rest can still be checked.
    """
    entries = as_mapping(data)
    if entries is None:
        fix = "list parameters below it, such as group_size: [4, 8]"
        problems.note("space", "not a mapping of parameters to domains", fix)
    written = dict(flatten(entries or {}, parameters, ("space",), problems))
    domains: dict[str, Domain] = {}
    for name, info in parameters.items():
        reader = DomainReader(info, ("space", name), problems)
        domain = reader.read(written[name]) if name in written else None
        domains[name] = domain or Fixed(value=info.default)
    conditions = {
        name: _parse_when(name, entries["when"], domains, parameters, problems)
        for name, child in written.items()
        if (entries := as_mapping(child)) is not None and "when" in entries
    }
    for name, when in conditions.items():
        domains[name] = domains[name].model_copy(update={"when": when})
    for name in written:
        modes = [m for m, info in registry.NORMALIZATIONS.items() if name not in info.ignores]
        for parent, values in (("normalization", modes), parameters[name].needs or ("", ())):
            if parent and not problems.about(f"space.{parent}"):
                domains[name] = _restrict(name, parent, values, domains, problems)
    try:
        TopologicalSorter({name: tuple(domain.when) for name, domain in domains.items()}).prepare()
    except CycleError as error:
        circle = [str(name) for name in error.args[1]]
        reason = f"conditions in a circle: {' -> '.join(reversed(circle))}"
        problems.note(("space", circle[0], "when"), reason, "remove one of these when:")
        domains = {name: domain.model_copy(update={"when": {}}) for name, domain in domains.items()}
    return Space(domains=domains)


def flatten(
    entries: Mapping[str, object],
    parameters: Parameters,
    path: KeyPath,
    problems: Problems,
    prefix: str = "",
) -> Iterator[tuple[str, object]]:
    """Yield dotted parameter names with what the file says of each; unknown ones are noted."""
    for key, child in entries.items():
        name, inner = f"{prefix}{key}", as_mapping(child)
        members = [parameter for parameter in parameters if parameter.startswith(f"{name}.")]
        if name in parameters:
            yield name, child
        elif members and inner is not None:
            yield from flatten(inner, parameters, path, problems, f"{name}.")
        elif members:
            fix = f"give a value to each of {one_of(members)}"
            problems.note((*path, name), "a group of parameters, not one", fix)
        else:
            fix = f"{did_you_mean(name, parameters)}parameters are {one_of(parameters)}"
            problems.note((*path, name), "unknown parameter", fix)


def _parse_when(
    name: str,
    data: object,
    domains: Mapping[str, Domain],
    parameters: Parameters,
    problems: Problems,
) -> dict[str, tuple[ParamValue, ...]]:
    """Return `when: {normalization: [gdpo]}`; a scalar stands for a list of one."""
    path, when = ("space", name, "when"), as_mapping(data)
    if when is None:
        fix = "write when: {normalization: [gdpo]}"
        problems.note(path, "not a mapping of parameters to values", fix)
    conditions: dict[str, tuple[ParamValue, ...]] = {}
    for parent, child in flatten(when or {}, parameters, path, problems):
        elements, domain = as_list(child), domains[parent]
        if elements == ():
            problems.note((*path, parent), "no value, so it never holds", "list a value")
        possible = domain.values()
        values: list[ParamValue] = []
        for value in (child,) if elements is None else elements:
            if isinstance(value, bool | int | float | str) and (
                (possible is not None and domain.contains(value))
                or problems.about(f"space.{parent}")
            ):
                values.append(value)
                continue
            fix = "conditions need a parameter with choices; this one is a continuous range"
            fix = fix if possible is None else f"use any of {one_of(possible)}"
            problems.note((*path, parent), f"{parent} never has this value here", fix, value)
        conditions[parent] = tuple(values)
    return conditions


def _restrict(
    name: str,
    parent: str,
    effective: Sequence[ParamValue],
    domains: Mapping[str, Domain],
    problems: Problems,
) -> Domain:
    """Return the domain of `name`, searched only where another parameter gives it effect.

    Args:
        name: of the parameter.
        parent: the other parameter.
        effective: its values that do.
        domains: of all parameters.
        problems: gets one if the other parameter never has such a value.
    """
    domain = domains[name]
    wanted = domain.when.get(parent, domains[parent].values() or ())
    heeding = tuple(value for value in wanted if value in effective)
    if isinstance(domain, Fixed) or len(heeding) == len(wanted):
        return domain
    if not heeding:
        reason = f"{parent} is never {one_of(effective)}: it has no effect"
        fix = f"remove it, or write {parent}: {show([*wanted, effective[0]])}"
        problems.note(("space", name), reason, fix)
    return domain.model_copy(update={"when": {**domain.when, parent: heeding}})


def check_weights(space: Space, problems: Problems) -> None:
    """Refuse a space in which a trial can have only weights of 0."""
    weights = [name for name in space.domains if name.startswith("reward_weights.")]
    for name in weights:
        values = space.reachable(name)
        if not (space.domains[name].contains(0) if values is None else 0 in values):
            return
    if not weights:
        return  # of an unknown task, if the file names no reward
    always = all(space.domains[name].values() == (0,) for name in weights)
    reason = "every weight is 0" if always else "a trial could have a weight of 0 for every reward"
    anchor = weights[0].rpartition(".")[2]
    fix = f"fix one above 0, such as {anchor}: 1: only ratios matter"
    problems.refuse("space.reward_weights", f"{reason}, so nothing would be learnt", fix)


def check_ranges(space: Space, task: TaskInfo, problems: Problems) -> None:
    """Refuse gamma and conditions that look at a reward of an unknown range."""
    unknown = [name for name, (low, high) in task.rewards.items() if math.isinf(high - low)]
    weighted = [name for name in unknown if space.reachable(f"reward_weights.{name}") != (0,)]
    state = "state the lowest and highest value of {} in its task"
    if weighted and space.domains["gamma"].values() != (0,):
        reason = f"the range of {one_of(weighted)} is not known, so neither is how saturated it is"
        problems.refuse("space.gamma", reason, f"remove gamma, or {state.format(weighted[0])}")
    for name in task.rewards:
        parameter = f"conditioning.{name}"
        choices = space.domains[parameter].values() if parameter in space.domains else None
        for other in [name for name in unknown if name in (choices or ())]:
            reason = f"the range of {other} is not known, so neither is its threshold"
            fix = f"condition on another reward, or {state.format(other)}"
            problems.refuse(("space", parameter), reason, fix)


def parse_enqueue(
    data: object, space: Space, task: TaskInfo | None, parameters: Parameters, problems: Problems
) -> tuple[Point, ...]:
    """Return `enqueue:`, a list of points of the space, each complete or partial, or `published`."""
    elements = as_list(data)
    if elements is None:
        problems.note("enqueue", "not a list", "write a list of points, such as - {group_size: 8}")
    points: list[Point] = []
    for index, element in enumerate(elements or ()):
        path, entries = ("enqueue", index), as_mapping(element)
        if entries:
            points.append(_parse_point(entries, path, space, parameters, problems))
        elif element != PUBLISHED:
            fix = "write values, such as {group_size: 8}, or published"
            problems.note(path, "not a point of the space", fix)
        elif task is not None:
            points += _list_published(path, space, task, problems)
    return tuple(points)


def _list_published(path: KeyPath, space: Space, task: TaskInfo, problems: Problems) -> list[Point]:
    """Return the settings of the method's paper besides the baseline, as far as the space has them.

    They have other weights of the length. Source: arXiv 2601.05242, where that weight runs from .25
    to 1.
    """
    if task.length_reward is None or not task.published:
        reason = "nothing but the baseline, which is always run, was published for this task"
        problems.refuse(path, reason, "remove the word")
        return []
    name, weights = f"reward_weights.{task.length_reward}", registry.PUBLISHED_LENGTH_WEIGHTS
    points: list[Point] = [{**task.published, name: weight} for weight in weights]
    held = [p for p in points if all(space.domains[k].contains(v) for k, v in p.items())]
    if not held:
        reason = "the space holds none of the published points"
        needed = f"1 and, for the length, {one_of(weights)}"
        fix = f"widen space.reward_weights to hold {needed}, or remove it"
        problems.refuse(path, reason, fix, given=("space",))
    return held


def _parse_point(
    entries: Mapping[str, object],
    path: KeyPath,
    space: Space,
    parameters: Parameters,
    problems: Problems,
) -> Point:
    """Return one point: names known, values within the domains, conditions met."""
    point: Point = {}
    for name, child in flatten(entries, parameters, path, problems):
        value = DomainReader(parameters[name], path, problems).value(child, (*path, name))
        if value is not None:
            point[name] = value
    active = space.active(point)
    for name, value in point.items():
        domain, given = space.domains[name], (f"space.{name}",)
        parents = [p for p in domain.when if p not in point]
        if not domain.contains(value):
            fix = f"stay within {describe(domain)}, or widen space.{name}"
            problems.refuse((*path, name), "outside of the space", fix, given=given)
        elif name not in active and all(isinstance(space.domains[p], Fixed) for p in parents):
            fix = f"remove it, or meet {show(domain.when)}"
            problems.refuse((*path, name), "has no effect at this point", fix, given=given)
    return point
