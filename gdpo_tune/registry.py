"""What exists, by name. Literal dicts: to add something, write its file and one line here.

Names are checked against these tables while a YAML file is read, so nothing here imports torch,
ray, trl or optuna; `target` is `module:attribute`, resolved by `load` when the thing is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from gdpo_tune.trials import Direction, ParamValue


@dataclass(frozen=True)
class MetricInfo:
    """A held-out metric of a task."""

    direction: Direction
    low: float
    high: float
    doc: str


@dataclass(frozen=True)
class TaskInfo:
    """A task: what it rewards and what it measures on held-out prompts."""

    target: str
    rewards: Mapping[str, tuple[float, float]]
    """Reward name -> range of its values."""
    metrics: Mapping[str, MetricInfo]
    """What evaluation measures; objectives and constraints name these."""
    published: Mapping[str, ParamValue]
    """The setting that the method's paper uses, drawn as a baseline."""


@dataclass(frozen=True)
class ModeInfo:
    """A normalization mode."""

    target: str
    ignores: tuple[str, ...] = ()
    """Parameters that have no effect under it, hence are not sampled under it."""
    sums_first: bool = False
    """Whether it adds the weighted rewards up before it normalises."""
    divides_by_group_std: bool = False
    """Whether it divides by the standard deviation of a group."""


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


@dataclass(frozen=True)
class SamplerInfo:
    """What proposes configurations."""

    target: str
    doc: str


@dataclass(frozen=True)
class SchedulerInfo:
    """What stops trials early."""

    target: str
    doc: str


CODE_METRICS = {
    "correctness": MetricInfo("maximize", 0, 1, "share of completions whose code passes all tests"),
    "format": MetricInfo("maximize", 0, 1, "share with exactly one think and one answer block"),
    "length": MetricInfo("maximize", 0, 1, "share of completions within the length limit"),
    "mean_length": MetricInfo("minimize", 0, float("inf"), "mean tokens of a completion"),
    "bug_rate": MetricInfo(
        "minimize",
        0,
        1,
        "share with no program, or one that does not compile, raises or breaks a sandbox limit",
    ),
}

TASKS: dict[str, TaskInfo] = {
    "code": TaskInfo(
        target="gdpo_tune.tasks.code:CodeTask",
        rewards={"correctness": (0, 1), "format": (0, 1), "length": (0, 1)},
        metrics=CODE_METRICS,
        published={
            "normalization": "gdpo",
            "reward_weights.correctness": 1.0,
            "reward_weights.format": 1.0,
            "reward_weights.length": 1.0,
        },
    ),
}

NORMALIZATIONS: dict[str, ModeInfo] = {
    "gdpo": ModeInfo("gdpo_tune.training.normalization:gdpo", divides_by_group_std=True),
    "grpo": ModeInfo(
        "gdpo_tune.training.normalization:grpo", sums_first=True, divides_by_group_std=True
    ),
    "grpo_no_std": ModeInfo("gdpo_tune.training.normalization:grpo_no_std", sums_first=True),
    "grpo_batch": ModeInfo("gdpo_tune.training.normalization:grpo_batch", sums_first=True),
    "gdpo_no_batch_norm": ModeInfo(
        "gdpo_tune.training.normalization:gdpo_no_batch_norm", divides_by_group_std=True
    ),
    "gdpo_no_std": ModeInfo("gdpo_tune.training.normalization:gdpo_no_std"),
}

REWARD_WEIGHT = ParameterInfo("float", 1.0, "multiplier of one reward; only ratios matter", low=0.0)

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
}

SAMPLERS: dict[str, SamplerInfo] = {
    "auto": SamplerInfo("gdpo_tune.tuning.samplers:auto", "gp, or tpe once the study is large"),
    "gp": SamplerInfo("gdpo_tune.tuning.samplers:gp", "Gaussian process, expected hypervolume"),
    "tpe": SamplerInfo("gdpo_tune.tuning.samplers:tpe", "multi-objective Parzen estimator"),
    "nsga2": SamplerInfo("gdpo_tune.tuning.samplers:nsga2", "genetic, crowding distance"),
    "nsga3": SamplerInfo("gdpo_tune.tuning.samplers:nsga3", "genetic, reference points"),
    "random": SamplerInfo("gdpo_tune.tuning.samplers:random", "uniform over the space"),
}

SCHEDULERS: dict[str, SchedulerInfo] = {
    "fifo": SchedulerInfo("gdpo_tune.tuning.schedulers.fifo:build", "every trial to its end"),
}

POLICIES: dict[str, str] = {
    "embedded": "gdpo_tune.policies.load:embedded_folder",
}


def parameters(task: str) -> dict[str, ParameterInfo]:
    """Every parameter that `task` understands, its reward weights included."""
    weights = {f"reward_weights.{reward}": REWARD_WEIGHT for reward in TASKS[task].rewards}
    return {**PARAMETERS, **weights}


def load(target: str) -> Any:
    """Import `module:attribute`.

    Raises:
        ImportError, AttributeError: the target does not exist, which is a defect of this table.
    """
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
