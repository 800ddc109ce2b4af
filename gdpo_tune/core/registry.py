"""What exists, by name. Literal dicts: to add something, write its file and one line here.

Names are checked against these tables while a YAML file is read, so nothing here imports torch,
ray, trl or optuna; `target` is `module:attribute`, resolved by `load` when the thing is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from gdpo_tune.core.metrics import (
    CODE_METRICS,
    COST_METRICS,
    GSM8K_METRICS,
    MATH_METRICS,
    TOOLS_METRICS,
    MetricInfo,
)
from gdpo_tune.core.trials import ParamValue

UNKNOWN_RANGE = (float("-inf"), float("inf"))
"""Of a reward whose bounds nobody stated."""


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
    prompts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Split -> distinct prompts that the task can write itself; empty where that is not known."""
    partial_reward: str | None = None
    """The reward that is all or nothing and can also give partial credit."""


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
class SamplerInfo:
    """What proposes configurations."""

    target: str
    """Of `auto`, what picks one of the others."""
    doc: str
    learns: bool = True
    """Whether what it proposes ever hangs on a trial."""


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


def _equally_weighted(*rewards: str) -> dict[str, ParamValue]:
    return {"normalization": "gdpo", **{f"reward_weights.{reward}": 1.0 for reward in rewards}}


CODE_PROMPTS = {"train": 6000, "validation": 2500, "test": 2500}
MATH_PROMPTS = {"train": 40_000, "validation": 20_000, "test": 20_000}
TOOLS_PROMPTS = {"train": 30_000, "validation": 14_000, "test": 14_000}
PUBLISHED_LENGTH_WEIGHTS = (0.75, 0.5, 0.25)
"""What the method's paper tries besides equal weights; for every task with a length reward."""

