"""Parameters that `space:` may search over or fix: those of every task, and those of rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.shaping import LengthFall, RewardCondition, Shaping
from gdpo_tune.core.task_info import TaskInfo
from gdpo_tune.core.trials import Params, ParamValue


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter that `space:` may search over or fix."""

    kind: Literal["int", "float", "choice"]
    default: ParamValue
    doc: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    """True if `low` itself is excluded."""
    choices: tuple[ParamValue, ...] = ()
    needs: tuple[str, tuple[ParamValue, ...]] | None = None
    """Another parameter and its values under which this one has an effect; None: always."""


NO_CONDITION = "none"
LENGTH_PARAMETERS = ("length_shape", "length_cache")
"""Parameters that a task has only if one of its rewards is a length reward."""
PARTIAL_CREDIT = "partial_credit"
"""A parameter that a task has only if one of its rewards can give partial credit."""
CANDIDATES = 4
"""Candidates for each prompt of a step where `prompt_selection` is `informative`."""

LOSSES = ("dapo", "dr_grpo", "grpo", "bnpo", "cispo")
"""Choices of `loss_type`, by TRL's names."""
STEP_LOSSES = ("dapo", "cispo")
"""Losses that are divided by tokens of a whole step."""
TRANSFORMERS_SCHEDULES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
}
"""Choice of `training.lr_schedule` -> its name in Transformers."""

PARAMETERS: dict[str, ParameterInfo] = {
    "normalization": ParameterInfo(
        "choice", "gdpo", "how rewards become advantages", choices=tuple(NORMALIZATIONS)
    ),
    "group_size": ParameterInfo("int", 8, "completions sampled for each prompt", low=2),
    "learning_rate": ParameterInfo("float", 1e-6, "peak learning rate", low=0, open_low=True),
    "temperature": ParameterInfo("float", 1.0, "sampling temperature", low=0, open_low=True),
    "beta": ParameterInfo("float", 0.0, "weight of the KL to the initial policy", low=0.0),
    "epsilon": ParameterInfo(
        "float",
        0.2,
        "lower clip of the ratio",
        low=0,
        high=1,
        open_low=True,
        needs=("loss_type", tuple(loss for loss in LOSSES if loss != "cispo")),  # clips above alone
    ),
    "epsilon_high": ParameterInfo("float", 0.2, "upper clip of the ratio", low=0, open_low=True),
    "loss_type": ParameterInfo("choice", "dapo", "how token losses are averaged", choices=LOSSES),
    "num_iterations": ParameterInfo("int", 1, "optimizer passes over each step's samples", low=1),
    "gamma": ParameterInfo(
        "float",
        0.0,
        "saturation exponent: a reward's weight is multiplied by (1 - s) to this power, s its "
        "batch mean as a share of its range; 0 is plain GDPO",
        low=0,
        high=1,
    ),
    "baseline": ParameterInfo(
        "choice",
        "group_mean",
        "baseline of a reward: the mean of its group, or of the other completions in it",
        choices=("group_mean", "leave_one_out"),
    ),
    "prompt_selection": ParameterInfo(
        "choice",
        "uniform",
        "training prompts of a step: `uniform` takes all in turn; `informative` takes a quarter of "
        f"a step in turn, and of {CANDIDATES} times as many candidates those whose groups are "
        "likely to have unequal advantages, as learnt along the training from words of prompts",
        choices=("uniform", "informative"),
    ),
    PARTIAL_CREDIT: ParameterInfo(
        "choice",
        False,
        "correctness in training: `false` is 1 if every test passes, else 0; `true` is the share "
        "of tests that pass, as published, and conditions look at that share. Held-out "
        "correctness requires every test in both cases",
        choices=(False, True),
    ),
    "length_shape": ParameterInfo(
        "choice",
        "step",
        "length reward in training: `step` is 1 up to `length_limit` tokens, else 0; `ramp` falls "
        "linearly from 1 there to 0 at `max_completion_length`; `overlong` is DAPO's soft "
        "overlong punishment plus 1, which falls only over the last part of "
        "`max_completion_length`",
        choices=("step", "ramp", "overlong"),
    ),
    "length_cache": ParameterInfo(
        "float",
        0.2,
        "share of `max_completion_length` over which `overlong` falls; DAPO: 4096 of 20480",
        low=0,
        high=1,
        open_low=True,
        needs=("length_shape", ("overlong",)),
    ),
}

