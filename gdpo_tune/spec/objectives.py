"""`objectives:` and `constraints:`: the metrics by which trials are judged."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Le

from gdpo_tune.core import registry
from gdpo_tune.core.metrics import COST_METRICS
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.trials import Direction
from gdpo_tune.spec.problems import Problems, join_names, show, suggest
from gdpo_tune.spec.sections import Section, build_refusal

FARTHEST = 1e30
"""Largest size of a reference: products over objectives stay within the range of a float."""
CONSTRAINT = re.compile(
    r"\s*(?P<op>>=|<=)\s*(?P<baseline>[a-z]+)?"
    r"\s*(?P<number>[-+]?\s*(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)?\s*"
)
Baseline = Literal["untrained", "published"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)
"""Roles of the first trials of every sweep."""


class ObjectiveSpec(Section):
    """A held-out, unweighted metric that the search optimises."""

    direction: Direction
    """Direction of improvement."""
    reference: Annotated[float, Ge(-FARTHEST), Le(FARTHEST)]
    """The worst value of interest: the hypervolume's reference point, the same for every sweep."""


class Constraint(Section):
    """A bound on a held-out metric: trials that break it are never on the front.

    A bound may refer to a baseline: `>= untrained - 0.02`. Until the baseline has a value on
    validation prompts, every value meets it.
    """

    op: Literal[">=", "<="]
    """Allowed side of the limit."""
    bound: float
    """The limit, itself allowed; with a baseline, its difference to the baseline's value."""
    baseline: Baseline | None = None
    value: float | None = None
    """Value of the baseline, once it was measured."""

    @property
    def is_known(self) -> bool:
        """True if the limit is a number by now."""
        return self.baseline is None or self.value is not None

    @property
    def limit(self) -> float:
        """The limit as a number; one that every value meets while it is not known."""
        if not self.is_known:
            return -FARTHEST if self.op == ">=" else FARTHEST
        return self.bound + (self.value or 0.0)

    @property
    def text(self) -> str:
        """The constraint as a file has it."""
        if self.baseline is None:
            return f"{self.op} {show(self.bound)}"
        sign = "-" if self.bound < 0 else "+"
        return f"{self.op} {self.baseline}" + (
            f" {sign} {show(abs(self.bound))}" if self.bound else ""
        )

    def holds(self, value: float) -> bool:
        """Return whether `value` respects the limit; NaN does not."""
        return value >= self.limit if self.op == ">=" else value <= self.limit

    def __str__(self) -> str:
        known = self.baseline is not None and self.is_known
        return self.text + (f" ({self.limit:.3g})" if known else "")


def read_constraint(data: object) -> Constraint:
    """Return a constraint, which a file has as a text such as `>= 0.2` or `>= untrained - 0.02`."""
    if isinstance(data, Constraint):
        return data
    match = CONSTRAINT.fullmatch(data) if isinstance(data, str) else None
    number = float((match["number"] or "0").replace(" ", "")) if match else math.inf
    baseline = match["baseline"] if match else None
    if match is None or not math.isfinite(number) or not (baseline or match["number"]):
        fix = 'write ">= 0.2", "<= 0.2" or ">= untrained - 0.02", with the quotes'
        raise build_refusal("not a bound", fix)
    if baseline not in (None, *BASELINES):
        fix = f"{suggest(baseline, BASELINES)}write one of {join_names(BASELINES)}"
        raise build_refusal(f"{baseline} is no baseline of a sweep", fix)
    if baseline and match["number"] and match["number"][0] not in "+-":
        raise build_refusal("not a bound", f'write "{match["op"]} {baseline} - 0.02"')
    return Constraint.model_validate({"op": match["op"], "bound": number, "baseline": baseline})


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
        best, worst = (info.high, info.low) if constraint.op == ">=" else (info.low, info.high)
        # the baseline is measured later: at the worst it has the worst value
        bound = constraint.bound + (worst if constraint.baseline else 0.0)
        if best < bound if constraint.op == ">=" else best > bound:
            fix = f"the metric lies between {info.low:g} and {info.high:g}"
            problems.refuse(("constraints", name), "no trial can ever meet this", fix)
