"""Combinations that run but are probably not what was meant: parameter, why, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gdpo_tune.core import registry, task_files
from gdpo_tune.spec.lint_rewards import (
    different_scales,
    few_prompts,
    idle_shaping,
    length_in_pairs,
    no_anchor,
    pairs,
    possible,
    searched,
    single_reward,
    unmet_is_not_worst,
)
from gdpo_tune.spec.lint_sizes import (
    crowded_cores,
    endless,
    far_values,
    idle_patience,
    points_left_out,
    too_short_for_rungs,
)
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.problems import one_of, show
from gdpo_tune.spec.sandbox_checks import lacking_memory, sandbox_doubts
from gdpo_tune.spec.warm_start import warm_start_doubts

LARGEST_SE = 0.05
"""Standard error of a share, above which a front of a few points cannot be told from noise."""
CLIPS = ("epsilon", "epsilon_high")


def lint(spec: SweepSpec) -> list[str]:
    """Doubtful combinations, one sentence each; an empty list if there are none.

    Source: arXiv 2601.05242 and measurements with this package's own normalization modes.
    """
    checks = (
        few_prompts,
        pairs,
        length_in_pairs,
        idle_shaping,
        unmet_is_not_worst,
        different_scales,
        single_reward,
        no_anchor,
        confounded_modes,
        confounded_loss,
        idle_clip,
        unreplicated,
        coarse_test,
        few_configurations,
        single_objective,
        against_the_metric,
        idle_constraint,
        idle_patience,
        points_left_out,
        far_values,
        crowded_cores,
        endless,
        too_short_for_rungs,
        sandbox_doubts,
        lacking_memory,
        warm_start_doubts,
    )
    return [warning for check in checks for warning in check(spec)]


def confounded_modes(spec: SweepSpec) -> Iterator[str]:
    """Modes compared at one learning rate."""
    modes = possible(spec.space, "normalization")
    if len(modes) > 1 and not searched(spec.space, "learning_rate"):
        yield (
            f"space.learning_rate: one value for {one_of(modes)}, whose advantages differ in "
            "scale, so a difference between modes may be one of step size. Search over it, such as "
            "learning_rate: {log: [3e-05, 0.0003]}."
        )


def confounded_loss(spec: SweepSpec) -> Iterator[str]:
    """The average over tokens weights lengths, as a length reward does."""
    lengths = [name for name in spec.objectives if "length" in name]
    if searched(spec.space, "loss_type") and lengths:
        yield (
            "space.loss_type: each weights short and long completions differently, and "
            f"{lengths[0]} is an objective, so its effect mixes with that of the length reward. "
            "Fix it, such as loss_type: dapo."
        )


def idle_clip(spec: SweepSpec) -> Iterator[str]:
    """A clip that no ratio ever reaches."""
    names = [name for name in CLIPS if searched(spec.space, name)]
    if names and possible(spec.space, "num_iterations") == (1,):
        yield (
            f"space.{names[0]}: with num_iterations = 1 every ratio is 1, so nothing is ever "
            "clipped. Fix it, or search over num_iterations: [1, 2]."
        )


def unreplicated(spec: SweepSpec) -> Iterator[str]:
    """A front of single seeds."""
    replicates = spec.search.replicates
    if min(replicates.per_point, replicates.max_runs) == 0:
        yield (
            "search.replicates: none, so every point of the front rests on one seed and stays "
            "provisional. Allow some, such as {per_point: 2, max_runs: 8}."
        )


def coarse_test(spec: SweepSpec) -> Iterator[str]:
    """Too few test prompts to tell points apart."""
    prompts = spec.training.test_prompts
    se = 0.5 / math.sqrt(prompts)
    if se > LARGEST_SE:
        enough = math.ceil((0.5 / LARGEST_SE) ** 2)
        yield (
            f"training.test_prompts = {prompts}: the standard error of a share is up to {se:.2f}, "
            f"so close points cannot be told apart. Use at least {enough}."
        )


def few_configurations(spec: SweepSpec) -> Iterator[str]:
    """More trials than there are points."""
    count = 1
    for name in spec.space.dimensions:
        values = spec.space.domains[name].values()
        if values is None:
            return
        count *= len(values)
    if count < spec.search.trials:
        yield (
            f"space: {count} different configuration{'s' if count > 1 else ''} at most, and "
            f"search.trials = {spec.search.trials}, so trials repeat. Widen the space, or write "
            f"trials: {count}."
        )


def single_objective(spec: SweepSpec) -> Iterator[str]:
    """A front of one point."""
    if len(spec.objectives) == 1:
        yield (
            f"objectives: {next(iter(spec.objectives))} alone, so the front is a single point. "
            "Add what it is traded against."
        )


def against_the_metric(spec: SweepSpec) -> Iterator[str]:
    """An objective that wants the worse side."""
    metrics = registry.judgeable(task_files.task_info(spec.task))
    for name, objective in spec.objectives.items():
        better = metrics[name].direction
        if objective.direction != better:
            yield (
                f"objectives.{name}.direction = {objective.direction}: this metric "
                f"({metrics[name].doc}) is better the other way. Write {better}, if not meant."
            )


def idle_constraint(spec: SweepSpec) -> Iterator[str]:
    """A bound that excludes nothing."""
    metrics = registry.judgeable(task_files.task_info(spec.task))
    for name, constraint in spec.constraints.items():
        info = metrics[name]
        if constraint.holds(info.low) and constraint.holds(info.high):
            yield (
                f"constraints.{name} = {constraint}: every value between {show(info.low)} and "
                f"{show(info.high)} meets it. Tighten it, or remove it."
            )
