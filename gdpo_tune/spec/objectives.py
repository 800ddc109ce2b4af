"""`objectives:` and `constraints:`: the metrics by which trials are judged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from annotated_types import Ge, Le

from gdpo_tune.core import registry
from gdpo_tune.core.metrics import COST_METRICS
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.trials import Direction
from gdpo_tune.spec.problems import Problems, join_names, show, suggest
from gdpo_tune.spec.sections import Section, build_refusal

FARTHEST = 1e30
"""Largest size of a reference: products over objectives stay within the range of a float."""
CONSTRAINT = re.compile(r"\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


class ObjectiveSpec(Section):
    """A held-out, unweighted metric that the search optimises."""

    direction: Direction
    """Direction of improvement."""
    reference: Annotated[float, Ge(-FARTHEST), Le(FARTHEST)]
    """The worst value of interest: the hypervolume's reference point, the same for every sweep."""


class Constraint(Section):
    """A bound on a held-out metric: trials that break it are never on the front."""

    op: Literal[">=", "<="]
    """Allowed side of the bound."""
    bound: float
    """The limit, itself allowed."""

    def holds(self, value: float) -> bool:
        """Return whether `value` respects the bound; NaN does not."""
        return value >= self.bound if self.op == ">=" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.op} {show(self.bound)}"


def read_constraint(data: object) -> Constraint:
    """Return a constraint, which a file has as a text such as `>= 0.2`."""
    if isinstance(data, Constraint):
        return data
    match = CONSTRAINT.fullmatch(data) if isinstance(data, str) else None
    if match is None or not math.isfinite(float(match[2])):
        raise build_refusal("not a bound", 'write ">= 0.2" or "<= 0.2", with the quotes')
    return Constraint.model_validate({"op": match[1], "bound": float(match[2])})


def check_metrics(
    task: TaskInfo,
    objectives: Mapping[str, ObjectiveSpec],
    constraints: Mapping[str, Constraint],
    gpus: float,
    problems: Problems,
) -> None:
    """Refuse metrics that the task does not measure, and bounds without effect."""
    if not objectives:
        fix = "write correctness: {direction: maximize, reference: 0} below it"
        problems.refuse("objectives", "names no metric to optimise", fix)
    metrics = registry.collect_metrics(task)
    for section, kind in (("objectives", "objective"), ("constraints", "metric")):
        node = problems.root and problems.root.get((section,))
        for name in (node and node.entries) or {}:
            path = (section, name)
            if name == "completions" and name not in metrics:
                reason = "every trial of a sweep samples the same number: there is no trade-off"
                fix = f"name another cost, {join_names(COST_METRICS)}, or write search.budget"
                problems.refuse(path, reason, fix)
            elif name not in metrics:
                fix = f"{suggest(name, metrics)}metrics of this task: {join_names(metrics)}"
                problems.refuse(path, f"unknown {kind}", fix)
            elif name == "gpu_hours" and name not in task.metrics and not gpus:
                fix = "name seconds instead, or give trials GPUs with resources.gpus"
                problems.refuse(path, "no trial has a GPU: always 0", fix, "resources.gpus")
    for name in (name for name in objectives if name in metrics):
        info, objective = metrics[name], objectives[name]
        maximize, reference = objective.direction == "maximize", objective.reference
        if not (reference < info.high if maximize else reference > info.low):
            reason = f"no value of {name} is better than this: the hypervolume would always be 0"
            side = f"below {info.high:g}" if maximize else f"above {info.low:g}"
            fix = f"write the worst value of interest, {side}"
            problems.refuse(("objectives", name, "reference"), reason, fix)
    for name in (name for name in constraints if name in metrics):
        info, constraint = metrics[name], constraints[name]
        if not constraint.holds(info.high if constraint.op == ">=" else info.low):
            fix = f"the metric lies between {info.low:g} and {info.high:g}"
            problems.refuse(("constraints", name), "no trial can ever meet this", fix)
