"""Warnings about combinations that run but are probably not meant: key, reason, remedy.

Each follows from arithmetic, from arXiv 2601.05242, or from a measurement with this package's
normalization modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gdpo_tune.core import registry
from gdpo_tune.core.files import expand_path
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.parameters import CANDIDATES, PARTIAL_CREDIT, list_parameters
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import join_names, show
from gdpo_tune.core.trials import ParamValue
from gdpo_tune.core.trl_fields import TRL_FIELDS, TRL_PREFIX
from gdpo_tune.spec.earlier_results import TABLE
from gdpo_tune.spec.gpu import may_use_vllm
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.machine import list_sandbox_warnings
from gdpo_tune.spec.model import SweepSpec, list_decisive_values, list_differences
from gdpo_tune.spec.space import get_parameter_info

FEWEST_PROMPTS = 8
"""Below this many prompts a step, whitening over the batch merges advantages again."""
LARGEST_SE = 0.05
"""Standard error of a share above which a front of a few points may be noise."""


def list_warnings(spec: SweepSpec) -> list[str]:
    """Return the warnings; an empty list if there are none."""
    checks = (
        _check_groups,
        _check_shaping,
        _check_weights,
        _check_comparisons,
        _check_certainty,
        _check_objectives,
        _check_candidates,
        _check_search,
        list_sandbox_warnings,
        _check_warm_start,
    )
    return [warning for check in checks for warning in check(spec)]


def _list_values(spec: SweepSpec, name: str) -> tuple[ParamValue, ...]:
    return (spec.space.list_reachable(name) or ()) if name in spec.space.domains else ()


def _list_modes(spec: SweepSpec) -> dict[str, registry.ModeInfo]:
    return {str(m): registry.NORMALIZATIONS[str(m)] for m in _list_values(spec, "normalization")}


def _list_weights(spec: SweepSpec) -> list[str]:
    names = [name for name in spec.space.domains if name.startswith("reward_weights.")]
    return [name for name in names if _list_values(spec, name) != (0,)]


def _check_groups(spec: SweepSpec) -> Iterator[str]:
    sizes = _list_values(spec, "group_size")
    for size in map(int, sizes):
        prompts = spec.training.completions_per_step // size
        if prompts < FEWEST_PROMPTS:
            yield (
                f"space.group_size = {size}: {prompts} prompt{'s' * (prompts > 1)} a step, and "
                "whitening over few prompts merges advantages that GDPO keeps apart (one prompt: "
                "81 -> 63 distinct ones at a group of 8). Use a smaller group or "
                f"training.completions_per_step of at least {FEWEST_PROMPTS * size}."
            )
        pool = spec.training.train_prompts
        if pool <= prompts and "informative" in _list_values(spec, "prompt_selection"):
            yield (
                f"space.prompt_selection = informative: a step with groups of {size} samples "
                f"{prompts} prompts, and there are {pool}, so it has no choice. Use "
                f"training.train_prompts of at least {CANDIDATES * prompts}."
            )
    modes = {mode: info for mode, info in _list_modes(spec).items() if info.divides_by_group_std}
    if 2 in sizes and modes:
        yield (
            "space.group_size = 2: divided by the deviation of two completions, every difference "
            f"is +-0.71, so sizes of rewards have no effect under {join_names(modes)}. Use at "
            "least 4."
        )
    apart = [mode for mode, info in modes.items() if not info.sums_first]
    shapes = [shape for shape in _list_values(spec, "length_shape") if shape != "step"]
    if 2 in sizes and apart and shapes:
        yield (
            f"space.length_shape = {join_names(shapes)}: in a group of 2 under "
            f"{join_names(apart)}, shapes of the length reward differ only in "
            "ties. Use groups of at least 4."
        )


def _check_shaping(spec: SweepSpec) -> Iterator[str]:
    task = load_task_info(spec.task, spec.space.domains)
    fixed = spec.space.fixed_values
    written = {n for n in spec.space.domains if fixed.get(n) != get_parameter_info(n).default}
    shapers = {f"conditioning.{reward}": reward for reward in task.rewards}
    shapers |= {"length_shape": task.length_reward or "", PARTIAL_CREDIT: task.partial_reward or ""}
    for name, reward in shapers.items():
        low, _ = task.rewards.get(reward, (0, 1))
        if name in written and f"reward_weights.{reward}" not in _list_weights(spec):
            yield (
                f"space.{name}: reward_weights.{reward} is 0 in every trial, so it has no effect. "
                "Weight the reward, or remove this."
            )
        if name in written and low < 0 and name.startswith("conditioning."):
            yield (
                f"space.{name}: an unmet condition gives {reward} 0, and its lowest value is "
                f"{show(low)}: a completion may gain by failing. Condition rewards that start at 0."
            )
    for name, parameter in (list_parameters(task) | TRL_FIELDS).items():
        parent, effective = parameter.needs or ("", ())
        idle = parent and not set(effective) & set(_list_values(spec, parent))
        if idle and name in written and name not in spec.space.dimensions:
            yield (
                f"space.{name}: {parent} is never {join_names(effective)}, so it has no effect. "
                "Search over that, or remove this."
            )


def _check_weights(spec: SweepSpec) -> Iterator[str]:
    names, ranges = _list_weights(spec), load_task_info(spec.task, spec.space.domains).rewards
    searched = [name for name in names if name in spec.space.dimensions]
    sums = [mode for mode, info in _list_modes(spec).items() if info.sums_first]
    apart = [mode for mode, info in _list_modes(spec).items() if not info.sums_first]
    rewards = [name.partition(".")[2] for name in names]
    widths = {reward: ranges[reward][1] - ranges[reward][0] for reward in rewards}
    if sums and len(set(widths.values())) > 1 and not searched:
        finite = {width for width in widths.values() if math.isfinite(width)}
        spans = ", ".join(
            f"{reward} {width:g}" if math.isfinite(width) else f"{reward} unknown"
            for reward, width in widths.items()
        )
        yield (
            f"space.reward_weights: fixed, while rewards {'' if len(finite) > 1 else 'may '}span "
            f"different widths ({spans}). Under {join_names(sums)} only weight x width counts, so "
            "the widest reward dominates. Search over the weights, or divide each by its width."
        )
    if len(names) == 1 and apart:
        yield (
            f"space.normalization = {join_names(apart)}: only {names[0]} is above 0, and with a "
            "single reward GDPO differs from GRPO only in scale. Use grpo, or weight a second "
            "reward."
        )
    if len(names) > 1 and searched == names:
        yield (
            "space.reward_weights: all are searched although only their ratios matter, so one "
            f"dimension is wasted. Fix one, such as {rewards[0]}: 1."
        )


def _check_comparisons(spec: SweepSpec) -> Iterator[str]:
    modes, searched = _list_values(spec, "normalization"), spec.space.dimensions
    if len(modes) > 1 and "learning_rate" not in searched:
        yield (
            f"space.learning_rate: one value for {join_names(modes)}, whose advantages differ in "
            "scale as a step size does. Search over it, such as {log: [3e-05, 0.0003]}."
        )
    lengths = [name for name in spec.objectives if "length" in name]
    if "loss_type" in searched and lengths:
        yield (
            "space.loss_type: each weights short and long completions differently, which mixes "
            f"with the effect of rewards on the objective {lengths[0]}. Fix it, such as dapo."
        )
    names = [name for name in ("epsilon", "epsilon_high") if name in searched]
    settings = spec.training
    one_update = settings.mini_batch_size in (0, settings.completions_per_step)
    is_one = one_update and _list_values(spec, "num_iterations") == (1,)
    if names and is_one:
        yield (
            f"space.{names[0]}: with num_iterations = 1 every ratio is 1, so nothing is ever "
            "clipped. Fix it, set training.mini_batch_size, or search over num_iterations: [1, 2]."
        )
    idle = {
        "delta": "with num_iterations = 1 every ratio is 1" if is_one else "",
        "off_policy_mask_threshold": "with num_iterations = 1 no completion is off-policy"
        if is_one and not may_use_vllm(spec)
        else "",
        "use_bias_correction_kl": "beta is 0" if _list_values(spec, "beta") == (0,) else "",
    }
    for field, why in idle.items():
        if why and f"{TRL_PREFIX}{field}" in spec.space.domains:
            yield f"space.{TRL_PREFIX}{field}: {why}, so it has no effect. Remove it."
    sums = [loss for loss in _list_values(spec, "loss_type") if loss != "grpo"]
    if sums and "sequence" in _list_values(spec, f"{TRL_PREFIX}importance_sampling_level"):
        yield (
            f"space.{TRL_PREFIX}importance_sampling_level = sequence: {join_names(sums)} add the "
            "ratio of a completion up once for each of its tokens, so long ones weigh more. Use "
            "loss_type: grpo, as GSPO does."
        )


def _check_certainty(spec: SweepSpec) -> Iterator[str]:
    prompts = spec.training.test_prompts
    se = 0.5 / math.sqrt(prompts)
    if se > LARGEST_SE:
        enough = math.ceil((0.5 / LARGEST_SE) ** 2)
        yield (
            f"training.test_prompts = {prompts}: the standard error of a share is up to {se:.2f}, "
            f"so close points cannot be distinguished. Use at least {enough}."
        )
    values = [spec.space.domains[name].list_values() for name in spec.space.dimensions]
    count = math.prod(math.inf if each is None else len(each) for each in values)
    if count < spec.search.trials:
        yield (
            f"space: {count} different configuration{'s' if count > 1 else ''} at most, and search."
            f"trials = {spec.search.trials}, so trials repeat. Widen it, or write trials: {count}."
        )


def _check_objectives(spec: SweepSpec) -> Iterator[str]:
    metrics = registry.collect_metrics(task := load_task_info(spec.task))
    for name, objective in spec.objectives.items():
        better = metrics[name].direction
        if objective.direction != better:
            yield (
                f"objectives.{name}.direction = {objective.direction}: this metric "
                f"({metrics[name].doc}) is better the other way. Write {better}, if not meant."
            )
        if name in task.judges and f"reward_weights.{name}" in _list_weights(spec):
            yield (
                f"objectives.{name}: reward_weights.{name} is above 0, so the policy learns to "
                "please this judge. Let another judge, of weight 0, be the objective."
            )
    for name, constraint in spec.constraints.items():
        low, high = metrics[name].low, metrics[name].high
        if constraint.is_known and constraint.holds(low) and constraint.holds(high):
            yield (
                f"constraints.{name} = {constraint}: every value between {show(low)} and "
                f"{show(high)} meets it. Tighten it, or remove it."
            )


def _check_candidates(spec: SweepSpec) -> Iterator[str]:
    changed = {"merges": spec.search.merges, "checkpoints": spec.search.checkpoints}
    idle = [
        f"search.{name}.budget"
        for name, section in changed.items()
        if section.budget and section != type(section)()
    ]
    if idle and not spec.has_candidates:
        why = (
            "no policy is kept that could be merged or evaluated again"
            if spec.keep == "none"
            else "a merge costs an evaluation, so it would win every cost that is judged"
        )
        verb = "it has" if len(idle) == 1 else "they have"
        yield f"{join_names(idle)}: {why}, so {verb} no effect. Write 0, or remove the key."


def _check_search(spec: SweepSpec) -> Iterator[str]:
    search, trials = spec.search, spec.search.trials
    if search.is_divided and not trials:
        return
    if search.patience >= trials:
        yield (
            f"search.patience = {search.patience}: with search.trials = {trials} it never ends the "
            f"search. Write less than {trials}, or remove it."
        )
    points = {tuple(sorted(point.items())) for point in spec.enqueue}
    if len(points) > trials:
        yield (
            f"enqueue: {len(points)} different points, and search.trials = {trials}, so the last "
            f"ones are never run. Write trials: {len(points)} or more, or fewer points."
        )


def _check_warm_start(spec: SweepSpec) -> Iterator[str]:
    for index, directory in enumerate(spec.search.warm_start):
        if directory.endswith(TABLE):
            continue
        earlier = load_spec(expand_path(directory) / SPEC, to_run=False)
        lines = list_differences(list_decisive_values(earlier), list_decisive_values(spec))
        decisive = [line for line in lines if not line.startswith(("space.", "objectives."))]
        if decisive:
            yield (
                f"search.warm_start[{index}] = {directory}: it has {'; '.join(decisive)}, so its "
                "trials measured something else. Leave it out if other settings are good there."
            )
