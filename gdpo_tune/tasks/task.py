"""Base class of the tasks that ship: where problems come from, and how completions are scored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.metrics import MetricInfo
from gdpo_tune.core.registry import weigh_equally
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.task_info import STRICT, Scoring, TaskInfo
from gdpo_tune.core.trials import Direction
from gdpo_tune.tasks.base import Problem, Scores, Split
from gdpo_tune.tasks.dataset import describe_data, select_problems
from gdpo_tune.tasks.text_rewards import RangedReward, build_columns, length, write_answer

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result


class BuiltInTask(CloseableResource):
    """A task whose rewards and metrics are functions of one sample; it runs no code by itself."""

    reward_funcs: Mapping[str, RangedReward]
    optional_reward_funcs: Mapping[str, RangedReward] = {}
    """Used only if the space has a weight for them."""
    partial_funcs: Mapping[str, RangedReward] = {}
    """Partial credit in the same range, for rewards that are all or nothing."""
    released_funcs: Mapping[str, RangedReward] = {}
    """Rewards of the authors' code in the same range, where they differ."""
    metric_funcs: Mapping[str, RangedReward]
    directions: Mapping[str, Direction] = {"mean_length": "minimize"}
    """Metric -> the better direction; `maximize` if it is not here."""
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
        extra = {k: each for k, each in self.optional_reward_funcs.items() if k in optional_rewards}
        released = {} if scoring == STRICT else self.released_funcs
        self.reward_funcs = {**self.reward_funcs, **extra, **released}
        self.metric_funcs = {**self.metric_funcs, **released}
        self.rewards, self.metrics = tuple(self.reward_funcs), tuple(self.metric_funcs)
        self.instructions = self.format_request.format(limit=training.length_limit)
        self._length_limit = training.length_limit
        self._data = data or DataSettings()

    @classmethod
    def describe(cls, embedded: str, prompts: Mapping[str, int], **others: Any) -> TaskInfo:
        """Return what the registry says about the task; `others` are fields of `TaskInfo`."""
        funcs = cls.reward_funcs
        metrics, optional = (
            {
                name: MetricInfo(
                    cls.directions.get(name, "maximize"), each.low, each.high, each.doc
                )
                for name, each in some.items()
            }
            for some in (cls.metric_funcs, cls.optional_reward_funcs)
        )
        return TaskInfo(
            build=cls,
            rewards={name: (each.low, each.high) for name, each in funcs.items()},
            metrics=metrics,
            published=weigh_equally(funcs),
            embedded=embedded,
            prompts=prompts,
            length_reward=next((name for name, each in funcs.items() if each is length), None),
            partial_reward=next(iter(cls.partial_funcs), None),
            optional_rewards=optional,
            offers_released=bool(cls.released_funcs),
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
        self,
        problems: Sequence[Problem],
        completions: Sequence[str],
        lengths: Sequence[int],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Mapping[str, Any] | None = None,
    ) -> Scores:
        """Score N completions, for training and for held-out evaluation alike; see `Task`."""
        results = self._run_programs(problems, completions)
        facts = [problem.data for problem in problems]
        columns = build_columns(facts, lengths, self._length_limit, results)

        @functools.cache  # a reward and its metric are the same function, which is called once
        def call(function: RangedReward) -> list[float | None]:
            return function(completions, **columns)

        rewards, metrics, partial = (
            {name: call(function) for name, function in each.items()}
            for each in (self.reward_funcs, self.metric_funcs, self.partial_funcs)
        )
        return Scores(rewards, metrics, partial=partial, results=results)

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
