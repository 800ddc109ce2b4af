"""From a task's joint verdict to the reward functions that TRL expects; the guard on numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gdpo_tune.errors import NonFiniteError
from gdpo_tune.tasks.base import Problem, Scores, Task

RewardFunction = Callable[..., Sequence[float | None]]
"""TRL's form: keyword arguments such as `completions`; one reward a completion."""


def require_finite(values: Sequence[float | None], what: str, when: str) -> None:
    """Raise `NonFiniteError` at the first NaN or inf; None passes."""
    for row, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise NonFiniteError(f"{what} of completion {row} is {value} {when}")


def reward_functions(task: Task, problems: Sequence[Problem]) -> list[RewardFunction]:
    """One function a reward, in the order of `task.rewards`; together they score a batch once.

    They read the data set's column `problem`, an index into `problems`.
    """
    joint = _JointVerdict(task, problems)
    return [joint.function(name) for name in task.rewards]


class _JointVerdict:
    """Scores of the latest batch: TRL calls the reward functions one after another on it."""

    def __init__(self, task: Task, problems: Sequence[Problem]) -> None:
        self._task = task
        self._problems = problems
        self._batch: Sequence[str] | None = None
        self._scores = Scores(rewards={}, metrics={})

    def function(self, name: str) -> RewardFunction:
        def reward(
            completions: Sequence[str],
            completion_ids: Sequence[Sequence[int]],
            problem: Sequence[int],
            **_: Any,
        ) -> Sequence[float | None]:
            self._judge(completions, completion_ids, problem)
            return self._scores.rewards[name]

        reward.__name__ = name
        return reward

    def _judge(
        self,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        problem: Sequence[int],
    ) -> None:
        if completions is self._batch:
            return
        problems = [self._problems[index] for index in problem]
        lengths = [len(ids) for ids in completion_ids]
        self._scores = self._task.score(problems, completions, lengths)
        self._batch = completions
