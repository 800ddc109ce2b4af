"""What `space:` may search over or fix: the parameters of every task, and those of its rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gdpo_tune.core.registry import NORMALIZATIONS, TaskInfo
from gdpo_tune.core.trials import ParamValue


@dataclass(frozen=True)
class ParameterInfo:
    """Something that `space:` may search over or fix."""

    kind: Literal["int", "float", "choice"]
    default: ParamValue
    doc: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    """Whether `low` itself is excluded."""
    choices: tuple[ParamValue, ...] = ()
    needs: tuple[str, tuple[ParamValue, ...]] | None = None
    """Another parameter and its values under which this one has an effect; None: under any."""
    added_later: bool = False
    """Whether sweeps were run before it existed: fixed at its default, it leaves their identity."""


NO_CONDITION = "none"
LENGTH_PARAMETERS = ("length_shape", "length_cache")
"""Those that a task has only if one of its rewards is a length reward."""
PARTIAL_CREDIT = "partial_credit"
"""One that a task has only if one of its rewards can give partial credit."""

PARAMETERS: dict[str, ParameterInfo] = {
    "normalization": ParameterInfo(
        "choice", "gdpo", "how rewards become advantages", choices=tuple(NORMALIZATIONS)
    ),
    "group_size": ParameterInfo("int", 8, "completions sampled for each prompt", low=2),
    "learning_rate": ParameterInfo("float", 1e-6, "peak learning rate", low=0, open_low=True),
    "temperature": ParameterInfo("float", 1.0, "sampling temperature", low=0, open_low=True),
    "beta": ParameterInfo("float", 0.0, "weight of the KL to the untrained policy", low=0.0),
    "epsilon": ParameterInfo("float", 0.2, "lower clip of the ratio", low=0, high=1, open_low=True),
    "epsilon_high": ParameterInfo("float", 0.2, "upper clip of the ratio", low=0, open_low=True),
    "loss_type": ParameterInfo(
        "choice",
        "dapo",
        "how token losses are averaged",
        choices=("dapo", "dr_grpo", "grpo", "bnpo", "cispo"),
    ),
    "num_iterations": ParameterInfo("int", 1, "optimizer passes over each step's samples", low=1),
    "gamma": ParameterInfo(
        "float",
        0.0,
        "saturation exponent: a reward's weight is multiplied by (1 - s) to this power, s its "
        "batch mean as a share of its range; 0 is plain GDPO",
        low=0,
        high=1,
        added_later=True,
    ),
    "baseline": ParameterInfo(
        "choice",
        "group_mean",
        "what a reward is compared with: the mean of its group, or of the others in it",
        choices=("group_mean", "leave_one_out"),
        added_later=True,
    ),
    PARTIAL_CREDIT: ParameterInfo(
        "choice",
        False,
        "correctness in training: `false` is 1 if every test passes, else 0; `true` is the share "
        "of tests that pass, as published, and conditions look at that share. Held-out "
        "correctness asks for every test either way",
        choices=(False, True),
        added_later=True,
    ),
    "length_shape": ParameterInfo(
        "choice",
        "step",
        "length reward in training: `step` is 1 up to `length_limit` tokens, else 0; `ramp` falls "
        "in a line from 1 there to 0 at `max_completion_length`; `overlong` is DAPO's soft "
        "overlong punishment plus 1, which falls over the last part of `max_completion_length` "
        "alone",
        choices=("step", "ramp", "overlong"),
        added_later=True,
    ),
    "length_cache": ParameterInfo(
        "float",
        0.2,
        "share of `max_completion_length` over which `overlong` falls; DAPO: 4096 of 20480",
        low=0,
        high=1,
        open_low=True,
        needs=("length_shape", ("overlong",)),
        added_later=True,
    ),
}

REWARD_WEIGHT = ParameterInfo("float", 1.0, "multiplier of one reward; only ratios matter", low=0.0)
CONDITIONING = ParameterInfo(
    "choice",
    NO_CONDITION,
    "reward that has to reach its threshold, or this one counts 0 in training",
    choices=(NO_CONDITION, "another reward"),
    added_later=True,
)
CONDITIONING_THRESHOLD = ParameterInfo(
    "float",
    1.0,
    "that threshold, as a share of the range of the reward conditioned on: 1 is its top",
    low=0,
    high=1,
    added_later=True,
)
FAMILIES: dict[str, ParameterInfo] = {
    "reward_weights": REWARD_WEIGHT,
    "conditioning": CONDITIONING,
    "conditioning_threshold": CONDITIONING_THRESHOLD,
}
"""Parameters of which a task has one for each of its rewards, `<family>.<reward>`."""


def parameters_of(task: TaskInfo) -> dict[str, ParameterInfo]:
    """Every parameter that a task understands, those of its rewards included."""
    absent = {
        *(() if task.length_reward else LENGTH_PARAMETERS),
        *(() if task.partial_reward else (PARTIAL_CREDIT,)),
    }
    general = {name: info for name, info in PARAMETERS.items() if name not in absent}
    return {**general, **parameters_of_rewards(tuple(task.rewards))}


def parameters_of_rewards(rewards: Sequence[str]) -> dict[str, ParameterInfo]:
    """`<family>.<reward>` for each reward; a single one has nothing to be conditioned on."""
    result = {f"reward_weights.{reward}": REWARD_WEIGHT for reward in rewards}
    if len(rewards) < 2:
        return result
    others = {reward: tuple(other for other in rewards if other != reward) for reward in rewards}
    for reward in rewards:
        choices = (NO_CONDITION, *others[reward])
        result[f"conditioning.{reward}"] = replace(CONDITIONING, choices=choices)
    for reward in rewards:
        needs = (f"conditioning.{reward}", others[reward])
        result[f"conditioning_threshold.{reward}"] = replace(CONDITIONING_THRESHOLD, needs=needs)
    return result
