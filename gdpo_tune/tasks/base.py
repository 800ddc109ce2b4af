"""Types that tasks share: problems and verdicts.

N completions of one call; `problems` may name the same problem several times (a group).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from gdpo_tune.core.errors import TrialFailure

if TYPE_CHECKING:
    from gdpo_tune.sandbox import Result

TIME_LIMIT = 600.0
"""Seconds for one call of a function, if its class does not say otherwise."""
MOST_VALUES = 10_000
"""Values that are counted beyond the right number of them: an iterator may never end."""
ROUNDING = 1e-6
"""Share of its limits by which a value may leave its range, as sums of decimal fractions do."""

RewardFunction = Callable[..., Any]
"""Called with TRL's keywords, such as `completions`; returns N values, each a number or None."""
EvaluationFunction = Callable[..., Sequence[float]]
"""Called with a policy, its tokenizer, the name of a split and a seed; returns one number for each
item of its own, such as the questions of a benchmark."""
Split = Literal["warm_start", "train", "validation", "test"]
"""Disjoint sets of prompts: for the embedded policy's recipe, training, the search, the front."""


@dataclass(frozen=True)
class Problem:
    """One prompt and what is needed to score a completion of it."""

    prompt: str
    """Exactly what the policy reads before its first token."""
    family: str
    """Kind of problem, for reports."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The task's own facts about the problem, made of JSON types only."""
    turns: Sequence[Mapping[str, str]] = ()
    """The prompt as messages with `role` and `content`, if it is a conversation; `prompt` is then a
    text of it, distinct from those of other conversations."""


@dataclass(frozen=True)
class Scores:
    """Verdicts on N completions, in their order."""

    rewards: Mapping[str, Sequence[float | None]]
    """Reward name -> N training signals, unweighted; None means not scored."""
    metrics: Mapping[str, Sequence[float | None]]
    """Metric name -> N contributions; the metric itself is the mean of those that are not None."""
    failures: Mapping[str, Mapping[int, str]] = field(default_factory=dict[str, Mapping[int, str]])
    """Reward name -> row that is None because its function raised -> the error, in one line; for
    those alone whose function may raise."""
    partial: Mapping[str, Sequence[float | None]] = field(
        default_factory=dict[str, Sequence[float | None]]
    )
    """Reward name -> N values with partial credit, for rewards that are all or nothing."""
    logged: Sequence[tuple[str, float]] = ()
    """Metrics that reward functions logged."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Extra columns that reward functions logged -> N values."""
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """Reward name -> time of its function, where that is known."""
    results: Sequence[Result | None] = field(default=(), compare=False)
    """N results of programs in the sandbox, empty for a task that runs none. Verdicts are equal
    wherever rewards are; the times in them are measured."""


def read_reward_values(
    values: Any, count: int, name: str, item: str = "completion"
) -> list[float | None]:
    """Return what a reward or metric gave N completions, or other items, as numbers.

    Raises:
        TrialFailure: it is not one number or None for each of `count` items.

    Source: TRL 1.16, `GRPOTrainer._calculate_rewards`, which raises for another number.
    """
    result: list[float | None] = []
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        reason = f"{_describe_value(values)}, in place of a list of {count} numbers"
    elif len(listed := list(islice(cast("Iterable[Any]", values), count + MOST_VALUES))) != count:
        reason = f"{len(listed)} values for {count} {item}s"
    else:
        value: Any = None
        try:
            for value in listed:
                if isinstance(value, str | bytes):
                    raise TypeError
                result.append(None if value is None else float(value))
            return result
        except (TypeError, ValueError):
            row = len(result)
            reason = f"{_describe_value(value)}, for {item} {row}, in place of a number"
    fix = f"return a list with one number, or None, for each {item}"
    raise TrialFailure(f"{name} returned {reason}\n    fix: {fix}")


def _describe_value(value: Any) -> str:
    return f"{reprlib.repr(value)}, a {type(value).__name__}"


def check_ranges(scores: Scores, task: Any, item: str = "completion") -> None:
    """Refuse a value outside the range that the task states; `item` is what each is a value of.

    NaN and infinity pass: what they mean depends on where they occur.

    Raises:
        TrialFailure: the message names function, value, range and what to do.
    """
    ranges, places = getattr(task, "ranges", {}), getattr(task, "places", {})
    for name, values in {**scores.metrics, **scores.rewards}.items():
        low, high = ranges.get(name, (-math.inf, math.inf))
        slack = ROUNDING * max([1.0, *(abs(v) for v in (low, high) if math.isfinite(v))])
        for row, value in enumerate(values):
            if value is None or not math.isfinite(value) or low - slack <= value <= high + slack:
                continue
            kind = "reward" if name in scores.rewards else "metric"
            place = f" ({places[name]})" if name in places else ""
            raise TrialFailure(
                f"{kind} {name}{place} is {value:g} for {item} {row}, outside its range "
                f"({low:g}, {high:g})\n    fix: correct the function, or the entry of {name} in "
                "`ranges`"
            )


class Task(AbstractContextManager["Task"], Protocol):
    """A source of problems, which also scores completions. Use it as a context manager.

    A trial builds its task with the sections `training:`, `sandbox:` and `data:` of the sweep. A
    task with a method `begin_scoring(problem, completion)` begins what `score` needs while other
    completions are still being sampled; any thread may call it.
    """

    rewards: tuple[str, ...]
    metrics: tuple[str, ...]
    instructions: str
    """The rewarded format in words, with its tags, for a policy that does not know it; or empty."""
    directory: Path | None
    """That of the trial, if a trial scores: judges keep their answers there."""

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` problems with distinct prompts; equal arguments give equal lists."""
        ...

    def score(
        self,
        problems: Sequence[Problem],
        completions: Sequence[str],
        lengths: Sequence[int],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: Mapping[str, Any] | None = None,
    ) -> Scores:
        """Score N completions, which lack the end token that `lengths` in tokens include.

        `completion_ids` are their tokens, None where the texts come from no policy;
        `trainer_state` are fields of the trainer's state, as far as they are known.
        """
        ...

    def environment(self) -> dict[str, str]:
        """Return provenance that only the task knows, such as the sandbox's tier."""
        ...

    def close(self) -> None:
        """End every process that the task started."""
        ...
