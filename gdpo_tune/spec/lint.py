"""Combinations that run but are probably not what was meant: parameter, why, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gdpo_tune import registry, task_files
from gdpo_tune.parameters import parameters_of
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.problems import one_of, show
from gdpo_tune.spec.sandbox import lacking_memory, sandbox_doubts
from gdpo_tune.spec.space import Space
from gdpo_tune.trials import ParamValue

FEWEST_PROMPTS = 8
"""Below this many prompts a step, whitening over the batch merges advantages again."""
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
        sandbox_doubts,
        lacking_memory,
    )
    return [warning for check in checks for warning in check(spec)]


def searched(space: Space, name: str) -> bool:
    """Whether trials differ in this parameter."""
    return name in space.dimensions


def possible(space: Space, name: str) -> tuple[ParamValue, ...]:
    """The values that trials can have; empty for a continuous range, or where there is none."""
    return (space.reachable(name) or ()) if name in space.domains else ()


def possible_modes(space: Space) -> list[tuple[str, registry.ModeInfo]]:
    """The normalization modes that trials can have."""
    names = [str(name) for name in possible(space, "normalization")]
    return [(name, registry.NORMALIZATIONS[name]) for name in names]


def weights(space: Space) -> list[str]:
    """Names of the reward weights that are not always 0."""
    names = [name for name in space.domains if name.startswith("reward_weights.")]
    return [name for name in names if possible(space, name) != (0,)]


def few_prompts(spec: SweepSpec) -> Iterator[str]:
    """Too few groups in a step."""
    total = spec.training.completions_per_step
    for size in possible(spec.space, "group_size"):
        prompts = total // int(size)
        if prompts >= FEWEST_PROMPTS:
            continue
        need = FEWEST_PROMPTS * int(size)
        remedy = f"Use a smaller group or training.completions_per_step of at least {need}"
        if prompts == 1:
            yield (
                f"space.group_size = {size}: one prompt a step. Whitening over the batch is then "
                "whitening over the group, which merges advantages that GDPO keeps apart "
                f"(81 -> 63 distinct ones at a group of 8). {remedy}."
            )
        else:
            yield (
                f"space.group_size = {size}: {prompts} prompts a step, so the statistics of a "
                f"batch are noisy. {remedy}."
            )


def pairs(spec: SweepSpec) -> Iterator[str]:
    """A group of two keeps the order of a reward alone."""
    modes = [mode for mode, info in possible_modes(spec.space) if info.divides_by_group_std]
    if 2 in possible(spec.space, "group_size") and modes:
        yield (
            "space.group_size = 2: divided by the deviation of two completions, every difference "
            f"becomes +-0.71, so how large a reward is has no effect under {one_of(modes)}. "
            "Use groups of at least 4."
        )


def length_in_pairs(spec: SweepSpec) -> Iterator[str]:
    """A group of two keeps of a length reward which completion is shorter."""
    modes = [
        mode
        for mode, info in possible_modes(spec.space)
        if info.divides_by_group_std and not info.sums_first
    ]
    shapes = [shape for shape in possible(spec.space, "length_shape") if shape != "step"]
    if 2 in possible(spec.space, "group_size") and modes and shapes:
        yield (
            f"space.length_shape = {one_of(shapes)}: in a group of 2 under {one_of(modes)} only "
            "which completion earns more counts, so shapes differ in ties alone. Use groups of at "
            "least 4."
        )


def idle_shaping(spec: SweepSpec) -> Iterator[str]:
    """What shapes a reward that has no weight, or is never switched on."""
    space, length = spec.space, task_files.task_info(spec.task).length_reward
    shapers = {name: name.partition(".")[2] for name in space.domains if is_conditioning(name)}
    if length is not None:
        shapers["length_shape"] = length
    for name, reward in shapers.items():
        weight = f"reward_weights.{reward}"
        if name not in space.says_nothing and weight not in weights(space):
            yield (
                f"space.{name}: {weight} is 0 in every trial, so it has no effect. Weight the "
                "reward, or remove this."
            )
    for name, info in parameters_of(task_files.task_info(spec.task)).items():
        if info.needs is None or name in space.says_nothing or searched(space, name):
            continue
        parent, effective = info.needs
        if not set(effective) & set(possible(space, parent)):
            yield (
                f"space.{name}: {parent} is never {one_of(effective)}, so it has no effect. Search "
                "over that, or remove this."
            )


def unmet_is_not_worst(spec: SweepSpec) -> Iterator[str]:
    """An unmet condition that pays."""
    for reward, (low, _) in task_files.task_info(spec.task).rewards.items():
        name = f"conditioning.{reward}"
        if low < 0 and name not in spec.space.says_nothing and is_conditioning(name):
            yield (
                f"space.{name}: an unmet condition gives {reward} 0, and its lowest value is "
                f"{show(low)}, so a completion may gain by failing. Condition rewards that start "
                "at 0."
            )


def is_conditioning(name: str) -> bool:
    """Whether a parameter says what a reward is conditioned on."""
    return name.startswith("conditioning.")


def different_scales(spec: SweepSpec) -> Iterator[str]:
    """Fixed weights over rewards of different ranges, in modes that add first."""
    modes = [mode for mode, info in possible_modes(spec.space) if info.sums_first]
    ranges = task_files.task_info(spec.task).rewards
    names = weights(spec.space)
    widths = {
        name: ranges[name.partition(".")[2]][1] - ranges[name.partition(".")[2]][0]
        for name in names
    }
    if modes and len(set(widths.values())) > 1 and not any(searched(spec.space, n) for n in names):
        spans = ", ".join(f"{name.partition('.')[2]} {width:g}" for name, width in widths.items())
        yield (
            f"space.reward_weights: fixed, while rewards span different widths ({spans}). Under "
            f"{one_of(modes)} only weight x width counts, so the widest reward dominates. "
            "Search over the weights, or divide each by its width."
        )


def single_reward(spec: SweepSpec) -> Iterator[str]:
    """One reward: nothing to normalise apart."""
    names = weights(spec.space)
    modes = [mode for mode, info in possible_modes(spec.space) if not info.sums_first]
    if len(names) == 1 and modes:
        yield (
            f"space.normalization = {one_of(modes)}: only {names[0]} is above 0, and with a single "
            "reward GDPO differs from GRPO in scale alone. Use grpo, or weight a second reward."
        )


def no_anchor(spec: SweepSpec) -> Iterator[str]:
    """One degree of freedom too many."""
    names = weights(spec.space)
    if len(names) > 1 and all(searched(spec.space, name) for name in names):
        yield (
            "space.reward_weights: all are searched although only their ratios matter, so one "
            f"dimension is spent on nothing. Fix one, such as {names[0].partition('.')[2]}: 1."
        )


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
    metrics = task_files.task_info(spec.task).metrics
    for name, objective in spec.objectives.items():
        better = metrics[name].direction
        if objective.direction != better:
            yield (
                f"objectives.{name}.direction = {objective.direction}: this metric "
                f"({metrics[name].doc}) is better the other way. Write {better}, if not meant."
            )


def idle_constraint(spec: SweepSpec) -> Iterator[str]:
    """A bound that excludes nothing."""
    metrics = task_files.task_info(spec.task).metrics
    for name, constraint in spec.constraints.items():
        info = metrics[name]
        if constraint.holds(info.low) and constraint.holds(info.high):
            yield (
                f"constraints.{name} = {constraint}: every value between {show(info.low)} and "
                f"{show(info.high)} meets it. Tighten it, or remove it."
            )
