"""Reward functions in TRL's form from a task's joint scores, and the checks of their values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdpo_tune.core.errors import NonFiniteError, TrialFailure
from gdpo_tune.core.shaping import Rewards, Shaping
from gdpo_tune.core.steps import REWARDS
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.task import JudgesEarly, RewardFailures, Task

RewardFunction = Callable[..., Sequence[float | None]]
"""TRL's form: keyword arguments such as `completions`; one reward per completion."""
LogMetric = Callable[[str, float], None]
"""Callback of TRL by which a reward function logs a metric."""

MOST_FAILED = 0.1
"""Share of a batch on which a reward function may raise. A service that fails for a moment costs a
few completions. A defect, or a kind of completion that the function cannot read, would change what
is trained, so the trial ends."""

_log = logging.getLogger(__name__)


def require_judged(failures: Mapping[str, RewardFailures], count: int) -> None:
    """Raise `TrialFailure` if a reward function raised on too many of `count` completions."""
    for name, failed in failures.items():
        share = failed.count / count
        if share > MOST_FAILED:
            raise TrialFailure(
                f"reward {name} raised for {share:.0%} of {count} completions, and at most "
                f"{MOST_FAILED:.0%} may fail; first: {failed.first}"
            )


def require_finite(values: Sequence[float | None], name: str, when: str) -> None:
    """Raise `NonFiniteError` at the first NaN or inf; None passes."""
    for row, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise NonFiniteError(f"{name} of completion {row} is {value} {when}")


BeginJudging = Callable[[int, str], None]
"""Gets a problem's index and a completion of it, as soon as it is sampled."""


def build_early_judging(task: Task, problems: Sequence[Problem]) -> BeginJudging | None:
    """Return a function that lets the task begin with a completion; None if it cannot."""
    if not isinstance(task, JudgesEarly):
        return None
    judge: JudgesEarly = task

    def begin_judging(problem: int, completion: str) -> None:
        judge.begin_judging(problems[problem], completion)

    return begin_judging


def build_reward_functions(
    task: Task, problems: Sequence[Problem], shaping: Shaping | None = None
) -> list[RewardFunction]:
    """Build one function per reward, in the order of `task.rewards`; all score a batch only once.

    They read the column `problem` of the data set, an index into `problems`. `shaping` changes the
    rewards of the task; None leaves them as they are.
    """
    scorer = _BatchScorer(task, problems, shaping or Shaping())
    return [scorer.build_function(name) for name in task.rewards]


class _BatchScorer:
    """Rewards of the latest batch, on which TRL calls one reward function after another."""

    def __init__(self, task: Task, problems: Sequence[Problem], shaping: Shaping) -> None:
        self._task, self._problems, self._shaping = task, problems, shaping
        self._batch: Sequence[str] | None = None
        self._rewards: Rewards = {}
        self._failures: Mapping[str, RewardFailures] = {}
        self._warned: set[str] = set()

    def build_function(self, name: str) -> RewardFunction:
        """Build the function of one reward."""

        def reward(
            completions: Sequence[str],
            completion_ids: Sequence[Sequence[int]],
            problem: Sequence[int],
            log_metric: LogMetric | None = None,
            **_: Any,
        ) -> Sequence[float | None]:
            self._score(completions, [len(ids) for ids in completion_ids], problem)
            failed = self._failures.get(name)
            if log_metric is not None and failed is not None:
                # Always logged, because all processes must log the same metrics.
                log_metric(f"{REWARDS}{name}/failed", failed.count / len(completions))
                if failed.count and name not in self._warned:
                    self._warned.add(name)
                    _log.warning("reward %s raised (reported once): %s", name, failed.first)
            return self._rewards[name]

        reward.__name__ = name
        return reward

    def _score(
        self, completions: Sequence[str], lengths: Sequence[int], problem: Sequence[int]
    ) -> None:
        if completions is self._batch:
            return
        problems = [self._problems[index] for index in problem]
        scores = self._task.score(problems, completions, lengths)
        require_judged(scores.failures, len(completions))
        self._rewards = self._shaping.apply(scores.rewards, lengths, scores.partial)
        self._failures = scores.failures
        self._batch = completions
