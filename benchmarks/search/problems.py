"""Problems of the search benchmarks: configurations with a learning curve each.

Shapes: M objectives. A problem returns a `Curve` for each trial, so that the random parts of a
training (its seed, the prompts of its measurements) belong to one trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from gdpo_tune.core.trials import Estimate, Params
from gdpo_tune.spec import Choices, Constraint, ObjectiveSpec, Search, Space, SweepSpec, Uniform

Estimates = Mapping[str, Estimate]
Curve = Callable[[int], Estimates]
"""Completions sampled so far -> estimates that the search sees then."""
REDUCTION = 3
"""One in this many trials at a rung continues, in every scheduler."""


class Problem(Protocol):
    """Problem whose trials run in simulated time."""

    name: str
    levels: tuple[int, ...]
    """Completions at which a trial is measured; the last is the full budget."""
    rungs: tuple[int, ...]
    """Levels before the last at which schedulers compare trials."""
    has_checkpoints: bool
    """True if the policy at every level is a candidate; False if only the end of a trial is."""
    evaluation_cost: int
    """Completions of a measurement, which the budget pays."""
    domains: Mapping[str, Choices | Uniform]
    """Searched parameters, each with more than one value."""
    objectives: Mapping[str, ObjectiveSpec]
    best: Mapping[str, float]
    """Objective -> bound of its best value; with the references, the box of the hypervolume."""
    constraints: Mapping[str, Constraint]

    def draw_curve(self, params: Params, rng: np.random.Generator) -> Curve:
        """Draw the learning curve of one training with these parameters."""
        ...

    def compute_truth(self, params: Params, level: int) -> Mapping[str, float]:
        """Compute every objective and constrained metric at a level, without noise."""
        ...

    def compute_seconds(self, params: Params, start: int, end: int) -> float:
        """Compute the seconds of a trial from one level to another."""
        ...


def compute_full_cost(problem: Problem) -> int:
    """Compute the completions of a trial with its full budget and all of its measurements."""
    return problem.levels[-1] + problem.evaluation_cost * len(problem.levels)


def build_spec(problem: Problem, search: Search) -> SweepSpec:
    """Build the spec of a sweep of the problem, for samplers and schedulers."""
    return SweepSpec(
        name=problem.name,
        task=problem.name,
        policy=problem.name,
        objectives=dict(problem.objectives),
        constraints=dict(problem.constraints),
        space=Space(domains=dict(problem.domains)),
        search=search,
    )


def build_exact_estimates(values: Mapping[str, float]) -> Estimates:
    """Build estimates without error from values."""
    return {name: Estimate(float(value), 0.0) for name, value in values.items()}
