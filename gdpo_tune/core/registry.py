"""Tables of everything that has a name: tasks, modes, samplers, schedulers, layouts, exporters.

They are literal dicts: to add something, write its file and one line here. Names are checked
against these tables while a YAML file is read, so this module imports neither torch nor ray, trl or
optuna. A target is `module:attribute`, which `load` imports when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from gdpo_tune.core.metrics import COST_METRICS, MetricInfo
from gdpo_tune.core.task_info import LayoutInfo, TaskInfo
from gdpo_tune.core.trials import ParamValue


@dataclass(frozen=True)
class ModeInfo:
    """A normalization mode."""

    target: str
    ignores: tuple[str, ...] = ()
    """Parameters that have no effect under it; they are not sampled under it."""
    sums_first: bool = False
    """True if it adds the weighted rewards up before it normalises."""
    divides_by_group_std: bool = False
    """True if it divides each reward, or their sum, by its own standard deviation in the group."""


@dataclass(frozen=True)
class SamplerInfo:
    """A sampler, which proposes configurations."""

    target: str
    """For `auto`, the function that picks one of the others."""
    doc: str
    learns: bool = True
    """True if its proposals depend on the results of earlier trials."""


@dataclass(frozen=True)
class SchedulerInfo:
    """A scheduler, which stops trials early."""

    target: str
    doc: str


TASKS: dict[str, str] = {
    "code": "gdpo_tune.tasks.code:TASK",
    "math": "gdpo_tune.tasks.math:MATH",
    "gsm8k": "gdpo_tune.tasks.math:GSM8K",
    "tools": "gdpo_tune.tasks.tools:TASK",
}
"""Task -> its `TaskInfo`, which `describe_task` loads."""
PUBLISHED_LENGTH_WEIGHTS = (0.75, 0.5, 0.25)
"""Weights that the method's paper tries besides equal ones; for every task with a length reward."""

_MODES = "gdpo_tune.training.normalization"
# `gamma` is defined for GDPO: other modes have their own weighting, or sum the rewards first.
# `baseline` multiplies every advantage by G / (G - 1), which whitening over the batch undoes.
NORMALIZATIONS: dict[str, ModeInfo] = {
    "gdpo": ModeInfo(f"{_MODES}:gdpo", ignores=("baseline",), divides_by_group_std=True),
    "grpo": ModeInfo(
        f"{_MODES}:grpo", ignores=("gamma",), sums_first=True, divides_by_group_std=True
    ),
    "grpo_no_std": ModeInfo(f"{_MODES}:grpo_no_std", ignores=("gamma",), sums_first=True),
    "grpo_batch": ModeInfo(f"{_MODES}:grpo_batch", ignores=("gamma",), sums_first=True),
    "gdpo_no_batch_norm": ModeInfo(f"{_MODES}:gdpo_no_batch_norm", divides_by_group_std=True),
    "gdpo_no_std": ModeInfo(f"{_MODES}:gdpo_no_std", ignores=("baseline",)),
    "dvao": ModeInfo(f"{_MODES}:dvao", ignores=("gamma",), sums_first=True),
    "saw": ModeInfo(f"{_MODES}:saw", ignores=("gamma", "baseline"), divides_by_group_std=True),
    "gd2po": ModeInfo(f"{_MODES}:gd2po", ignores=("gamma", "baseline"), divides_by_group_std=True),
}

_SAMPLERS = "gdpo_tune.tuning.samplers"
SAMPLERS: dict[str, SamplerInfo] = {
    "auto": SamplerInfo(
        "gdpo_tune.spec.gpu:choose_sampler",
        "picks by trials, kinds of parameters, objectives and slots, and says why",
    ),
    "gp": SamplerInfo(f"{_SAMPLERS}:build_gp", "Gaussian process, expected hypervolume"),
    "tpe": SamplerInfo(f"{_SAMPLERS}:build_tpe", "multi-objective Parzen estimator"),
    "random": SamplerInfo(f"{_SAMPLERS}:build_random", "uniform over the space", learns=False),
    "qmc": SamplerInfo(
        f"{_SAMPLERS}:build_qmc", "even over the space: a Sobol sequence", learns=False
    ),
}

