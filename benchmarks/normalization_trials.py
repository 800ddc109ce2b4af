"""One training of `normalization.py`: a task with a chosen range of its correctness reward.

The benchmark changes one reward by an affine map. The held-out metrics stay those of the task, so
both forms of a task have the same measure. The rewards of every training batch are kept, to count
the distinct advantages.

Figures of trainings are pure functions of numbers. `values[S, W, M]` are shares of the range from
each objective's worst value of interest to its best: 1 is perfect, 0 or less is worthless.

Shapes: S seeds, W weight settings, M objectives, Q goals.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import moocore
import numpy as np
import torch
from numpy.typing import NDArray

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.task_info import TaskInfo
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement
from gdpo_tune.tasks.base import Problem, Scores, Split
from gdpo_tune.tasks.code import CodeTask
from gdpo_tune.tasks.math import MathTask
from gdpo_tune.tasks.tools import ToolsTask
from gdpo_tune.training import train
from gdpo_tune.training.normalization import compute_advantages

MODES = ("gdpo", "grpo", "grpo_no_std")
RANGES = {"equal": (0.0, 1.0), "mixed": (-3.0, 3.0)}
"""Range of the correctness reward, beside format and length in {0, 1}."""
GROUP_SIZE = 8
LENGTHS = {"math": (48, 14), "tools": (64, 24), "code": (64, 26)}
"""Longest completion and length limit in tokens, as in the shipped search spaces."""
_BATCHES: list[Mapping[str, Sequence[float | None]]] = []
"""Rewards of the training batches of the trial in progress."""


class _Ranged:
    """Mixin of a task: changes the range of its correctness reward, and keeps its batches."""

    natural: tuple[float, float]
    wanted: tuple[float, float]

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return the task's problems; record the prompts of the training split."""
        problems: list[Problem] = super().problems(split, count, seed)
        if split == "train":
            self._trained_on = {problem.prompt for problem in problems}
        return problems

    def score(
        self,
        problems: Sequence[Problem],
        completions: Sequence[str],
        lengths: Sequence[int],
        *others: Any,
    ) -> Scores:
        """Score as the task does, with the correctness reward mapped to the wanted range."""
        scores: Scores = super().score(problems, completions, lengths)
        values = rescale(scores.rewards["correctness"], self.natural, self.wanted)
        rewards = {**scores.rewards, "correctness": values}
        if problems[0].prompt in self._trained_on:
            _BATCHES.append(rewards)
        return Scores(rewards=rewards, metrics=scores.metrics)


class MathEqual(_Ranged, MathTask):
    """Word problems with all rewards in {0, 1}, as the task has them."""

    natural, wanted = (0.0, 1.0), RANGES["equal"]


class MathMixed(_Ranged, MathTask):
    """Word problems with correctness in {-3, 3}."""

    natural, wanted = (0.0, 1.0), RANGES["mixed"]


class ToolsEqual(_Ranged, ToolsTask):
    """Tool calls with correctness mapped to [0, 1]."""

    natural, wanted = (-3.0, 3.0), RANGES["equal"]


class ToolsMixed(_Ranged, ToolsTask):
    """Tool calls with correctness in [-3, 3], as the task has it."""

    natural, wanted = (-3.0, 3.0), RANGES["mixed"]


class CodeEqual(_Ranged, CodeTask):
    """Code with all rewards in {0, 1}, as the task has them."""

    natural, wanted = (0.0, 1.0), RANGES["equal"]


class CodeMixed(_Ranged, CodeTask):
    """Code with correctness in {-3, 3}."""

    natural, wanted = (0.0, 1.0), RANGES["mixed"]


_TASKS = {
    ("math", "equal"): MathEqual,
    ("math", "mixed"): MathMixed,
    ("tools", "equal"): ToolsEqual,
    ("tools", "mixed"): ToolsMixed,
    ("code", "equal"): CodeEqual,
    ("code", "mixed"): CodeMixed,
}


def build_task_info(task: str, ranges: str) -> TaskInfo:
    own = registry.describe_task(task)
    return replace(
        own,
        build=_TASKS[task, ranges],
        rewards={**own.rewards, "correctness": RANGES[ranges]},
    )


@contextmanager
def register_task(name: str, info: TaskInfo) -> Iterator[None]:
    """Register a task of this benchmark for a `with` block, so that the trainer finds it."""
    globals()["REGISTERED"] = info
    registry.TASKS[name] = f"{__name__}:REGISTERED"
    try:
        yield
    finally:
        del registry.TASKS[name]


@dataclass(frozen=True)
class Setting:
    """Settings in which trainings of the benchmark differ."""

    task: str
    ranges: str
    """A key of `RANGES`."""
    mode: str
    weight: float
    """Weight of format and of length; correctness has 1."""
    learning_rate: float
    seed: int

    def __str__(self) -> str:
        """Format the setting for a line of progress."""
        return (
            f"{self.task} {self.ranges} {self.mode} 1:{self.weight:g}:{self.weight:g} "
            f"lr {self.learning_rate:g} seed {self.seed}"
        )


@dataclass(frozen=True)
class Result:
    """Result of one training."""

    setting: Setting
    training: dict[str, Any]
    """Fields of `TrainingSettings`; a result counts only if they are equal."""
    validation: dict[str, float]
    test: dict[str, float]
    distinct: dict[str, float]
    """Mode -> distinct advantages a training batch, all modes on the batches of this training."""
    cpu_seconds: float


def build_training(task: str, steps: int, prompts: int) -> TrainingSettings:
    """Build the settings that all trainings of a task share; `prompts` are those of the test."""
    longest, limit = LENGTHS[task]
    return TrainingSettings(
        steps=steps,
        max_completion_length=longest,
        length_limit=limit,
        validation_prompts=prompts // 2,
        test_prompts=prompts,
        evaluate_every=steps,
        checkpoint_every=steps,
    )


