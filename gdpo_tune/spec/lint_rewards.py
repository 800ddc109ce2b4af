"""Combinations of rewards, groups and modes that run but are probably not what was meant."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gdpo_tune.core import registry, task_files
from gdpo_tune.core.parameters import PARTIAL_CREDIT, parameters_of
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.problems import one_of, show
from gdpo_tune.spec.space import Space

FEWEST_PROMPTS = 8
"""Below this many prompts a step, whitening over the batch merges advantages again."""


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
    space, info = spec.space, task_files.task_info(spec.task, spec.space.domains)
    shapers = {name: name.partition(".")[2] for name in space.domains if is_conditioning(name)}
    if info.length_reward is not None:
        shapers["length_shape"] = info.length_reward
    if info.partial_reward is not None:
        shapers[PARTIAL_CREDIT] = info.partial_reward
    for name, reward in shapers.items():
        weight = weight_of(reward)
        if name not in space.says_nothing and weight not in weights(space):
            yield (
                f"space.{name}: {weight} is 0 in every trial, so it has no effect. Weight the "
                "reward, or remove this."
            )
    for name, parameter in parameters_of(info).items():
        if parameter.needs is None or name in space.says_nothing or searched(space, name):
            continue
        parent, effective = parameter.needs
        if not set(effective) & set(possible(space, parent)):
            yield (
                f"space.{name}: {parent} is never {one_of(effective)}, so it has no effect. Search "
                "over that, or remove this."
            )


def unmet_is_not_worst(spec: SweepSpec) -> Iterator[str]:
    """An unmet condition that pays."""
    for reward, (low, _) in task_files.task_info(spec.task, spec.space.domains).rewards.items():
        name = f"conditioning.{reward}"
        if low < 0 and name not in spec.space.says_nothing and is_conditioning(name):
            yield (
                f"space.{name}: an unmet condition gives {reward} 0, and its lowest value is "
                f"{show(low)}, so a completion may gain by failing. Condition rewards that start "
                "at 0."
            )


def weight_of(reward: str) -> str:
    """The parameter that is a reward's weight."""
    return f"reward_weights.{reward}"


def is_conditioning(name: str) -> bool:
    """Whether a parameter says what a reward is conditioned on."""
    return name.startswith("conditioning.")


def different_scales(spec: SweepSpec) -> Iterator[str]:
    """Fixed weights over rewards of different ranges, in modes that add first."""
    modes = [mode for mode, info in possible_modes(spec.space) if info.sums_first]
    names = weights(spec.space)
    ranges = task_files.task_info(spec.task, spec.space.domains).rewards
    widths = {name: high - low for name, (low, high) in ranges.items() if weight_of(name) in names}
    known = {width for width in widths.values() if math.isfinite(width)}
    alike = len(set(widths.values())) < 2
    if not modes or alike or any(searched(spec.space, name) for name in names):
        return
    spans = ", ".join(
        f"{name} {width:g}" if math.isfinite(width) else f"{name} unknown"
        for name, width in widths.items()
    )
    yield (
        f"space.reward_weights: fixed, while rewards {'' if len(known) > 1 else 'may '}span "
        f"different widths ({spans}). Under {one_of(modes)} only weight x width counts, so the "
        "widest reward dominates. Search over the weights, or divide each by its width."
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
