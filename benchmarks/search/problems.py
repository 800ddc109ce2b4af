"""What is searched in the benchmarks of the search: configurations with a learning curve each.

Shapes: M objectives. A problem hands out a `Curve` for each trial, so that whatever is random about
a training (its seed, the prompts that it is measured on) belongs to one trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from gdpo_tune.core.trials import Estimate, Params
from gdpo_tune.spec import Choices, Constraint, ObjectiveSpec, Search, Space, SweepSpec, Uniform

Estimates = Mapping[str, Estimate]
Curve = Callable[[int], Estimates]
"""Completions sampled so far -> what the search sees of the trial then."""
REDUCTION = 3
"""Of the trials at a rung, one in so many goes on, whoever's scheduler it is."""


class Problem(Protocol):
    """Something that trials are run of in simulated time."""

    name: str
    levels: tuple[int, ...]
    """Completions at which a trial is measured; the last is the full budget."""
    domains: Mapping[str, Choices | Uniform]
    """Each with more than one value."""
    objectives: Mapping[str, ObjectiveSpec]
    best: Mapping[str, float]
    """Objective -> a value that none is better than: with the references, the hypervolume's box."""
    constraints: Mapping[str, Constraint]

    def curve(self, params: Params, rng: np.random.Generator) -> Curve:
        """What one training with these parameters shows of itself."""
        ...

    def truth(self, params: Params) -> Mapping[str, float]:
        """Every objective and constrained metric at full budget, without noise: what counts."""
        ...

    def seconds(self, params: Params, start: int, end: int) -> float:
        """How long a trial takes from one level to another."""
        ...


def build_spec(problem: Problem, search: Search) -> SweepSpec:
    """The problem as the spec of a sweep: all that samplers and schedulers know of it."""
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
    """Values without noise as estimates."""
    return {name: Estimate(float(value), 0.0) for name, value in values.items()}