TASKS: dict[str, TaskInfo] = {
    "code": TaskInfo(
        target="gdpo_tune.tasks.code:CodeTask",
        rewards={"correctness": (0, 1), "format": (0, 1), "length": (0, 1)},
        metrics=CODE_METRICS,
        prompts=CODE_PROMPTS,
        published=_equally_weighted("correctness", "format", "length"),
        embedded="embedded",
        length_reward="length",
        partial_reward="correctness",
    ),
    "code_bug_free": TaskInfo(
        target="gdpo_tune.tasks.code:BugFreeCodeTask",
        rewards={"correctness": (0, 1), "format": (0, 1), "length": (0, 1), "bug_free": (0, 1)},
        metrics=CODE_METRICS,
        prompts=CODE_PROMPTS,
        published={
            **_equally_weighted("correctness", "format", "length", "bug_free"),
            "partial_credit": True,
        },
        embedded="embedded",
        length_reward="length",
        partial_reward="correctness",
    ),
    "math": TaskInfo(
        target="gdpo_tune.tasks.math:MathTask",
        rewards={"correctness": (0, 1), "format": (0, 1), "length": (0, 1)},
        metrics=MATH_METRICS,
        prompts=MATH_PROMPTS,
        published=_equally_weighted("correctness", "format", "length"),
        embedded="embedded_math",
        length_reward="length",
    ),
    "gsm8k": TaskInfo(
        target="gdpo_tune.tasks.gsm8k:GSM8KTask",
        rewards={"correctness": (0, 1), "integer": (0, 1), "format": (0, 1)},
        metrics=GSM8K_METRICS,
        prompts=MATH_PROMPTS,
        published=_equally_weighted("correctness", "integer", "format"),
        embedded="embedded_math",
    ),
    "tools": TaskInfo(
        target="gdpo_tune.tasks.tools:ToolsTask",
        rewards={"correctness": (-3, 3), "format": (0, 1), "length": (0, 1)},
        metrics=TOOLS_METRICS,
        prompts=TOOLS_PROMPTS,
        published=_equally_weighted("correctness", "format", "length"),
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

SAMPLERS: dict[str, SamplerInfo] = {
    "auto": SamplerInfo(
        "gdpo_tune.spec.sampler_choice:choose_sampler",
        "picks by trials, kinds of parameters, objectives and slots, and says why",
    ),
    "gp": SamplerInfo(
        "gdpo_tune.tuning.search.samplers:build_gp", "Gaussian process, expected hypervolume"
    ),
    "tpe": SamplerInfo(
        "gdpo_tune.tuning.search.samplers:build_tpe", "multi-objective Parzen estimator"
    ),
    "nsga2": SamplerInfo(
        "gdpo_tune.tuning.search.samplers:build_nsga2", "genetic, crowding distance"
    ),
    "nsga3": SamplerInfo(
        "gdpo_tune.tuning.search.samplers:build_nsga3", "genetic, reference points"
    ),
    "random": SamplerInfo(
        "gdpo_tune.tuning.search.samplers:build_random", "uniform over the space", learns=False
    ),
    "qmc": SamplerInfo(
        "gdpo_tune.tuning.search.samplers:build_qmc",
        "even over the space: a Sobol sequence",
        learns=False,
    ),
}

SCHEDULERS: dict[str, SchedulerInfo] = {
    "fifo": SchedulerInfo("gdpo_tune.tuning.schedulers.base:build", "every trial to its end"),
    "asha": SchedulerInfo(
        "gdpo_tune.tuning.schedulers.asha:build",
        "successive halving by dominance: trials that others dominate end at the next rung",
    ),
    "pbt": SchedulerInfo(
        "gdpo_tune.tuning.schedulers.pbt:build",
        "a population whose weights and learning rate move: the last take over from the first",
    ),
}

_CODE = ("code", "code_bug_free")
LAYOUTS: dict[str, LayoutInfo] = {
    "gsm8k": LayoutInfo(
        "gdpo_tune.tasks.layouts.openai_gsm8k:problem",
        tasks=("math", "gsm8k"),
        columns=("question", "answer"),
        doc="word problems; the number after `####` is the answer",
    ),
    "math": LayoutInfo(
        "gdpo_tune.tasks.layouts.competition_math:problem",
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
        tasks=_CODE,
        columns=("text", "code", "test_list"),
        optional=("test_setup_code",),
        doc="MBPP, full edition: a text and asserts, of which the first is shown",
    ),
    "mbpp_sanitized": LayoutInfo(
        "gdpo_tune.tasks.layouts.mbpp:sanitized",
        tasks=_CODE,
        columns=("prompt", "code", "test_list", "test_imports"),
        doc="MBPP, sanitized edition",
    ),
    "humaneval": LayoutInfo(
        "gdpo_tune.tasks.layouts.humaneval:problem",
        tasks=_CODE,
        columns=("prompt", "entry_point", "test"),
        doc="HumanEval: the head of a function, and `check(candidate)`",
    ),
    "apps": LayoutInfo(
        "gdpo_tune.tasks.layouts.apps:problem",
        tasks=_CODE,
        columns=("question", "input_output"),
        optional=("difficulty", "starter_code"),
        doc="APPS: functions with arguments and results, or programs that read and print",
    ),
    "code_contests": LayoutInfo(
        "gdpo_tune.tasks.layouts.code_contests:problem",
        tasks=_CODE,
        columns=("description", "public_tests"),
        optional=("private_tests", "generated_tests", "input_file"),
        doc="CodeContests: programs that read and print",
    ),
}

POLICIES: dict[str, str] = {
    "embedded": "gdpo_tune.policies.load_policy:embedded_folder",
    "embedded_math": "gdpo_tune.policies.load_policy:embedded_math_folder",
    "embedded_tools": "gdpo_tune.policies.load_policy:embedded_tools_folder",
}

EXPORTERS: dict[str, str] = {
    "trl": "gdpo_tune.exporters.trl:export",
    "verl": "gdpo_tune.exporters.verl:export",
    "nemo-rl": "gdpo_tune.exporters.nemo_rl:export",
    "ms-swift": "gdpo_tune.exporters.ms_swift:export",
    "axolotl": "gdpo_tune.exporters.axolotl:export",
}


def judgeable(task: TaskInfo) -> dict[str, MetricInfo]:
    """What objectives and constraints may name; of equal names the task's own counts."""
    return {**COST_METRICS, **task.metrics}


def load(target: str) -> Any:
    """Import `module:attribute`.

    Raises:
        ImportError, AttributeError: the target does not exist, which is a defect of this table.
    """
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
