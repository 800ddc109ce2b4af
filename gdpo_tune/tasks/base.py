"""What every task offers to the trainer.

N completions of one call; `problems` may name the same problem several times (a group).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from gdpo_tune.core.closing import Closing
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.tasks.rewards import length_reward

_OWN_PROBLEMS = DataSettings()

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
    """What the task itself put there, made of JSON types only."""


@dataclass(frozen=True)
class Failures:
    """What a reward function could not judge because it raised."""

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
    failures: Mapping[str, Failures] = field(default_factory=dict[str, Failures])
    """Reward name -> what its function raised; for those alone whose function may raise."""
    partial: Mapping[str, Sequence[float | None]] = field(
        default_factory=dict[str, Sequence[float | None]]
    )
    """Reward name -> N values in its range that give partial credit, where the reward itself is all
    or nothing: what a trial with `partial_credit` is trained on."""


class Task(Protocol):
    """A source of problems and the judge of completions. Use it as a context manager.

    A trial makes its task with `Task(training, sandbox, data)`: the `TrainingSettings`,
    `SandboxSettings` and `DataSettings` of the sweep.
    """

    rewards: tuple[str, ...]
    metrics: tuple[str, ...]
    instructions: str
    """The format that is rewarded, in words for a policy that does not know it; may be empty. Each
    tag in it is one that completions are judged by."""

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems with distinct prompts; the same arguments give the same list."""
        ...

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Judge N completions.

        Args:
            problems: N problems, the one that each completion answers.
            completions: N texts, decoded without the end token.
            lengths: N token counts, the end token included.
        """
        ...

    def environment(self) -> dict[str, str]:
        """Provenance that only the task knows, such as the sandbox's tier."""
        ...

    def close(self) -> None:
        """End every process that the task started."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class WithoutProcesses(Closing):
    """The part of a task that judges in this process alone: there is nothing to report or end."""

    rewards: tuple[str, ...]
    metrics: tuple[str, ...]
    format_request: str
    """The instructions, with `{limit}` where the tokens of the length reward belong."""

    def __init__(
        self,
        settings: TrainingSettings,
        sandbox: SandboxSettings | None = None,
        data: DataSettings = _OWN_PROBLEMS,
    ) -> None:
        """No code is run, so `sandbox` has no effect."""
        self.instructions = self.format_request.format(limit=settings.length_limit)
        self._settings = settings
        self._data = data

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Judge N completions, for training and for held-out evaluation alike; see `Task`."""
        limit = self._settings.length_limit
        verdicts = [
            {
                **self._judge(problem, completion),
                "length": length_reward(length, limit),
                "mean_length": float(length),
            }
            for problem, completion, length in zip(problems, completions, lengths, strict=True)
        ]

        def columns(names: Sequence[str]) -> dict[str, list[float | None]]:
            return {name: [verdict[name] for verdict in verdicts] for name in names}

        return Scores(rewards=columns(self.rewards), metrics=columns(self.metrics))

    @abstractmethod
    def _judge(self, problem: Problem, completion: str) -> dict[str, float]:
        """Every reward and metric of a completion but those that its length decides."""

    def environment(self) -> dict[str, str]:
        """The data that problems come from, if any; what else there is, the trainer knows.

        Raises:
            DataError: the data set cannot be had, read or used.
        """
        from gdpo_tune.tasks.data import describe  # which makes problems, hence needs this module

        return describe(self._data)

    def close(self) -> None:
        """There is nothing to end."""