def run(job: tuple[Setting, TrainingSettings]) -> Result:
    """Train one setting and evaluate it."""
    setting, training = job
    info = build_task_info(setting.task, setting.ranges)
    name = f"{setting.task} {setting.ranges}"
    params = {name: parameter.default for name, parameter in list_parameters(info).items()}
    params |= {
        "normalization": setting.mode,
        "group_size": GROUP_SIZE,
        "learning_rate": setting.learning_rate,
        "reward_weights.format": setting.weight,
        "reward_weights.length": setting.weight,
    }
    _BATCHES.clear()
    with tempfile.TemporaryDirectory() as directory, register_task(name, info):
        config = TrialConfig(
            task=name,
            policy=info.embedded,
            seed=setting.seed,
            params=params,
            training=training,
            directory=Path(directory),
        )
        outcome = train(config, resume=None, report=_ignore)
    weights = [float(params[f"reward_weights.{name}"]) for name in info.rewards]
    return Result(
        setting=setting,
        training=training.model_dump(),
        validation={name: estimate.mean for name, estimate in outcome.validation.items()},
        test={name: estimate.mean for name, estimate in outcome.test.items()},
        distinct=count_distinct_advantages(_BATCHES, weights),
        cpu_seconds=outcome.cost.cpu_seconds,
    )


def rescale(
    values: Sequence[float | None], natural: tuple[float, float], wanted: tuple[float, float]
) -> list[float | None]:
    """Map values from one range to another one; None (not scored) stays None."""
    scale = (wanted[1] - wanted[0]) / (natural[1] - natural[0])
    return [None if v is None else wanted[0] + (v - natural[0]) * scale for v in values]


def count_distinct_advantages(
    batches: Sequence[Mapping[str, Sequence[float | None]]], weights: Sequence[float]
) -> dict[str, float]:
    totals = dict.fromkeys(MODES, 0)
    for batch in batches:
        columns = [[torch.nan if v is None else v for v in values] for values in batch.values()]
        rewards = torch.tensor(columns).T
        for mode in MODES:
            advantages = compute_advantages(rewards, torch.tensor(weights), GROUP_SIZE, mode)
            totals[mode] += count_distinct(advantages.tolist())
    return {mode: total / len(batches) for mode, total in totals.items()}


def _ignore(measurement: Measurement, checkpoint: Path | None) -> None:
    """Ignore the results of a training."""


Floats = NDArray[np.float64]
TOLERANCE = 1e-3
"""Advantages that are closer than this count as equal: `eps` alone sets them 1e-4 apart."""
GRID = 24
"""Number of goals along each objective."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """Estimate with the middle 95 % of its bootstrap."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Format the interval for a table."""
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def count_distinct(values: Sequence[float], tolerance: float = TOLERANCE) -> int:
    """Count the different values; neighbours within `tolerance` are equal."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return int((np.diff(ordered) > tolerance).sum()) + 1 if ordered.size else 0


def compute_hypervolume(points: Floats) -> float:
    """Compute the share of the unit box that the points `[W, M]` dominate."""
    inside = points[(points > 0).all(axis=1)]
    if not len(inside):
        return 0.0
    return float(moocore.hypervolume(-inside, ref=np.zeros(points.shape[1])))


def find_front(means: Floats) -> NDArray[np.bool_]:
    """Return for each point of `[W, M]` whether no other one dominates it."""
    return moocore.is_nondominated(-means, keep_weakly=True)


def bootstrap(
    count: int, statistic: Callable[[NDArray[np.int64]], float], seed: int = 0
) -> Interval:
    """Bootstrap a statistic over `count` seeds.

    Few seeds have few different draws (three have ten), so the interval is rather too short than
    too long.

    Args:
        count: S.
        statistic: function of S indices of seeds.
        seed: seed of the resampling.
    """
    rng = np.random.default_rng(seed)
    cache: dict[tuple[int, ...], float] = {}
    drawn: list[float] = []
    for row in np.sort(rng.integers(count, size=(RESAMPLES, count)), axis=1):
        key = tuple(row.tolist())
        if key not in cache:
            cache[key] = statistic(row)
        drawn.append(cache[key])
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(statistic(np.arange(count)), float(low), float(high))


def build_goals(objectives: int, grid: int = GRID) -> Floats:
    """Return the midpoints of a regular grid over the unit box, `[Q, M]`."""
    middle = (np.arange(grid) + 0.5) / grid
    return np.array(list(itertools.product(middle, repeat=objectives)))


def compute_attainment(values: Floats, wanted: Floats) -> Floats:
    """Compute for each goal the share of seeds in which a setting reaches it in every objective.

    Source: Grunert da Fonseca, Fonseca and Hall 2001, Inferential performance assessment of
    stochastic optimisers and the attainment function.

    Args:
        values: `[S, W, M]`.
        wanted: `[Q, M]`.
    """
    reached = np.zeros((len(values), len(wanted)), dtype=bool)
    for one, points in zip(reached, values, strict=True):
        for point in points:
            one |= (wanted <= point).all(axis=1)
    return reached.mean(axis=0)


def compute_attainment_difference(values: Floats, others: Floats) -> tuple[float, float]:
    """Compute how much more often each of two sides attains goals than the other.

    Returns:
        Means over all goals of the positive and of the negative part of the difference of both
        attainments. Their difference is that of the sides' mean hypervolumes, up to the grid.
    """
    wanted = build_goals(values.shape[2])
    difference = compute_attainment(values, wanted) - compute_attainment(others, wanted)
    return float(difference.clip(min=0).mean()), float((-difference).clip(min=0).mean())
