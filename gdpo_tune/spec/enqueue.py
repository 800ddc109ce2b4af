"""`enqueue:` from marked nodes, with every problem noted: points of the space to try first."""

from __future__ import annotations

from collections.abc import Mapping

from gdpo_tune.core import registry, task_files
from gdpo_tune.core.parameters import ParameterInfo
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.domains import Fixed
from gdpo_tune.spec.notation import Reader, describe
from gdpo_tune.spec.parse_space import flatten
from gdpo_tune.spec.problems import Node, Problems, one_of, show
from gdpo_tune.spec.space import Space

PUBLISHED = "published"
"""A word that stands for the points of `published_points`."""

Point = dict[str, ParamValue]


def parse_enqueue(
    node: Node | None,
    space: Space | None,
    task: str | None,
    parameters: Mapping[str, ParameterInfo],
    problems: Problems,
) -> tuple[Point, ...]:
    """`enqueue:`, a list of points of the space, each complete or partial, or `published`."""
    if node is None:
        return ()
    if node.elements is None:
        fix = "write a list of points, such as - {group_size: 8}"
        problems.at(node, ("enqueue",), "not a list", fix)
        return ()
    points: list[Point] = []
    for index, element in enumerate(node.elements):
        if element.value == PUBLISHED:
            points += parse_published(element, index, space, task, problems)
        else:
            points.append(parse_point(element, index, space, parameters, problems))
    return tuple(points)


def parse_published(
    node: Node, index: int, space: Space | None, task: str | None, problems: Problems
) -> list[Point]:
    """The published points that the space holds; that there is none is a problem."""
    if space is None or task is None or problems.about("space"):
        return []
    known = published_points(task_files.task_info(task, space.domains))
    held = [point for point in known if holds(space, point)]
    if not known:
        reason = "nothing but the baseline, which is always run, was published for this task"
        problems.at(node, ("enqueue", index), reason, "remove the word")
    elif not held:
        weights = one_of(registry.PUBLISHED_LENGTH_WEIGHTS)
        reason = "the space holds none of the published points"
        fix = f"widen space.reward_weights to hold 1 and, for the length, {weights}, or remove it"
        problems.at(node, ("enqueue", index), reason, fix)
    return held


def published_points(task: registry.TaskInfo) -> list[Point]:
    """The weights of the length reward that the method's paper compares, other than the baseline's.

    Source: arXiv 2601.05242, where the weight of the length runs from .25 to 1.
    """
    if task.length_reward is None or not task.published:
        return []
    name = f"reward_weights.{task.length_reward}"
    return [{**task.published, name: weight} for weight in registry.PUBLISHED_LENGTH_WEIGHTS]


def holds(space: Space, point: Point) -> bool:
    """Whether every value of a point lies in its domain."""
    return all(space.domains[name].contains(value) for name, value in point.items())


def parse_point(
    node: Node,
    index: int,
    space: Space | None,
    parameters: Mapping[str, ParameterInfo],
    problems: Problems,
) -> dict[str, ParamValue]:
    """One point: names known, values within the domains, conditions met."""
    path = ("enqueue", index)
    if not node.entries:
        problems.at(
            node,
            path,
            "not a point of the space",
            "write values, such as {group_size: 8}, or published",
        )
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
        if problems.about(f"space.{name}"):
            continue
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
