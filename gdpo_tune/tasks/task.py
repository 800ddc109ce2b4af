"""Base class of the tasks that ship: where problems come from, and how completions are scored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.metrics import MetricInfo
from gdpo_tune.core.registry import weigh_equally
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.task_info import STRICT, Scoring, TaskInfo
from gdpo_tune.tasks.base import Problem, Reward, Sample, Scores, Split
from gdpo_tune.tasks.dataset import describe_data, select_problems
from gdpo_tune.tasks.rewards import write_answer

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result


@dataclass(frozen=True)
class TaskMetric(MetricInfo):
    """A held-out metric of a task: the mean of `measure` over completions."""

    measure: Callable[[Sample], float | None]


def measure_rewards(rewards: Iterable[Reward]) -> dict[str, TaskMetric]:
    """Return a held-out metric for each reward, under the reward's name."""
    return {r.name: TaskMetric("maximize", r.low, r.high, r.doc, r.score) for r in rewards}


MEAN_LENGTH = TaskMetric(
    "minimize", 0, float("inf"), "mean tokens of a completion", lambda sample: float(sample.tokens)
)
"""The held-out metric `mean_length`."""


class BuiltInTask(CloseableResource):
    """A task whose rewards and metrics are functions of one sample; it runs no code by itself."""

    reward_infos: tuple[Reward, ...]
    optional_reward_infos: tuple[Reward, ...] = ()
    """Used only if the space has a weight for them."""
    metric_infos: Mapping[str, TaskMetric]
    format_request: str
    """The instructions, with `{limit}` where the tokens of the length reward belong."""
    generate: Callable[[Split, int, int], list[Problem]]
    """Draws `count` problems of a split by a seed, for a sweep without a data set."""

    def __init__(
        self,
        training: TrainingSettings,
        sandbox: SandboxSettings | None = None,
        data: DataSettings | None = None,
        optional_rewards: Collection[str] = (),
        scoring: Scoring = STRICT,
    ) -> None:
        """Switch optional rewards on; `scoring` also decides metrics with names of rewards."""
        self._settings = sandbox or SandboxSettings()
        extra = (info for info in self.optional_reward_infos if info.name in optional_rewards)
        infos = (*self.reward_infos, *extra)
        is_strict = scoring == STRICT
        self.active_rewards = tuple(
            r if is_strict or r.released is None else replace(r, score=r.released) for r in infos
        )
        """Rewards that `score` gives."""
        self._measures = {name: info.measure for name, info in self.metric_infos.items()}
        if not is_strict:
            self._measures |= {r.name: r.score for r in self.active_rewards if r.released}
        self.rewards = tuple(reward.name for reward in self.active_rewards)
        self.metrics = tuple(self.metric_infos)
        self.instructions = self.format_request.format(limit=training.length_limit)
        self._length_limit = training.length_limit
        self._data = data or DataSettings()

    @classmethod
    def describe(cls, embedded: str, prompts: Mapping[str, int], **others: Any) -> TaskInfo:
        """Return what the registry says about the task; `others` are fields of `TaskInfo`."""
        rewards = _get_ranges(cls.reward_infos)
        return TaskInfo(
            build=cls,
            rewards=rewards,
            metrics=cls.metric_infos,
            published=weigh_equally(rewards),
            embedded=embedded,
            prompts=prompts,
            optional_rewards=_get_ranges(cls.optional_reward_infos),
            offers_released=any(reward.released for reward in cls.reward_infos),
            **others,
        )

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` problems with distinct prompts; see `Task`.

        Raises:
            UsageError: the split holds fewer, or the data cannot be used.
        """
        if self._data.source:
            return select_problems(self._data, split, count, seed)
        return self.generate(split, count, seed)

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Score N completions, for training and for held-out evaluation alike; see `Task`."""
        results = self._run_programs(problems, completions)
        samples = [
            Sample(problem, completion, length, self._length_limit, result)
            for problem, completion, length, result in zip(
                problems, completions, lengths, results or [None] * len(problems), strict=True
            )
        ]

        @functools.cache  # a reward and its metric are the same function, which is called once
        def measure(function: Callable[[Sample], float | None]) -> list[float | None]:
            return list(map(function, samples))

        return Scores(
            rewards={reward.name: measure(reward.score) for reward in self.active_rewards},
            metrics={name: measure(each) for name, each in self._measures.items()},
            partial={r.name: measure(r.partial) for r in self.active_rewards if r.partial},
            results=results,
        )

    def write_reference(self, problem: Problem) -> str:
        """Return the solution of a problem that the task wrote, as a completion."""
        return write_answer(problem.data["thoughts"]["terse"], problem.data["solution"])

    def _run_programs(
        self, problems: Sequence[Problem], completions: Sequence[str]
    ) -> Sequence[Result | None]:
        """Return N results, None where there is no program to run; empty if the task runs none."""
        return ()

    def environment(self) -> dict[str, str]:
        """Return where problems come from, if that is a data set."""
        return describe_data(self._data)

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def _get_ranges(rewards: Sequence[Reward]) -> dict[str, tuple[float, float]]:
    return {reward.name: (reward.low, reward.high) for reward in rewards}
