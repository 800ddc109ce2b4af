"""What exists, by name. Literal dicts: to add something, write its file and one line here.

Names are checked against these tables while a YAML file is read, so nothing here imports torch,
ray, trl or optuna; `target` is `module:attribute`, resolved by `load` when the thing is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

from gdpo_tune.trials import Direction, ParamValue

UNKNOWN_RANGE = (float("-inf"), float("inf"))
"""Of a reward whose bounds nobody stated."""


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
    """Reward name -> range of its values, infinite where it is not known."""
    metrics: Mapping[str, MetricInfo]
    """What evaluation measures; objectives and constraints name these."""
    published: Mapping[str, ParamValue]
    """The setting that the method's paper uses, drawn as a baseline."""
    embedded: str
    """The policy of `POLICIES` that ships for it: the default of `policy:`."""
    length_reward: str | None = None
    """The reward that is 1 within `length_limit` tokens, else 0; it may have other shapes."""


@dataclass(frozen=True)
class ModeInfo:
    """A normalization mode."""

    target: str
    ignores: tuple[str, ...] = ()
    """Parameters that have no effect under it, hence are not sampled under it."""
    sums_first: bool = False
    """Whether it adds the weighted rewards up before it normalises."""
    divides_by_group_std: bool = False
    """Whether it divides each reward, or their sum, by its own standard deviation in the group."""


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


@dataclass(frozen=True)
class LayoutInfo:
    """What the columns of a data set mean: how a row becomes a problem."""

    target: str
    tasks: tuple[str, ...]
    """Tasks that can judge such problems."""
    columns: tuple[str, ...]
    """That there must be."""
    doc: str
    optional: tuple[str, ...] = ()
    """Columns that are read where they are."""


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

LENGTH_METRICS = {
    "length": MetricInfo("maximize", 0, 1, "share of completions within the length limit"),
    "mean_length": MetricInfo("minimize", 0, float("inf"), "mean tokens of a completion"),
}

MATH_METRICS = {
    "correctness": MetricInfo("maximize", 0, 1, "share of completions with the right answer"),
    "format": MetricInfo("maximize", 0, 1, "share with exactly one think and one answer block"),
    **LENGTH_METRICS,
}

GSM8K_METRICS = {
    "correctness": MetricInfo("maximize", 0, 1, "share whose answer is the right text exactly"),
    "integer": MetricInfo("maximize", 0, 1, "share whose answer consists of ASCII digits"),
    "format": MetricInfo("maximize", 0, 1, "share with a think line and an answer line"),
    **LENGTH_METRICS,
}

TOOLS_METRICS = {
    "correctness": MetricInfo("maximize", -3, 3, "mean agreement with the right calls"),
    "exact": MetricInfo("maximize", 0, 1, "share of completions with the right calls exactly"),
    "format": MetricInfo("maximize", 0, 1, "share with the tags that the answer needs, in order"),
    **LENGTH_METRICS,
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
        embedded="embedded",
        length_reward="length",
    ),
    "math": TaskInfo(
        target="gdpo_tune.tasks.math:MathTask",
        rewards={"correctness": (0, 1), "format": (0, 1), "length": (0, 1)},
        metrics=MATH_METRICS,
        published={
            "normalization": "gdpo",
            "reward_weights.correctness": 1.0,
            "reward_weights.format": 1.0,
            "reward_weights.length": 1.0,
        },
        embedded="embedded_math",
        length_reward="length",
    ),
    "gsm8k": TaskInfo(
        target="gdpo_tune.tasks.gsm8k:GSM8KTask",
        rewards={"correctness": (0, 1), "integer": (0, 1), "format": (0, 1)},
        metrics=GSM8K_METRICS,
        published={
            "normalization": "gdpo",
            "reward_weights.correctness": 1.0,
            "reward_weights.integer": 1.0,
            "reward_weights.format": 1.0,
        },
        embedded="embedded_math",
    ),
    "tools": TaskInfo(
        target="gdpo_tune.tasks.tools:ToolsTask",
        rewards={"correctness": (-3, 3), "format": (0, 1), "length": (0, 1)},
        metrics=TOOLS_METRICS,
        published={
            "normalization": "gdpo",
            "reward_weights.correctness": 1.0,
            "reward_weights.format": 1.0,
            "reward_weights.length": 1.0,
        },
        embedded="embedded_tools",
        length_reward="length",
    ),
}

