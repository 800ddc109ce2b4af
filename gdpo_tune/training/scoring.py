"""Reward functions in TRL's form from a task's joint scores, and the checks of their values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from gdpo_tune.core.errors import NonFiniteError, TrialFailure
from gdpo_tune.core.shaping import Rewards, Shaping
from gdpo_tune.core.trial_files import REWARDS
from gdpo_tune.tasks.base import (
    MOST_FAILED,
    CallContext,
    JudgesEarly,
    Problem,
    Scores,
    Task,
    call_score,
    check_scores,
)

RewardFunction = Callable[..., Sequence[float | None]]
"""TRL's form: keyword arguments such as `completions`; one reward per completion."""
LogMetric = Callable[[str, float], None]
"""Callback of TRL by which a reward function logs a metric."""

_log = logging.getLogger(__name__)


def score_batch(
    task: Task,
    problems: Sequence[Problem],
    completions: Sequence[str],
    lengths: Sequence[int],
    context: CallContext,
) -> Scores:
    """Let a task judge N completions, and check their number, and their range if the task says it.

    Raises:
        TrialFailure: a check fails, or a reward function raised on too many of them.
    """
    count = len(completions)
    scores = call_score(task, problems, completions, lengths, context)
    for name, failed in scores.failures.items():
        share = failed.count / count
        if share > MOST_FAILED:
            raise TrialFailure(
                f"reward {name} raised for {share:.0%} of {count} completions, and at most "
                f"{MOST_FAILED:.0%} may fail; first: {failed.first}"
            )
    check_scores(scores, count, task)
    return scores


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
        self._scores = Scores({}, {})
        self._warned: set[str] = set()

    def build_function(self, name: str) -> RewardFunction:
        """Build the function of one reward."""

        def reward(
            completions: Sequence[str],
            completion_ids: Sequence[Sequence[int]],
            problem: Sequence[int],
            log_metric: LogMetric | None = None,
            trainer_state: Any = None,
            **_: Any,
        ) -> Sequence[float | None]:
            self._score(completions, completion_ids, problem, trainer_state)
            if log_metric is not None and name == self._task.rewards[0]:  # once a batch
                for metric, value in self._scores.logged:
                    log_metric(metric, value)
            failed = self._scores.failures.get(name)
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
        self,
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        problem: Sequence[int],
        trainer_state: Any,
    ) -> None:
        if completions is self._batch:
            return
        state = dict(vars(trainer_state)) if trainer_state else {}
        state.pop("stateful_callbacks", None)  # they cannot be sent to another process
        context = CallContext(completion_ids, state)
        lengths = [len(ids) for ids in completion_ids]
        problems = [self._problems[index] for index in problem]
        self._scores = score_batch(self._task, problems, completions, lengths, context)
        self._rewards = self._shaping.apply(self._scores.rewards, lengths, self._scores.partial)
        self._batch = completions