SCHEDULERS: dict[str, SchedulerInfo] = {
    "halving": SchedulerInfo(
        "gdpo_tune.tuning.halving:Halving",
        "many configurations to a short first rung, then a few of them long",
    ),
    "fifo": SchedulerInfo("gdpo_tune.tuning.schedulers:Scheduler", "every trial to its end"),
}
OTHER_SCHEDULERS = dict.fromkeys(
    ("asha", "growth"),
    (
        "halving, which divides a budget, does its part",
        "leave search.scheduler out: halving with a search.budget, fifo with search.trials",
    ),
)
"""Name of a scheduler that is known elsewhere -> the reason why there is none, and the fix."""

LAYOUTS: dict[str, str] = {
    "gsm8k": "gdpo_tune.tasks.layouts:GSM8K",
    "math": "gdpo_tune.tasks.layouts:MATH",
    "question_answer": "gdpo_tune.tasks.layouts:QUESTION_ANSWER",
    "svamp": "gdpo_tune.tasks.layouts:SVAMP",
    "asdiv": "gdpo_tune.tasks.layouts:ASDIV",
    "mawps": "gdpo_tune.tasks.layouts:MAWPS",
    "olympiadbench": "gdpo_tune.tasks.layouts:OLYMPIADBENCH",
    "toolrl": "gdpo_tune.tasks.layouts:TOOLRL",
    "verl": "gdpo_tune.tasks.layouts:VERL",
    "rlla_sft": "gdpo_tune.tasks.layouts:RLLA_SFT",
    "mbpp": "gdpo_tune.tasks.code_layouts:MBPP",
    "mbpp_sanitized": "gdpo_tune.tasks.code_layouts:MBPP_SANITIZED",
    "humaneval": "gdpo_tune.tasks.code_layouts:HUMANEVAL",
    "apps": "gdpo_tune.tasks.code_layouts:APPS",
    "code_contests": "gdpo_tune.tasks.code_layouts:CODE_CONTESTS",
}
"""Layout -> its `LayoutInfo`, which `describe_layout` loads."""

_POLICIES = Path(__file__).parents[1] / "policies"
POLICIES: dict[str, Path] = {
    name: _POLICIES / name for name in ("embedded", "embedded_math", "embedded_tools")
}
"""Policy that ships -> its directory."""

EXPORTERS: dict[str, str] = {
    "trl": "gdpo_tune.exporters.trl:export_trl",
    "verl": "gdpo_tune.exporters.verl:export_verl",
    "nemo-rl": "gdpo_tune.exporters.nemo_rl:export_nemo_rl",
    "ms-swift": "gdpo_tune.exporters.ms_swift:export_ms_swift",
    "axolotl": "gdpo_tune.exporters.axolotl:export_axolotl",
    "mergekit": "gdpo_tune.exporters.mergekit:export_mergekit",
}

_TRACKERS = "gdpo_tune.tracking.trackers"
TRACKERS: dict[str, str] = {
    "tensorboard": f"{_TRACKERS}:write_tensorboard",
    "trackio": f"{_TRACKERS}:write_trackio",
    "wandb": f"{_TRACKERS}:write_wandb",
}
"""Tracker beside MLflow -> what writes a run; its package has the same name."""


def describe_task(name: str) -> TaskInfo:
    """Return what a task of `TASKS` says about itself; this imports its file."""
    return load(TASKS[name])


def describe_layout(name: str) -> LayoutInfo:
    """Return what a layout of `LAYOUTS` says about itself; this imports its file."""
    return load(LAYOUTS[name])


def weigh_equally(rewards: Iterable[str]) -> dict[str, ParamValue]:
    """Return the published setting of most tasks: GDPO with equal weights."""
    return {"normalization": "gdpo", **{f"reward_weights.{reward}": 1.0 for reward in rewards}}


def collect_metrics(task: TaskInfo) -> dict[str, MetricInfo]:
    """Return what objectives and constraints may name; a task's own metric hides a cost."""
    return {**COST_METRICS, **task.metrics}


def load(target: str) -> Any:
    """Import `module:attribute`; that it does not exist is a defect of a table."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