# What a mode ignores, and why. `gamma` is defined for GDPO: other modes weigh rewards in a way of
# their own, or not apart. `baseline` multiplies every advantage by G / (G - 1), which whitening
# over the batch divides out again.
NORMALIZATIONS: dict[str, ModeInfo] = {
    "gdpo": ModeInfo(
        "gdpo_tune.training.normalization:gdpo",
        ignores=("baseline",),
        divides_by_group_std=True,
    ),
    "grpo": ModeInfo(
        "gdpo_tune.training.normalization:grpo",
        ignores=("gamma",),
        sums_first=True,
        divides_by_group_std=True,
    ),
    "grpo_no_std": ModeInfo(
        "gdpo_tune.training.normalization:grpo_no_std", ignores=("gamma",), sums_first=True
    ),
    "grpo_batch": ModeInfo(
        "gdpo_tune.training.normalization:grpo_batch", ignores=("gamma",), sums_first=True
    ),
    "gdpo_no_batch_norm": ModeInfo(
        "gdpo_tune.training.normalization:gdpo_no_batch_norm", divides_by_group_std=True
    ),
    "gdpo_no_std": ModeInfo("gdpo_tune.training.normalization:gdpo_no_std", ignores=("baseline",)),
    "dvao": ModeInfo("gdpo_tune.training.normalization:dvao", ignores=("gamma",), sums_first=True),
    "saw": ModeInfo(
        "gdpo_tune.training.normalization:saw",
        ignores=("gamma", "baseline"),
        divides_by_group_std=True,
    ),
}

NO_CONDITION = "none"
LENGTH_PARAMETERS = ("length_shape", "length_cache")
"""Those that a task has only if one of its rewards is a length reward."""

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

LAYOUTS: dict[str, LayoutInfo] = {
    "gsm8k": LayoutInfo(
        "gdpo_tune.tasks.layouts.gsm8k:problem",
        tasks=("math", "gsm8k"),
        columns=("question", "answer"),
        doc="word problems; the number after `####` is the answer",
    ),
    "math": LayoutInfo(
        "gdpo_tune.tasks.layouts.math:problem",
        tasks=("math", "gsm8k"),
        columns=("problem", "solution"),
        optional=("answer",),
        doc="MATH: the last `\\boxed{}` of the solution is the answer, or the column `answer`",
    ),
    "toolrl": LayoutInfo(
        "gdpo_tune.tasks.layouts.toolrl:problem",
        tasks=("tools",),
        columns=("prompt", "reward_model"),
        optional=("tools",),
        doc="ToolRL: messages, and the right answer with its tool calls",
    ),
    "mbpp": LayoutInfo(
        "gdpo_tune.tasks.layouts.mbpp:problem",
        tasks=("code",),
        columns=("text", "code", "test_list"),
        optional=("test_setup_code",),
        doc="MBPP, full edition: a text and asserts, of which the first is shown",
    ),
    "mbpp_sanitized": LayoutInfo(
        "gdpo_tune.tasks.layouts.mbpp:sanitized",
        tasks=("code",),
        columns=("prompt", "code", "test_list", "test_imports"),
        doc="MBPP, sanitized edition",
    ),
    "humaneval": LayoutInfo(
        "gdpo_tune.tasks.layouts.humaneval:problem",
        tasks=("code",),
        columns=("prompt", "entry_point", "test"),
        doc="HumanEval: the head of a function, and `check(candidate)`",
    ),
    "apps": LayoutInfo(
        "gdpo_tune.tasks.layouts.apps:problem",
        tasks=("code",),
        columns=("question", "input_output"),
        optional=("difficulty", "starter_code"),
        doc="APPS: functions with arguments and results, or programs that read and print",
    ),
    "code_contests": LayoutInfo(
        "gdpo_tune.tasks.layouts.code_contests:problem",
        tasks=("code",),
        columns=("description", "public_tests"),
        optional=("private_tests", "generated_tests", "input_file"),
        doc="CodeContests: programs that read and print",
    ),
}

POLICIES: dict[str, str] = {
    "embedded": "gdpo_tune.policies.load:embedded_folder",
    "embedded_math": "gdpo_tune.policies.load:embedded_math_folder",
    "embedded_tools": "gdpo_tune.policies.load:embedded_tools_folder",
}


def parameters(task: str) -> dict[str, ParameterInfo]:
    """Every parameter that `task` understands, those of its rewards included."""
    return parameters_of(TASKS[task])


def parameters_of(task: TaskInfo) -> dict[str, ParameterInfo]:
    """Every parameter that a task understands, those of its rewards included."""
    absent = () if task.length_reward else LENGTH_PARAMETERS
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


def load(target: str) -> Any:
    """Import `module:attribute`.

    Raises:
        ImportError, AttributeError: the target does not exist, which is a defect of this table.
    """
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