FAMILIES: dict[str, ParameterInfo] = {
    "reward_weights": ParameterInfo(
        "float", 1.0, "multiplier of one reward; only ratios matter", low=0.0
    ),
    "conditioning": ParameterInfo(
        "choice",
        NO_CONDITION,
        "reward that must reach a threshold; otherwise this one counts 0 in training",
        choices=(NO_CONDITION, "another reward"),
    ),
    "conditioning_threshold": ParameterInfo(
        "float",
        1.0,
        "threshold of the condition, as a share of the range of that reward: 1 is its top",
        low=0,
        high=1,
    ),
}
"""Families of parameters: a task has one of each for each reward, `<family>.<reward>`."""


def list_parameters(task: TaskInfo) -> dict[str, ParameterInfo]:
    """Return every parameter of a task, those of its rewards included."""
    absent = {
        *(() if task.length_reward else LENGTH_PARAMETERS),
        *(() if task.partial_reward else (PARTIAL_CREDIT,)),
    }
    result = {name: info for name, info in PARAMETERS.items() if name not in absent}
    result |= {f"reward_weights.{reward}": FAMILIES["reward_weights"] for reward in task.rewards}
    others = {r: tuple(other for other in task.rewards if other != r) for r in task.rewards}
    conditional = {r: names for r, names in others.items() if names}  # a single one has none
    for reward, names in conditional.items():
        info = replace(FAMILIES["conditioning"], choices=(NO_CONDITION, *names))
        result[f"conditioning.{reward}"] = info
    for reward, names in conditional.items():
        info = replace(FAMILIES["conditioning_threshold"], needs=(f"conditioning.{reward}", names))
        result[f"conditioning_threshold.{reward}"] = info
    return result


TOLERANCE = 1e-9
"""Share of its range by which a reward may miss a threshold, so that rounding does not count."""


def build_shaping(params: Params, training: TrainingSettings, info: TaskInfo) -> Shaping:
    """Build the shaping of a trial; `ValueError`: a condition on a reward of unknown range."""
    conditions: dict[str, RewardCondition] = {}
    for reward in info.rewards:
        on = str(params.get(f"conditioning.{reward}", NO_CONDITION))
        if on != NO_CONDITION:
            share = float(params[f"conditioning_threshold.{reward}"])
            conditions[reward] = RewardCondition(on, compute_threshold(info.rewards[on], share))
    longest, fall = training.max_completion_length, 0.0
    match params.get("length_shape"):
        case "ramp":  # falls in a line from the limit, so that slightly too long still earns most
            fall = float(longest - training.length_limit)
        case "overlong":
            fall = float(params["length_cache"]) * longest
        case _:  # the task's own shape, a step at the limit
            pass
    # No completion is longer than a limit at `longest`, so every shape gives 1.
    length = LengthFall(longest, fall) if fall > 0 else None
    partial = bool(params.get(PARTIAL_CREDIT, False))
    return Shaping(partial, info.length_reward, length, conditions)


def compute_threshold(limits: tuple[float, float], share: float) -> float:
    """Return the value at `share` of a reward's range, 0 its lowest, 1 its highest.

    One parameter serves all rewards that a condition may name, each with its own range; an unknown
    one is a `ValueError`.
    """
    low, high = limits
    if not math.isfinite(high - low):
        raise ValueError("a condition needs to know the range of the reward that it reads")
    return (1 - share) * low + share * high - TOLERANCE * (high - low)
