"""What trials are judged by: objectives and constraints, and the metrics that both name."""

from __future__ import annotations

import math
import re

from gdpo_tune.core import registry, task_files
from gdpo_tune.core.metrics import COST_METRICS, MetricInfo
from gdpo_tune.spec.model import Constraint, ObjectiveSpec
from gdpo_tune.spec.problems import KeyPath, Node, Problems, did_you_mean, one_of
from gdpo_tune.spec.sections import section

CONSTRAINT = re.compile(r"\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


def parse_objectives(
    node: Node | None, task: str | None, problems: Problems
) -> dict[str, ObjectiveSpec]:
    """The objectives that are sound."""
    if node is None:
        return {}
    result: dict[str, ObjectiveSpec] = {}
    if not node.entries:
        fix = "write correctness: {direction: maximize, reference: 0} below it"
        problems.at(node, ("objectives",), "not a mapping of metrics to objectives", fix)
    for name, child in (node.entries or {}).items():
        path = ("objectives", name)
        known = metric(name, child, "objectives", task, problems)
        objective = section(ObjectiveSpec, child, path, problems)
        if objective is None:
            continue
        result[name] = objective
        if known is not None:
            check_reference(name, objective, known, child, problems)
    return result


def parse_constraints(
    node: Node | None, task: str | None, problems: Problems
) -> dict[str, Constraint]:
    """The constraints that are sound."""
    if node is None:
        return {}
    if node.entries is None:
        fix = 'write a mapping such as {correctness: ">= 0.2"}'
        problems.at(node, ("constraints",), "not a mapping of metrics to bounds", fix)
    result: dict[str, Constraint] = {}
    for name, child in (node.entries or {}).items():
        path = ("constraints", name)
        known = metric(name, child, "constraints", task, problems)
        match = CONSTRAINT.fullmatch(child.value) if isinstance(child.value, str) else None
        if match is None or not math.isfinite(float(match[2])):
            fix = 'write ">= 0.2" or "<= 0.2", with the quotes'
            problems.at(child, path, "not a bound", fix)
            continue
        op, bound = match[1], float(match[2])
        if known is not None:
            check_bound(op, bound, known, child, path, problems)
        result[name] = Constraint.model_validate({"op": op, "bound": bound})
    return result


def metric(
    name: str, node: Node, key: str, task: str | None, problems: Problems
) -> MetricInfo | None:
    """What the task says of a metric; None if it measures no such thing."""
    if task is None:
        return None
    metrics = registry.judgeable(task_files.task_info(task))
    if name == "completions" and name not in metrics:
        reason = "every trial of a sweep samples the same number, so nothing can be traded for it"
        fix = f"name another cost, {one_of(COST_METRICS)}, or write search.budget"
        problems.at(node, (key, name), reason, fix)
    elif name not in metrics:
        fix = f"{did_you_mean(name, metrics)}metrics of this task: {one_of(metrics)}"
        what = "objective" if key == "objectives" else "metric"
        problems.at(node, (key, name), f"unknown {what}", fix)
    return metrics.get(name)


def check_reference(
    name: str, objective: ObjectiveSpec, info: MetricInfo, node: Node, problems: Problems
) -> None:
    """Some value of the metric is better than the reference."""
    path = ("objectives", name, "reference")
    best = info.high if objective.direction == "maximize" else info.low
    beaten = (
        objective.reference < best
        if objective.direction == "maximize"
        else objective.reference > best
    )
    if not beaten:
        side = "below" if objective.direction == "maximize" else "above"
        reason = f"no value of {name} is better than this, so the hypervolume would always be 0"
        fix = f"write the worst value of interest, {side} {best:g}"
        problems.at(node.find(("reference",)), path, reason, fix)


def check_bound(
    op: str, bound: float, info: MetricInfo, node: Node, path: KeyPath, problems: Problems
) -> None:
    """Some value of the metric respects the bound."""
    if (op == ">=" and bound > info.high) or (op == "<=" and bound < info.low):
        fix = f"the metric lies between {info.low:g} and {info.high:g}"
        problems.at(node, path, "no trial can ever meet this", fix)
