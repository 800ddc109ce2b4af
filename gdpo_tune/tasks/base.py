"""Types that tasks share: problems, samples to judge, rewards and verdicts.

N completions of one call; `problems` may name the same problem several times (a group).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result

Split = Literal["warm_start", "train", "validation", "test"]
"""Disjoint sets of prompts: for the embedded policy's recipe, training, the search, the front."""


@dataclass(frozen=True)
class Problem:
    """One prompt and what is needed to judge a completion of it."""

    prompt: str
    """Exactly what the policy reads before its first token."""
    family: str
    """Kind of problem, for reports."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The task's own facts about the problem, made of JSON types only."""


class Sample(NamedTuple):
    """One completion with everything that a reward or a metric may look at."""

    problem: Problem
    completion: str
    tokens: int
    """Length of the completion, the end token included."""
    length_limit: int
    """`training.length_limit` in tokens."""
    result: Result | None = None
    """Result of its program in the sandbox; None if there is no program."""


@dataclass(frozen=True)
class Reward:
    """A reward: its name, its range, and the function that judges one completion."""

    name: str
    low: float
    high: float
    score: Callable[[Sample], float | None]
    """None means not scored."""
    doc: str
    """Meaning of its mean over completions, in words."""
    partial: Callable[[Sample], float] | None = None
    """Partial credit in the same range, for a reward that is all or nothing."""
    released: Callable[[Sample], float | None] | None = None
    """Score of the authors' code in the same range, where it differs from `score`."""


@dataclass(frozen=True)
class RewardFailures:
    """Completions that a reward function could not judge because it raised."""

    count: int = 0
    """Completions; their reward is None."""
    first: str = ""
    """The last line of the first traceback."""


@dataclass(frozen=True)
class Scores:
    """Verdicts on N completions, in their order."""

    rewards: Mapping[str, Sequence[float | None]]
    """Reward name -> N training signals, unweighted; None means not scored."""
    metrics: Mapping[str, Sequence[float | None]]
    """Metric name -> N contributions; the metric itself is the mean of those that are not None."""
    failures: Mapping[str, RewardFailures] = field(default_factory=dict[str, RewardFailures])
    """Reward name -> failures of its function; for those alone whose function may raise."""
    partial: Mapping[str, Sequence[float | None]] = field(
        default_factory=dict[str, Sequence[float | None]]
    )
    """Reward name -> N values with partial credit, for rewards that are all or nothing: the signal
    of a trial with `partial_credit`."""
    results: Sequence[Result | None] = field(default=(), compare=False)
    """N results of programs in the sandbox, empty for a task that runs none. Verdicts are equal
    wherever rewards are; the times in them are measured."""


class Task(AbstractContextManager["Task"], Protocol):
    """A source of problems and the judge of completions. Use it as a context manager.

    A trial builds its task with `Task(training, sandbox, data)`: the `TrainingSettings`,
    `SandboxSettings` and `DataSettings` of the sweep.
    """

    rewards: tuple[str, ...]
    """Names of the rewards that `score` gives."""
    metrics: tuple[str, ...]
    """Names of the metrics that `score` gives."""
    instructions: str
    """The rewarded format in words, for a policy that does not know it; may be empty. Rewards look
    for each tag that it names."""

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` problems with distinct prompts; equal arguments give equal lists."""
        ...

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Judge N completions, each of the problem at its position.

        The texts lack the end token; `lengths` are their tokens, the end token included.
        """
        ...

    def environment(self) -> dict[str, str]:
        """Return provenance that only the task knows, such as the sandbox's tier."""
        ...

    def close(self) -> None:
        """End every process that the task started."""
        ...


@runtime_checkable
class JudgesEarly(Protocol):
    """A task that can begin with a completion while others are still being sampled."""

    def begin_judging(self, problem: Problem, completion: str) -> None:
        """Begin what `score` needs of a completion, in the background; any thread may call it.

        `score` gives the same values without it, later.
        """
        ...
