"""`space:` from marked nodes, with every problem noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import ParameterInfo
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.domains import Domain, Fixed
from gdpo_tune.spec.notation import Reader
from gdpo_tune.spec.problems import KeyPath, Node, Problems, did_you_mean, one_of, show
from gdpo_tune.spec.space import Space


def parse_space(
    node: Node, parameters: Mapping[str, ParameterInfo], problems: Problems
) -> Space | None:
    """The `space:` mapping; None if conditions or the whole are unusable.

    Args:
        node: what the file says.
        parameters: every parameter of the task.
        problems: where problems go. A parameter with a bad domain appears at its default, so that
            the rest can still be checked.
    """
    if node.entries is None:
        fix = "list parameters below it, such as group_size: [4, 8]"
        problems.at(node, ("space",), "not a mapping of parameters to domains", fix)
        return None
    named = dict(flatten(node, parameters, ("space",), problems))
    domains: dict[str, Domain] = {}
    for name, info in parameters.items():
        reader = Reader(info, ("space", name), problems)
        written = reader.domain(named[name]) if name in named else None
        domains[name] = written or Fixed(value=info.default)
    conditions = {
        name: parse_when(name, child.entries["when"], domains, parameters, problems)
        for name, child in named.items()
        if child.entries is not None and "when" in child.entries
    }
    for name, when in conditions.items():
        domains[name] = domains[name].model_copy(update={"when": when})
    for name, child in named.items():
        domains[name] = without_ignoring_modes(name, child, domains, problems)
        domains[name] = where_needed(name, child, domains, parameters[name], problems)
    return None if has_circle(domains, named, problems) else Space(domains=domains)


def flatten(
    node: Node,
    parameters: Mapping[str, ParameterInfo],
    path: KeyPath,
    problems: Problems,
    prefix: str = "",
) -> Iterator[tuple[str, Node]]:
    """Dotted parameter names with what the file says of each; unknown ones are noted."""
    for key, child in (node.entries or {}).items():
        name = f"{prefix}{key}"
        members = [known for known in parameters if known.startswith(f"{name}.")]
        if name in parameters:
            yield name, child
        elif members and child.entries is not None:
            yield from flatten(child, parameters, path, problems, f"{name}.")
        elif members:
            fix = f"give a value to each of {one_of(members)}"
            problems.at(child, (*path, name), "a group of parameters, not one", fix)
        else:
            fix = f"{did_you_mean(name, parameters)}parameters are {one_of(parameters)}"
            problems.at(child, (*path, name), "unknown parameter", fix)


def parse_when(
    name: str,
    node: Node,
    domains: Mapping[str, Domain],
    parameters: Mapping[str, ParameterInfo],
    problems: Problems,
) -> dict[str, tuple[ParamValue, ...]]:
    """`when: {normalization: [gdpo]}`; a scalar stands for a list of one."""
    path = ("space", name, "when")
    if node.entries is None:
        fix = "write when: {normalization: [gdpo]}"
        problems.at(node, path, "not a mapping of parameters to values", fix)
        return {}
    conditions: dict[str, tuple[ParamValue, ...]] = {}
    for parent, child in flatten(node, parameters, path, problems):
        elements = child.elements if child.elements is not None else [child]
        if not elements:
            problems.at(child, (*path, parent), "no value, so it never holds", "list a value")
        values: list[ParamValue] = []
        for element in elements or []:
            value = element.value
            if isinstance(value, bool | int | float | str) and (
                takes(domains[parent], value) or problems.about(f"space.{parent}")
            ):
                values.append(value)
                continue
            problems.at(
                element,
                (*path, parent),
                f"{parent} never has this value here",
                reachable_fix(domains[parent]),
            )
        conditions[parent] = tuple(values)
    return conditions


def takes(domain: Domain, value: ParamValue) -> bool:
    """Whether a condition may ask for `value`: not of a continuous range, where it never occurs."""
    return domain.values() is not None and domain.contains(value)


def reachable_fix(domain: Domain) -> str:
    """How to name a value that the domain has."""
    values = domain.values()
    if values is None:
        return "conditions need a parameter with choices; this one is a continuous range"
    return f"use any of {one_of(values)}"


def without_ignoring_modes(
    name: str, node: Node, domains: Mapping[str, Domain], problems: Problems
) -> Domain:
    """The domain of `name`, searched only under normalization modes that do not ignore it."""
    domain, mode = domains[name], "normalization"
    wanted = domain.when.get(mode, domains[mode].values() or ())
    # a mode that does not exist is a problem of its own, noted where it is written
    modes = {m: registry.NORMALIZATIONS.get(str(m)) for m in wanted}
    heeding = tuple(m for m, info in modes.items() if info is None or name not in info.ignores)
    if isinstance(domain, Fixed) or len(heeding) == len(wanted):
        return domain
    if not heeding:
        fix = f"remove it, or search over a {mode} that heeds it"
        problems.at(node, ("space", name), f"{one_of(wanted)} ignores it: it has no effect", fix)
    return domain.model_copy(update={"when": {**domain.when, mode: heeding}})


def where_needed(
    name: str,
    node: Node,
    domains: Mapping[str, Domain],
    info: ParameterInfo,
    problems: Problems,
) -> Domain:
    """The domain of `name`, searched only under values of another parameter that give it effect."""
    domain = domains[name]
    if info.needs is None or isinstance(domain, Fixed) or problems.about(f"space.{info.needs[0]}"):
        return domain
    parent, effective = info.needs
    wanted = domain.when.get(parent, domains[parent].values() or ())
    heeding = tuple(value for value in wanted if value in effective)
    if len(heeding) == len(wanted):
        return domain
    if not heeding:
        reason = f"{parent} is never {one_of(effective)}: it has no effect"
        fix = f"remove it, or write {parent}: {show([*wanted, effective[0]])}"
        problems.at(node, ("space", name), reason, fix)
    return domain.model_copy(update={"when": {**domain.when, parent: heeding}})


def has_circle(
    domains: Mapping[str, Domain], nodes: Mapping[str, Node], problems: Problems
) -> bool:
    """Whether conditions wait for each other; a problem is noted if so."""
    try:
        TopologicalSorter({name: tuple(domain.when) for name, domain in domains.items()}).prepare()
    except CycleError as error:
        circle = [str(name) for name in error.args[1]]
        reason = f"conditions in a circle: {' -> '.join(reversed(circle))}"
        node = nodes[circle[0]].find(("when",))
        problems.at(node, ("space", circle[0], "when"), reason, "remove one of these when:")
        return True
    return False


def parameter_node(root: Node, name: str) -> Node | None:
    """What the file says of one parameter; None if it says nothing."""
    path: KeyPath = ("space", *name.split("."))
    entries = root.find(path[:-1]).entries or {}
    return entries.get(str(path[-1]))
