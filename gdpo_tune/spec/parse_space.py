"""`space:` and `enqueue:` from marked nodes, with every problem noted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from gdpo_tune import registry
from gdpo_tune.registry import ParameterInfo
from gdpo_tune.spec.domains import Choice, Domain, Fixed, Number, Uniform, is_one_of, on_grid
from gdpo_tune.spec.problems import KeyPath, Node, Problems, did_you_mean, one_of, show
from gdpo_tune.spec.space import Space
from gdpo_tune.trials import ParamValue

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
        entries = node.mapping()
        if entries is None:
            return self.fixed(node) if node.items() is None else self.choices(node)
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
        elements = node.items()
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
        ends = node.items()
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
        return Uniform(low=low, high=high, log=log, step=width, integer=self.info.kind == "int")

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
        bound = f"{'above' if info.open_low else 'at least'} {info.low:g}"
        negative = value < 0 and info.low == 0
        reason = "a weight or rate cannot be negative" if negative else "too small"
        return reason, f"write a number {bound}"
    if info.high is not None and value > info.high:
        return "too large", f"write a number of at most {info.high:g}"
    return None


def parse_space(
    node: Node, parameters: Mapping[str, ParameterInfo], problems: Problems
) -> Space | None:
    """The `space:` mapping; None if any domain is unusable.

    Args:
        node: what the file says.
        parameters: every parameter of the task.
        problems: where problems go.
    """
    entries = node.mapping()
    if entries is None:
        fix = "list parameters below it, such as group_size: [4, 8]"
        problems.at(node, ("space",), "not a mapping of parameters to domains", fix)
        return None
    before = len(problems.found)
    named = dict(flatten(node, parameters, ("space",), problems))
    parsed: dict[str, Domain] = {}
    for name, child in named.items():
        domain = Reader(parameters[name], ("space", name), problems).domain(child)
        if domain is not None:
            parsed[name] = domain
    # A parameter with a bad domain still counts as there, so that nothing is complained of twice.
    domains = {
        name: parsed.get(name, Fixed(value=info.default)) for name, info in parameters.items()
    }
    ordered = {name: domains[name] for name in (*named, *(n for n in domains if n not in named))}
    unsound = named.keys() - parsed.keys()
    for name, child in named.items():
        when = (child.mapping() or {}).get("when")
        conditions = parse_when(name, when, ordered, unsound, parameters, problems) if when else {}
        ordered[name] = ordered[name].model_copy(update={"when": conditions})
    ordered = {name: without_ignoring_modes(name, domain) for name, domain in ordered.items()}
    refuse_circle(ordered, named, problems)
    return Space(domains=ordered) if len(problems.found) == before else None


def flatten(
    node: Node,
    parameters: Mapping[str, ParameterInfo],
    path: KeyPath,
    problems: Problems,
    prefix: str = "",
) -> Iterator[tuple[str, Node]]:
    """Dotted parameter names with what the file says of each; unknown ones are noted."""
    for key, child in (node.mapping() or {}).items():
        name = f"{prefix}{key}"
        if name in parameters:
            yield name, child
        elif (
            any(known.startswith(f"{name}.") for known in parameters)
            and child.mapping() is not None
        ):
            yield from flatten(child, parameters, path, problems, f"{name}.")
        elif any(known.startswith(f"{name}.") for known in parameters):
            fix = f"write {name}: {{...}} with any of {one_of(k.removeprefix(f'{name}.') for k in parameters if k.startswith(f'{name}.'))}"
            problems.at(child, (*path, name), "a group of parameters, not one", fix)
        else:
            fix = f"{did_you_mean(name, parameters)}parameters are {one_of(parameters)}"
            problems.at(child, (*path, name), "unknown parameter", fix)


def parse_when(
    name: str,
    node: Node,
    domains: Mapping[str, Domain],
    unsound: set[str],
    parameters: Mapping[str, ParameterInfo],
    problems: Problems,
) -> dict[str, tuple[ParamValue, ...]]:
    """`when: {normalization: [gdpo]}`; a scalar stands for a list of one."""
    path = ("space", name, "when")
    if node.mapping() is None:
        fix = "write when: {normalization: [gdpo]}"
        problems.at(node, path, "not a mapping of parameters to values", fix)
        return {}
    conditions: dict[str, tuple[ParamValue, ...]] = {}
    for parent, child in flatten(node, parameters, path, problems):
        elements = child.items() if child.items() is not None else [child]
        if not elements:
            problems.at(child, (*path, parent), "no value, so it never holds", "list a value")
        values: list[ParamValue] = []
        for element in elements or []:
            value = element.value
            if isinstance(value, bool | int | float | str) and (
                parent in unsound or takes(domains[parent], value)
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


def without_ignoring_modes(name: str, domain: Domain) -> Domain:
    """The domain, conditioned on the modes under which it has an effect."""
    modes = registry.NORMALIZATIONS
    if not any(name in mode.ignores for mode in modes.values()):
        return domain
    wanted = domain.when.get("normalization", tuple(modes))
    heeding = tuple(m for m in wanted if name not in modes[str(m)].ignores)
    return domain.model_copy(update={"when": {**domain.when, "normalization": heeding}})


def refuse_circle(
    domains: Mapping[str, Domain], nodes: Mapping[str, Node], problems: Problems
) -> None:
    """Note conditions that wait for each other."""
    try:
        TopologicalSorter({name: tuple(domain.when) for name, domain in domains.items()}).prepare()
    except CycleError as error:
        circle = [str(name) for name in error.args[1]]
        reason = f"conditions in a circle: {' -> '.join(reversed(circle))}"
        node = nodes[circle[0]].find(("when",))
        problems.at(node, ("space", circle[0], "when"), reason, "remove one of these when:")


def parse_enqueue(
    node: Node | None,
    space: Space | None,
    parameters: Mapping[str, ParameterInfo],
    problems: Problems,
) -> tuple[dict[str, ParamValue], ...]:
    """`enqueue:`, a list of points of the space, each complete or partial."""
    if node is None:
        return ()
    points = node.items()
    if points is None:
        fix = "write a list of points, such as - {group_size: 8}"
        problems.at(node, ("enqueue",), "not a list", fix)
        return ()
    return tuple(
        parse_point(point, index, space, parameters, problems) for index, point in enumerate(points)
    )


def parse_point(
    node: Node,
    index: int,
    space: Space | None,
    parameters: Mapping[str, ParameterInfo],
    problems: Problems,
) -> dict[str, ParamValue]:
    """One point: names known, values within the domains, conditions met."""
    path = ("enqueue", index)
    if not node.mapping():
        problems.at(node, path, "not a point of the space", "write values, such as {group_size: 8}")
        return {}
    given: dict[str, ParamValue] = {}
    nodes: dict[str, Node] = {}
    for name, child in flatten(node, parameters, path, problems):
        value = Reader(parameters[name], (*path, name), problems).value(child, (*path, name))
        if value is not None:
            given[name], nodes[name] = value, child
    if space is None:
        return given
    active = space.active(given)
    for name, value in given.items():
        domain = space.domains[name]
        if not domain.contains(value):
            fix = f"stay within {describe(domain)}, or widen space.{name}"
            problems.at(nodes[name], (*path, name), "outside of the space", fix)
        elif name not in active and can_judge(name, space, given):
            conditions = show({key: list(values) for key, values in domain.when.items()})
            fix = f"remove it, or meet {conditions}"
            problems.at(nodes[name], (*path, name), "has no effect at this point", fix)
    return given


def can_judge(name: str, space: Space, given: Mapping[str, ParamValue]) -> bool:
    """Whether the point says enough to tell that `name` is inactive."""
    parents = space.domains[name].when
    return all(p in given or isinstance(space.domains[p], Fixed) for p in parents)


def describe(domain: Domain) -> str:
    """A domain in the file's notation."""
    if isinstance(domain, Fixed):
        return show(domain.value)
    if isinstance(domain, Choice):
        return show(domain.choices)
    step = f", step: {show(domain.step)}" if domain.step is not None else ""
    kind = "log" if domain.log else "range"
    return f"{{{kind}: [{show(domain.low)}, {show(domain.high)}]{step}}}"


def parameter_node(root: Node, name: str) -> Node | None:
    """What the file says of one parameter; None if it says nothing."""
    path: KeyPath = ("space", *name.split("."))
    entries = root.find(path[:-1]).mapping() or {}
    return entries.get(str(path[-1]))
